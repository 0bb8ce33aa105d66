"""The exit code that is named for a SystemExit is the one that the interpreter ends with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from initopt.exits import Exits


@pytest.mark.parametrize(
    "status", ["-1", "256 + 3", "1 << 70", "-(1 << 70)", "(1 << 63) - 3", "-(1 << 63)", "True", "''", "None"]
)
def test_the_exit_code_is_the_interpreter_s(status: str) -> None:
    found = Exits().follow(SystemExit(eval(status)), 0.0)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"raise SystemExit({status})"], capture_output=True)
    assert found is not None and found.code == done.returncode
