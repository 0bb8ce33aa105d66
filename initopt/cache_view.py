"""What an artifact store holds, in words and tables for a terminal, and the same data as JSON. It only reads.

It needs no torch and no secret: what it shows is handed to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from rich.text import Text

from initopt.report import JSON_VERSION, View
from initopt.terminal_lines import QUIET, count, next_verbs, table, wrap

if TYPE_CHECKING:
    from initopt.compile_cache.store import Entry

_SHORT = 12
"""Digits of a digest that are shown; `--remove` takes as many."""

_LONG = 60


def cache_view(
    entries: Sequence[Entry],
    documents: Mapping[str, int],
    *,
    place: str,
    asked: str = "",
    removed: Sequence[str] = (),
    width: int = 80,
) -> View:
    """What is stored, by key, the key that was used last first; for each other one in what it differs from that.

    `asked` is the place as the user wrote it, empty for the default one; `removed` are the digests that were removed
    just now.
    """
    total = sum(entry.bytes for entry in entries) + sum(documents.values())
    data = {
        "version": JSON_VERSION,
        "place": place,
        "bytes": total,
        "removed": list(removed),
        "documents": dict(documents),
        "keys": [
            {**asdict(entry), "parts": dict(entry.parts), "differs": list(_differs(entry, entries[0]))}
            for entry in entries
        ],
    }
    lines = [line for digest in removed for line in wrap(f"Removed {digest}.", width)]
    counts = [count(len(entries), "key"), count(len(documents), "document"), size(total)]
    lines += wrap(" · ".join((place, *counts)), width, "bold")
    if not entries:
        said = "Nothing compiled is stored here yet: a trainer stores it after its first start."
        return View((*lines, Text(), *wrap(said, width), *next_verbs(width, "compile")), data)
    rows = [("key", "bundles", "size", "made", "last used")]
    rows += [(e.digest[:_SHORT], str(e.bundles), size(e.bytes), _moment(e.created), _moment(e.used)) for e in entries]
    lines += [Text(), *table(rows)]
    for entry in entries:
        lines += [Text(), *_about(entry, entries[0], width)]
    lines += [Text(), *wrap("What a key says of itself is for reading: it is not signed.", width, QUIET)]
    if documents:
        said = "Documents are what starts have learned: calls and sizes, kernels that won, what a CPU can do."
        lines += wrap(said, width, QUIET)
    lines += next_verbs(
        width, " ".join(filter(None, ("cache", asked, "--remove", entries[-1].digest[:_SHORT]))), "compile"
    )
    return View(tuple(lines), data)


def size(value: int) -> str:
    """An amount of storage (1 kB = 1024 bytes).

    >>> size(0), size(700), size(300_000), size(2_300_000), size(80 * 1024**3)
    ('0', '700 B', '293 kB', '2.2 MB', '80.0 GB')
    """
    if value < 1024:
        return f"{value} B" if value else "0"
    if value < 1024**2:
        return f"{value / 1024:.0f} kB"
    return f"{value / 1024**2:.1f} MB" if value < 1024**3 else f"{value / 1024**3:.1f} GB"


def _about(entry: Entry, first: Entry, width: int) -> list[Text]:
    name = entry.digest[:_SHORT]
    if not entry.parts:
        return wrap(f"{name}: what it was made from is not known (no readable key.json)", width, rest=2)
    if entry is first or not first.parts:
        lines = wrap(f"{name}, the one used last:" if entry is first else f"{name}:", width)
        shown = tuple(entry.parts)
    else:
        shown = _differs(entry, first)
        lines = wrap(f"{name} differs from it in {count(len(shown), 'part')}:", width)
    for part in shown:
        lines += wrap(f"{part}: {_clipped(entry.parts.get(part, 'none'))}", width, rest=4, first=2)
    return lines


def _differs(entry: Entry, other: Entry) -> tuple[str, ...]:
    if not entry.parts or not other.parts:
        return ()
    names = dict.fromkeys((*other.parts, *entry.parts))
    return tuple(name for name in names if entry.parts.get(name) != other.parts.get(name))


def _clipped(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _moment(unix: float) -> str:
    return f"{datetime.fromtimestamp(unix, timezone.utc):%Y-%m-%d %H:%M} UTC" if unix else "unknown"
