"""One start-up on a time axis: recorded above planned, a row per lane, the longest chain in red. SVG or PNG.

The bars are plain data (`panels`), so that what the picture shows can be read and tested without drawing it. The same
run always gives the same bytes. It knows one rank at a time: the chain across ranks is text (see `report`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.sax.saxutils import escape

from initopt.chain import SKEW, UNNAMED, Link, outer_steps, rank_chain
from initopt.compiles import compiled_in
from initopt.planned import planned
from initopt.report import about, labels, seconds, title, versions
from initopt.runs import last_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from initopt.record import Span
    from initopt.runs import Run

RED, GREY, QUEUE, INK, FAINT = "#c8372d", "#cfd4da", "#1f6f8b", "#22262b", "#6b7280"

# Inches, except the font size in points.
_WIDTH, _RIGHT, _EDGE = 11.0, 0.35, 0.25
_BAR, _LABEL, _ROW_GAP = 0.27, 0.17, 0.12
_FONT = 8.5
_LEVELS, _LEVELS_LONGEST = 4, 8
_LANE_LETTERS = 28
_HATCH, _COMPILED, _DOTS = "/////", "....", (0, (1, 0.9))


class PlotError(RuntimeError):
    """A picture that can't be drawn here. The message says what to install or to change."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A step in a panel. Seconds from the start of the rank's process.

    `waits`, `compiles` and `imports` (each with the package) are parts of it.
    """

    name: str
    lane: str
    start: float
    end: float
    longest: bool
    waits: tuple[tuple[float, float], ...] = ()
    about: str = ""
    compiles: tuple[tuple[float, float], ...] = ()
    imports: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Queue:
    """The time from `start` to `end` in which the longest chain stood still before `step`, behind others."""

    step: str
    lane: str
    start: float
    end: float
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One schedule of a start-up. `first_batch` is its end, in seconds from the start of the process."""

    name: Literal["recorded", "planned"]
    rank: int
    first_batch: float | None
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    queues: tuple[Queue, ...] = field(default=())


def panels(run: Run, rank: int) -> list[Panel]:
    """What was recorded on `rank`, and if the run has a graph what that graph would make of it."""
    zero = run.zero[rank]
    found = [_panel("recorded", run, rank, run.of_rank(rank), zero)]
    if run.graph is not None and found[0].first_batch is not None:
        found.append(_panel("planned", run, rank, planned(run, rank), 0.0))
    return found


def data(run: Run, rank: int) -> dict[str, Any]:
    """What the picture shows, for `--json`."""
    return {**about(run), "rank": rank, "panels": [asdict(panel) for panel in panels(run, rank)]}


def form_of(path: Path) -> Literal["svg", "png"]:
    """The form of picture that a file's name asks for. Raises PlotError for another one."""
    form = path.suffix.lower()
    if form == ".svg":
        return "svg"
    if form == ".png":
        return "png"
    raise PlotError(f"{path}: a picture is .svg or .png (for other tools: --trace FILE.json.gz, or --json)")


