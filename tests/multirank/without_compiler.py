"""Runs a script in a process without a C++ compiler, as far as torch can tell: to ask for one is an error."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from torch._inductor.cpp_builder import CppBuilder


def build(self: Any) -> None:
    raise AssertionError("the compiler was asked for something")


if __name__ == "__main__":
    CppBuilder.build = build  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
