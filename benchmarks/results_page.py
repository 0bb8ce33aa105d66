"""What pages in results/ have in common: a table, a ratio with its range, and the machine that the figures are from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from initopt import Run, bench


def table(columns: Sequence[str], rows: Iterable[str]) -> list[str]:
    """The lines of a table; a row is a line already."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows]


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Their median and range, each as `form` says."""
    of = bench.Spread.of(values)
    return "{} ({} ... {})".format(*map(form.format, (of.median, of.min, of.max)))


def made_on(run: Run) -> tuple[str, str]:
    """The machine that a run is from, and the versions, as two lines of a sentence."""
    header = run.headers[min(run.headers)]
    versions = ", ".join(f"{name} {version}" for name, version in (header.versions or {}).items())
    return f"one host of {header.cores} cores,", f"{versions}."
