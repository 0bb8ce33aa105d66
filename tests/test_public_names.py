"""The public names: importable, documented, and listed in docs/names.md. The linter sorts them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import initopt

PAGE = Path(__file__).parents[1] / "docs" / "names.md"


def test_each_name_is_there() -> None:
    assert [name for name in initopt.__all__ if not hasattr(initopt, name)] == []


def test_each_name_says_what_it_is() -> None:
    bare = [name for name in initopt.__all__ if callable(value := getattr(initopt, name)) and not inspect.getdoc(value)]
    assert bare == []


def test_the_page_lists_the_same_names() -> None:
    text = PAGE.read_text()
    assert sorted(re.findall(r"^[-|] ?`(\w+)", text, flags=re.MULTILINE)) == sorted(initopt.__all__)
