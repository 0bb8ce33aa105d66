"""Lines for a terminal that all views share: wrapped text, columns, how many of what, the next command."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

LONGEST = "bold red"
QUIET = "dim"


def wrap(text: str | Text, width: int, style: str = "", *, first: int = 0, rest: int = 0) -> list[Text]:
    """The text in lines of at most `width` cells, broken at blanks; a longer word is left whole.

    `first` blanks stand before the first line, `rest` before the others.
    """
    left = Text(text, style=style) if isinstance(text, str) else text
    if first:
        left = Text(" " * first, style=style) + left
    lines: list[Text] = []
    while True:
        room = width if not lines else width - rest
        at = left.plain.rfind(" ", 1, room + 1) if len(left) > room else -1
        if len(left) > room and (at < 0 or not left.plain[:at].strip()):
            at = left.plain.find(" ", len(left.plain) - len(left.plain.lstrip()))
        line, *more = left.divide([at, at + 1]) if at > 0 else [left]
        line.rstrip()
        lines.append(Text(" " * rest) + line if lines else line)
        if not more:
            return lines
        left = more[1]


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[Text]:
    """Columns padded to their widest cell, the first `left` of them to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(Text("  ".join(cells).rstrip(), style=QUIET if number == 0 else ""))
    return lines


def count(number: int, what: str) -> str:
    """So many of something.

    >>> count(1, "rank"), count(0, "rank")
    ('1 rank', '0 ranks')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def next_verbs(width: int, *verbs: str) -> list[Text]:
    """What to ask next."""
    return wrap("next: " + ", ".join(f"initopt {verb}" for verb in verbs), width, QUIET, rest=2)