def draw(run: Run, rank: int, *, form: Literal["svg", "png"] = "svg") -> bytes:
    """The picture as a file. Raises PlotError where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("the picture needs matplotlib: pip install 'initopt[plot]'") from error
    style: Any = {
        "svg.hashsalt": "initopt",
        "hatch.linewidth": 0.7,
        "font.family": "DejaVu Sans",
        "font.size": _FONT,
        # Else a text is measured narrower than SVG shows it.
        "text.hinting": "none",
    }
    with matplotlib.rc_context(style):
        shown = panels(run, rank)
        figure = Figure(figsize=(_WIDTH, 1.0), facecolor="white")
        canvas: Any = FigureCanvasAgg(figure)
        page = _Page(figure, canvas.get_renderer())
        page.compose(run, shown)
        target = io.BytesIO()
        # A date or version in the file would make two drawings of one run differ.
        if form == "png":
            figure.savefig(target, format="png", dpi=150, metadata={"Software": "initopt"})
            return target.getvalue()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": "initopt"})
    return _with_tooltips(target.getvalue().decode(), shown).encode()


def _panel(name: Literal["recorded", "planned"], run: Run, rank: int, spans: Sequence[Span], zero: float) -> Panel:
    steps = outer_steps(spans)
    last = last_step(spans, run.graph, run.end)
    links: list[Link] = rank_chain(spans, run.graph, zero=zero, end=run.end) if last is not None else []
    on_chain = {(link.step, link.start) for link in links}
    lane_of = {span.name: span.lane for span in steps}
    meetings: dict[str, list[Span]] = {}
    for span in spans:
        if span.kind == "collective" and span.wait > SKEW:
            meetings.setdefault(span.step, []).append(span)
    compiled = compiled_in(run, rank) if name == "recorded" else {}
    packages: dict[str, list[Span]] = {}
    for span in spans:
        if span.kind == "import" and span.step:
            packages.setdefault(span.step, []).append(span)
    bars = []
    for span in steps:
        waits = [(c.start, c.start + c.wait) for c in meetings.get(span.name, ()) if span.start <= c.start <= span.end]
        if not waits and span.wait > SKEW:
            waits = [(span.start, span.start + span.wait)]
        longest = (span.name, span.start) in on_chain
        turns = compiled.get((span.name, span.start), ())
        moved = tuple((start - zero, end - zero) for start, end in waits)
        compiles = tuple((one.start - zero, min(one.end, span.end) - zero) for one in turns)
        imports = tuple(
            (one.start - zero, min(one.end, span.end) - zero, one.name.removeprefix("import "))
            for one in packages.get(span.name, ())
            if span.start <= one.start < span.end and one.lane == span.lane
        )
        words = _words(run, span, longest=longest, compiling=sum(one.end - one.start for one in turns), imports=imports)
        times = span.start - zero, span.end - zero
        bars.append(Bar(span.name, span.lane, *times, longest, moved, words, compiles, imports))
    queues = tuple(
        Queue(link.step, lane_of[link.step], link.start - link.queue - zero, link.start - zero, link.behind)
        for link in reversed(links)
        if link.queue > SKEW and link.step != UNNAMED
    )
    lanes = tuple(sorted({bar.lane for bar in bars}, key=_lane_order))
    return Panel(name, rank, last.end - zero if last is not None else None, lanes, tuple(bars), queues)


def _words(
    run: Run, span: Span, *, longest: bool, compiling: float, imports: Sequence[tuple[float, float, str]]
) -> str:
    took = span.end - span.start
    said = [f"{span.name}: {seconds(took)}"]
    if imports:
        said.append(", ".join(f"{package} {seconds(end - start)}" for start, end, package in imports))
    if span.wait > SKEW:
        said.append(f"{seconds(took - span.wait)} work, {seconds(span.wait)} wait for other ranks")
    if compiling > SKEW:
        said.append(f"{seconds(compiling)} compiling")
    if longest:
        said.append("on the longest chain")
    if run.graph is not None and span.name in run.graph:
        needs = [edge.before for edge in run.graph.predecessors(span.name) if edge.kind != "resource"]
        if needs:
            said.append("needs " + ", ".join(needs))
    if span.call_site:
        said.append(span.call_site)
    if span.error:
        said.append(f"failed: {span.error}")
    return "\n".join(said)


def _lane_order(lane: str) -> tuple[int, str]:
    kinds = ("main", "comms", "cuda", "process", "io")
    kind = lane.partition(":")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), lane)


class _Page:
    """Lays the panels out in inches from the top, then draws."""

    def __init__(self, figure: Figure, renderer: Any) -> None:
        self.figure = figure
        self.renderer = renderer
        self.left = 0.0

    def compose(self, run: Run, shown: Sequence[Panel]) -> None:
        self.goal = run.goal
        self.left = (
            _EDGE + 0.15 + max((self._wide(_clipped(lane)) for panel in shown for lane in panel.lanes), default=0.0)
        )
        inner = _WIDTH - self.left - _RIGHT
        last = max((bar.end for panel in shown for bar in panel.bars), default=1.0)
        limit = last * 1.01
        per_second = inner / limit
        head = list(self._head(run))
        placed = [self._place(panel, per_second, inner) for panel in shown]
        heights = [max(_BAR, sum(_row_height(levels) for levels in rows.values())) for rows, _ in placed]
        top = _EDGE + 0.24 * len(head) - 0.05
        total = top + sum(0.30 + height for height in heights) + 0.22 * (len(shown) - 1) + 0.72
        self.figure.set_size_inches(_WIDTH, total)
        for number, (text, size, weight, color) in enumerate(head):
            y = 1 - (_EDGE + 0.24 * number) / total
            self.figure.text(
                _EDGE / _WIDTH, y, text, size=size, weight=weight, color=color, va="center", parse_math=False
            )
        at = top
        for number, (panel, (rows, names), height) in enumerate(zip(shown, placed, heights, strict=True)):
            at += 0.30
            box = (self.left / _WIDTH, 1 - (at + height) / total, inner / _WIDTH, height / total)
            axes = self.figure.add_axes(box)
            axes.set_xlim(0, limit)
            axes.set_ylim(height, 0)
            self._panel(axes, panel, number, rows, names, per_second)
            axes.tick_params(axis="x", labelbottom=number == len(shown) - 1, length=0, colors=FAINT)
            at += height + 0.22
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}s")
        self._legend(total, compiled=any(bar.compiles for panel in shown for bar in panel.bars))

    def _head(self, run: Run) -> Iterator[tuple[str, float, str, str]]:
        room = _WIDTH - 2 * _EDGE
        yield title(run), 11.0, "bold", INK
        known = " · ".join(f"{name} {version}" for name, version in versions(run).items())
        for line in self._lines(known, room, _FONT):
            yield line, _FONT, "normal", FAINT
        for label in labels(run):
            for line in self._lines(label, room, _FONT + 0.5):
                yield line, _FONT + 0.5, "bold", "#9a5b00"

    def _lines(self, text: str, room: float, size: float) -> list[str]:
        lines: list[str] = []
        for word in text.split():
            joined = f"{lines[-1]} {word}" if lines else word
            if lines and self._wide(joined, size) <= room:
                lines[-1] = joined
            else:
                lines.append(word)
        return lines

    def _cut(self, text: str, room: float) -> str:
        """As much of the beginning as has room, in inches."""
        while len(text) > 1 and self._wide(text) > room:
            text = f"{text[: min(len(text) - 2, int(len(text) * room / self._wide(text)))]}…"
        return text

    def _wide(self, text: str, size: float = _FONT, *, bold: bool = False) -> float:
        """Width of a text in inches."""
        from matplotlib.font_manager import FontProperties

        width, _, _ = self.renderer.get_text_width_height_descent(
            text, FontProperties(size=size, weight="bold" if bold else "normal"), False
        )
        return float(width) / float(self.figure.dpi)

    def _place(
        self, panel: Panel, per_second: float, inner: float
    ) -> tuple[dict[str, int], dict[int, tuple[int, float, str]]]:
        """Rows with the levels of names above their bars; for each bar so named its level, x and name."""
        rows = dict.fromkeys(panel.lanes, 0)
        names: dict[int, tuple[int, float, str]] = {}
        end = inner if panel.first_batch is None else panel.first_batch * per_second
        for lane in panel.lanes:
            mine = [(number, bar) for number, bar in enumerate(panel.bars) if bar.lane == lane]
            taken: list[float] = []
            # From the right: a name that has to go higher then starts left of those below it, so its line crosses none.
            for number, bar in sorted(mine, key=lambda one: -one[1].start):
                wide = self._wide(bar.name) + 0.08
                start, length = bar.start * per_second, (bar.end - bar.start) * per_second
                fits = _inside(bar, per_second) >= wide and not bar.imports
                if fits or (not bar.longest and length < 0.01):
                    continue
                limit = end if start < end and (wide <= end or end > inner / 2) else inner
                text = self._cut(bar.name, limit - 0.08)
                wide = self._wide(text) + 0.08
                x = min(start, limit - wide)
                level = next((i for i, left in enumerate(taken) if x + wide <= left), len(taken))
                if level >= (_LEVELS_LONGEST if bar.longest else _LEVELS):
                    continue
                taken[: level + 1] = [x] * (level + 1)
                names[number] = (level, x, text)
                rows[lane] = max(rows[lane], level + 1)
        return rows, names

    def _panel(
        self,
        axes: Axes,
        panel: Panel,
        number: int,
        rows: dict[str, int],
        names: dict[int, tuple[int, float, str]],
        per_second: float,
    ) -> None:
        for side in axes.spines.values():
            side.set_visible(False)
        axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        tops = {}
        y = 0.0
        for lane, levels in rows.items():
            tops[lane] = y + _LABEL * levels
            y += _row_height(levels)
        axes.set_yticks([top + _BAR / 2 for top in tops.values()], [_clipped(lane) for lane in tops])
        axes.tick_params(axis="y", length=0, labelcolor=INK, pad=6)
        for at, bar in enumerate(panel.bars):
            self._bar(axes, bar, tops[bar.lane], per_second, f"initopt-{number}-{at}")
            if at in names:
                level, x, text = names[at]
                self._name_above(axes, bar, text, tops[bar.lane], level, x / per_second, per_second)
            elif _inside(bar, per_second) >= self._wide(bar.name) + 0.08 and not bar.imports:
                middle = sum(_solid(bar)) / 2, tops[bar.lane] + _BAR / 2
                color = "white" if bar.longest else INK
                # Without something behind it a name can't be read among dots.
                behind = {"facecolor": RED if bar.longest else GREY, "edgecolor": "none", "pad": 1.0}
                axes.text(
                    *middle,
                    bar.name,
                    color=color,
                    va="center_baseline",
                    ha="center",
                    parse_math=False,
                    bbox=behind if bar.compiles else None,
                )
        for queue in panel.queues:
            if (queue.end - queue.start) * per_second < 0.04:
                continue
            under = tops[queue.lane] + _BAR + 0.045
            axes.plot([queue.start, queue.end], [under, under], color=QUEUE, lw=2.0, ls=_DOTS)
        self._captions(axes, panel, per_second)

    def _bar(self, axes: Axes, bar: Bar, top: float, per_second: float, group: str) -> None:
        from matplotlib.patches import Rectangle

        color = RED if bar.longest else GREY
        size = bar.end - bar.start, _BAR
        # A white edge would hide a bar that is hardly wider than it.
        edge = "white" if size[0] * per_second > 0.04 else color
        axes.add_patch(Rectangle((bar.start, top), *size, facecolor=color, edgecolor=edge, lw=0.6, gid=group))
        for start, end in bar.compiles:
            edge = "white" if bar.longest else FAINT
            axes.add_patch(
                Rectangle((start, top), end - start, _BAR, facecolor=color, edgecolor=edge, hatch=_COMPILED, lw=0.0)
            )
        for start, end, package in bar.imports:
            edge = "white" if (end - start) * per_second > 0.04 else color
            axes.add_patch(Rectangle((start, top), end - start, _BAR, facecolor=color, edgecolor=edge, lw=0.6))
            if (end - start) * per_second >= self._wide(package) + 0.08:
                axes.text(
                    (start + end) / 2,
                    top + _BAR / 2,
                    package,
                    color="white" if bar.longest else INK,
                    va="center_baseline",
                    ha="center",
                    parse_math=False,
                )
        for start, end in bar.waits:
            edge = RED if bar.longest else FAINT
            axes.add_patch(
                Rectangle((start, top), end - start, _BAR, facecolor="white", edgecolor=edge, hatch=_HATCH, lw=0.6)
            )

    def _name_above(self, axes: Axes, bar: Bar, name: str, top: float, level: int, x: float, per_second: float) -> None:
        foot = top - 0.03 - _LABEL * level
        if level or x < bar.start:
            axes.plot([bar.start, bar.start], [foot, top], color=FAINT, lw=0.5, solid_capstyle="butt", zorder=1.5)
        # White behind it: the line of a name further up passes behind a name that had to move to the left.
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
        color = RED if bar.longest else INK
        axes.text(x + 0.03 / per_second, foot, name, color=color, va="bottom", bbox=behind, parse_math=False)

    def _captions(self, axes: Axes, panel: Panel, per_second: float) -> None:
        recorded = panel.name == "recorded"
        what = f"recorded, rank {panel.rank}" if recorded else "planned (~): this graph, nobody waiting"
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "color": INK, "annotation_clip": False}
        above = 0.10 * 72
        left = -(self.left - _EDGE) * 72
        axes.annotate(what, (0, 1), (left, above), xycoords="axes fraction", weight="bold", **place)
        if panel.first_batch is not None:
            axes.axvline(panel.first_batch, color=INK, lw=1.2, clip_on=False)
            when = f"{self.goal} {'' if recorded else '~'}{seconds(panel.first_batch)}"
            # Left of its line, where the caption of the panel leaves room.
            room = self.left - _EDGE + panel.first_batch * per_second - self._wide(what, bold=True)
            side = ("right", -3) if self._wide(when) + 0.15 <= room else ("left", max(3.0, 72 * (0.15 - room)))
            axes.annotate(when, (panel.first_batch, 0), (side[1], above), ha=side[0], **place)

    def _legend(self, total: float, *, compiled: bool) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        keys = [
            Patch(facecolor=RED, label="longest chain"),
            Patch(facecolor=GREY, label="other work"),
            *([Patch(facecolor=GREY, edgecolor=FAINT, hatch=_COMPILED, lw=0.0, label="compile")] if compiled else []),
            Patch(facecolor="white", edgecolor=FAINT, hatch=_HATCH, label="wait for other ranks"),
            Line2D([], [], color=QUEUE, lw=2.0, ls=_DOTS, label="queue: the chain stood still"),
            Line2D([], [], color=INK, lw=1.2, label=self.goal),
        ]
        self.figure.legend(
            handles=keys,
            loc="lower left",
            bbox_to_anchor=((self.left - 0.1) / _WIDTH, 0.06 / total),
            ncols=len(keys),
            frameon=False,
            handlelength=1.8,
            columnspacing=1.8,
        )


def _clipped(lane: str) -> str:
    return lane if len(lane) <= _LANE_LETTERS else f"{lane[: _LANE_LETTERS - 1]}…"


def _row_height(levels: int) -> float:
    return _LABEL * levels + _BAR + _ROW_GAP


def _solid(bar: Bar) -> tuple[float, float]:
    """The longest part of a bar that is not waiting."""
    edges = [bar.start, *(edge for wait in sorted(bar.waits) for edge in wait), bar.end]
    return max(zip(edges[::2], edges[1::2], strict=True), key=lambda part: part[1] - part[0])


def _inside(bar: Bar, per_second: float) -> float:
    start, end = _solid(bar)
    return (end - start) * per_second


def _with_tooltips(svg: str, shown: Iterable[Panel]) -> str:
    """Give every bar the words that a browser shows when the pointer is over it."""
    for number, panel in enumerate(shown):
        for at, bar in enumerate(panel.bars):
            group = f'<g id="initopt-{number}-{at}">'
            svg = svg.replace(group, f"{group}\n<title>{escape(bar.about)}</title>", 1)
    return svg
