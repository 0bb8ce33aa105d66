"""The command `initopt`: one function per verb, no logic.

Results go to stdout, progress and errors to stderr. The exit code is 0 if all is well, 1 for a finding (a gate that
fails, a trained state that differs, a start-up without a first batch, a graph compiled anew, something that the first
batch did not need), 2 if the command can't do
what it was asked.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand

from initopt import bench as measuring
from initopt import cache_view, collectives_view, picture, plan_view, report, trace
from initopt.compile_cache.store import ArtifactStore, StoreError, default_place
from initopt.ett import LOST_WORK, Job
from initopt.graph import Graph, GraphError
from initopt.html_report.document import document
from initopt.html_report.page import named_html, page
from initopt.launch import agent as launching
from initopt.launch.warm_workers import LaunchError
from initopt.record import run_numbers, run_root
from initopt.runs import NO_RUN, RecordError, Run

HOME = "summary"
"""The verb that is meant by a call without one."""

DAY = 86_400.0

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings=_HELP,
)

RunName = Annotated[str | None, typer.Argument(metavar="RUN", help="Number or path; default: the latest.")]
Root = Annotated[Path | None, typer.Option(help="Where runs are kept; default: $INITOPT_ROOT, else .initopt.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same data as JSON.")]
Rank = Annotated[int | None, typer.Option(metavar="N", help="Default: the median rank.")]


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `words` (default: this process's) and exit."""
    known = list(sys.argv[1:] if words is None else words)
    first = known[0] if known else ""
    verbs = {command.name for command in app.registered_commands}
    without_verb = verbs.isdisjoint(known) and first not in ("-h", "--help", "--version")
    if without_verb and (first[:1] in ("", "-") or _names_run(first)):
        known.insert(0, HOME)
    if first == "report" and "--html" in known:
        after = known.index("--html") + 1
        if not known[after:] or known[after].startswith("-"):
            # typer would print its usage, or take the next option for the name.
            known.insert(after, "")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that can't show a bar still gets the figures.
            stream.reconfigure(errors="replace")
    try:
        if first == "launch":
            # The words are torchrun's and the script's: typer would take some for its own.
            launch(known[1:])
        else:
            app(known, prog_name="initopt")
    except (
        RecordError,
        measuring.BenchError,
        LaunchError,
        picture.PlotError,
        StoreError,
        ValueError,
    ) as error:
        print(f"initopt: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"initopt {importlib.metadata.version('initopt')}")
        raise typer.Exit


@app.callback(epilog="`initopt [RUN]` without a command: when the first batch was done, and what the time went into.")
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Where the start-up of a training job spends its time, and what would make it shorter."""


class _Hidden(TyperCommand):
    """A command that is called `initopt` in what is said of its usage, as that is what was typed."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return super().make_context("initopt", args, None, **extra)


@app.command(HOME, hidden=True, cls=_Hidden, context_settings=_HELP)
def summary(run: RunName = None, root: Root = None, as_json: AsJson = False) -> None:
    """When the first batch was done and what the time went into: work, wait, queue."""
    _show(report.summary(_run(run, root), width=_width()), as_json)


@app.command()
def blame(
    run: RunName = None,
    root: Root = None,
    rank: Rank = None,
    everything: Annotated[bool, typer.Option("--all", help="Every step, not only the longest ten.")] = False,
    as_json: AsJson = False,
) -> None:
    """The longest steps, work and wait apart."""
    _show(report.blame(_run(run, root), rank, everything=everything, width=_width()), as_json)


@app.command("critical-chain")
def critical_chain(
    run: RunName = None,
    root: Root = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Default: the slowest rank.")] = None,
    as_json: AsJson = False,
) -> None:
    """What decided the first batch, across ranks."""
    _show(report.chain_view(_run(run, root), rank, width=_width()), as_json)


@app.command("compile")
def compile_(run: RunName = None, root: Root = None, rank: Rank = None, as_json: AsJson = False) -> None:
    """What was compiled: time, cache, recompiles, graph breaks.

    The exit code is 1 where a graph was compiled anew or could not be compiled.
    """
    _show(report.compile_view(_run(run, root), rank, width=_width()), as_json)


@app.command()
def imports(
    run: RunName = None,
    root: Root = None,
    rank: Rank = None,
    everything: Annotated[bool, typer.Option("--all", help="Every package and line.")] = False,
    as_json: AsJson = False,
) -> None:
    """What was imported, by package and by line of yours."""
    _show(report.imports_view(_run(run, root), rank, everything=everything, width=_width()), as_json)


@app.command()
def defer(run: RunName = None, root: Root = None, as_json: AsJson = False) -> None:
    """What stood before the first batch and was not needed.

    Steps, data loaders, process groups and imports. The exit code is 1 where something was found.
    """
    _show(report.defer_view(_run(run, root), width=_width()), as_json)


@app.command()
def collectives(
    run: RunName = None,
    root: Root = None,
    why: Annotated[str | None, typer.Option("--why", metavar="NAME", help="The proof of one verdict.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every collective that stays, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Which meetings of ranks are not needed, and why.

    The exit code is 1 where one can be left out, reused, fused or told locally.
    """
    view = collectives_view.collectives_view(_run(run, root), why=why, everything=everything, width=_width())
    _show(view, as_json)


@app.command()
def verify(run: RunName = None, root: Root = None, as_json: AsJson = False) -> None:
    """Did all ranks meet in one order? Who met what else?

    The exit code is 1 where they did not, or a rank did not come.
    """
    _show(collectives_view.verify_view(_run(run, root), width=_width()), as_json)


@app.command()
def plot(
    run: RunName = None,
    root: Root = None,
    rank: Rank = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A file .svg or .png; default: SVG to stdout.")
    ] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Write a Chrome trace (.json or .json.gz) for Perfetto instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recorded above planned on one time axis."""
    found = _run(run, root)
    if trace_file is not None:
        _write(trace_file, trace.encode(found, compressed=trace_file.suffix == ".gz"))
        return
    chosen = report.chosen_rank(found, rank)
    if as_json:
        _print_json(picture.data(found, chosen))
    elif output is not None:
        _write(output, picture.draw(found, chosen, form=picture.form_of(output)))
    elif sys.stdout.isatty():
        raise ValueError(
            "the picture is SVG, not for a terminal: `initopt plot -o startup.svg`, or send it to a file by `>`"
        )
    else:
        sys.stdout.write(picture.draw(found, chosen).decode())


@app.command("report")
def report_(
    run: RunName = None,
    root: Root = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Where to write the page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every view on one HTML page, which needs no network.

    The exit code is 1 where no rank reached its first batch: the page says where each stopped.
    """
    if html == Path() or (html is None and not as_json):
        raise ValueError("say where to: `initopt report --html run.html`")
    target = None if html is None else named_html(html)
    found = document(_run(run, root))
    if as_json:
        _print_json(found)
    if target is not None:
        _write(target, page(found))
    if found["sentence"] is None:
        print(f"initopt: no rank reached its {found['goal']}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def draw(
    what: Annotated[
        str | None, typer.Argument(metavar="RUN|MODULE:NAME", help="A run, or a Startup or Graph to import.")
    ] = None,
    root: Root = None,
    dot: Annotated[bool, typer.Option("--dot", help="Graphviz DOT instead of Mermaid.")] = False,
    inputs: Annotated[str, typer.Option(help="Names the Startup gets from `run`, with commas between.")] = "",
    as_json: AsJson = False,
) -> None:
    """The graph of steps, as Mermaid or DOT text."""
    graph = _graph(what, root, [name for name in inputs.split(",") if name])
    if as_json:
        _print_json({"version": report.JSON_VERSION, "graph": json.loads(graph.to_json())})
    else:
        print((graph.to_dot() if dot else graph.to_mermaid()).rstrip("\n"))


@app.command()
def ett(
    run: RunName = None,
    root: Root = None,
    baseline: Annotated[str | None, typer.Option(metavar="RUN", help="A run to compare with, such as stock.")] = None,
    jobs: Annotated[str, typer.Option(help="Job lengths: s, m, h or d, with commas between.")] = "1h,4h,24h,7d",
    failures_per_day: Annotated[float, typer.Option(metavar="N", min=0, help="Whole failures are counted.")] = 3.0,
    lost: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Work lost by a failure.")] = LOST_WORK,
    as_json: AsJson = False,
) -> None:
    """Effective training time, and what is gained."""
    wanted = [_job(text, failures_per_day) for text in jobs.split(",")]
    before = None if baseline is None else _run(baseline, root)
    _show(report.ett_view(_run(run, root), before, jobs=wanted, lost_work=lost, width=_width()), as_json)


@app.command()
def bench(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="The initopt start-up.")] = None,
    stock: Annotated[str | None, typer.Option(metavar="COMMAND", help="The stock start-up, in quotes.")] = None,
    root: Root = None,
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Measured runs of each.")] = 10,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Unmeasured runs of each, before.")] = 1,
    prepare: Annotated[str | None, typer.Option(metavar="COMMAND", help="Shell command before every run.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of one run.")] = 600.0,
    number: Annotated[
        int | None, typer.Option("--show", metavar="NNNN", help="A saved measurement; default: the last.")
    ] = None,
    compare: Annotated[int | None, typer.Option(metavar="NNNN", help="Compare with a saved measurement.")] = None,
    fail_if: Annotated[
        str | None,
        typer.Option(metavar="GATE", help="Exit code 1 if, e.g., 'median > +5%': against --compare, else stock."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure stock against initopt, or show a result.

    Both commands run in turn, in fresh processes. Without commands the last saved measurement is shown.
    """
    gate = None if fail_if is None else measuring.Gate.parse(fail_if)
    place = run_root(root)
    earlier = None if compare is None else measuring.load(place, compare)
    if (stock is None) != (not command):
        raise ValueError("bench needs both commands: `initopt bench --stock 'STOCK COMMAND' -- INITOPT COMMAND`")
    if stock is None or not command:
        measured = measuring.load(place, number)
    else:
        measured = measuring.run_bench(
            shlex.split(stock),
            command,
            runs=runs,
            warmup=warmup,
            root=place,
            prepare=prepare,
            timeout=timeout,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    comparison = measuring.against_stock(measured) if earlier is None else measuring.compare(earlier, measured)
    verdict = None if gate is None else gate.check(comparison)
    _show(report.bench_view(measured, comparison, verdict, width=_width()), as_json)


@app.command()
def plan(
    what: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION|FILE", help="A function that returns the model, or a plan file.")
    ],
    world_size: Annotated[int | None, typer.Option(metavar="N", min=1, help="Ranks of the job.")] = None,
    local_size: Annotated[int | None, typer.Option(metavar="N", min=1, help="Ranks of a host.")] = None,
    pod_size: Annotated[int | None, typer.Option(metavar="N", min=1, help="Hosts of a pod; default: no pods.")] = None,
    device: Annotated[str, typer.Option(metavar="TYPE", help="cuda, cpu, mtia or tpu.")] = "cuda",
    hbm: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a rank, e.g. 80GB; default: TorchRec's.")] = None,
    ddr: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a rank; default: TorchRec's.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a rank; default: TorchRec's.")] = None,
    sharders: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Returns the sharders; default: TorchRec's.")
    ] = None,
    constraints: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Returns ParameterConstraints by table.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, to pin a job to it.")] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with a plan file; 1 if it differs.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every rank and every change.")] = False,
    as_json: AsJson = False,
) -> None:
    """The sharding plan of a model, without a job."""
    try:
        from initopt.sharding_plan import offline
    except ImportError as error:
        raise ValueError(f"a plan is made by torchrec, which does not load here: {error}") from error
    try:
        if offline.names_file(what):
            given = {"--world-size": world_size, "--local-size": local_size, "--pod-size": pod_size, "--hbm": hbm}
            given |= {"--ddr": ddr, "--batch-size": batch_size, "--sharders": sharders, "--constraints": constraints}
            idle = [option for option, value in given.items() if value is not None]
            if idle:
                raise ValueError(f"{what} is a plan that was made already: {', '.join(idle)} can't change it")
            made = offline.read(what)
        else:
            made = offline.make(
                what,
                world_size=world_size,
                local_world_size=local_size,
                pod_size=pod_size,
                device=device,
                hbm=_bytes("--hbm", hbm),
                ddr=_bytes("--ddr", ddr),
                batch_size=batch_size,
                sharders=sharders,
                constraints=constraints,
                progress=lambda line: print(f"initopt: {line}", file=sys.stderr, flush=True),
            )
    except offline.NoPlanError as error:
        _show(plan_view.no_plan_view(str(error), name=what, width=_width()), as_json)
        return
    if output is not None:
        made.file.write(output)
        print(f"initopt: wrote {output}", file=sys.stderr)
    if diff is not None:
        before = offline.read(diff).file
        names = (str(diff), what)
        view = plan_view.diff_view(before, made.file, names=names, everything=everything, width=_width())
    else:
        view = plan_view.plan_view(
            made.file,
            name=what,
            problems=made.problems,
            notes=made.notes,
            written=None if output is None else str(output),
            everything=everything,
            width=_width(),
        )
    _show(view, as_json)


@app.command()
def cache(
    place: Annotated[
        str | None, typer.Argument(metavar="PLACE", help="Folder or address; default: compile_cache beside the runs.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="DIGEST", help="Remove what is stored for this key; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What was compiled and is stored, and for what."""
    store = ArtifactStore(place or default_place(), None)
    if place is not None and not store.exists():
        raise ValueError(f"there is no {place}: nothing is stored there")
    removed = store.remove_named(remove or ())
    view = cache_view.cache_view(
        store.entries(), store.documents(), place=store.place, asked=place or "", removed=removed, width=_width()
    )
    _show(view, as_json)


@app.command()
def launch(words: Annotated[list[str], typer.Argument(metavar="[OPTION]... SCRIPT [ARG]...")]) -> None:
    """torchrun, with ranks forked from one import."""
    launching.launch(words)


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT])i?B?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise ValueError(f"{option} {text!r} is not understood: write a size such as 80GB (1 GB = 1024^3 bytes)")
    return int(float(match[1]) * 1024 ** {"M": 2, "G": 3, "T": 4}[match[2].upper()])


def _names_run(word: str) -> bool:
    return word.isdigit() or Path(word).is_dir()


def _run(name: str | None, root: Path | None) -> Run:
    if name is None:
        return Run.latest(root)
    if not name.isdigit():
        return Run.load(name)
    place = run_root(root)
    path = place / f"{int(name):04}"
    if not path.is_dir():
        numbers = run_numbers(place)
        there = f"there is no run {name} here; it has {numbers[0]:04} to {numbers[-1]:04}" if numbers else NO_RUN
        raise RecordError(place, there)
    return Run.load(path)


def _graph(what: str | None, root: Path | None, inputs: Sequence[str]) -> Graph:
    module, colon, name = (what or "").partition(":")
    if not colon:
        run = _run(what, root)
        if run.graph is None:
            why = "there is no graph in this run: initopt.Startup records one, and initopt plot draws any run"
            raise RecordError(run.path, why)
        return run.graph
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what!r} can't be imported: {error}") from error
    if isinstance(found, Graph):
        return found
    if not hasattr(found, "graph"):
        raise ValueError(f"{what!r} is {type(found).__name__!r}: name a Startup or a Graph")
    try:
        made: Graph = found.graph(inputs)
    except GraphError as error:
        hint = "" if inputs else ". What `run` is given is named by --inputs"
        raise ValueError(f"{error}{hint}") from error
    return made


def _job(text: str, failures_per_day: float) -> Job:
    units = {"s": (1.0, "s"), "m": (60.0, "min"), "h": (3_600.0, "h"), "d": (DAY, "d")}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([smhd])\s*", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--jobs {text!r} is not understood: write a length such as 90m, 4h or 7d")
    length, unit = units[match[2]]
    wall = float(match[1]) * length
    return Job(f"{match[1]} {unit}", wall, int(failures_per_day * wall / DAY))


def _show(view: report.View, as_json: bool) -> None:
    if as_json:
        _print_json(view.data)
    else:
        console = Console(highlight=False)
        for line in view.lines:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    if view.finding:
        raise typer.Exit(1)


def _width() -> int:
    return Console().width


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror}") from error
    print(f"initopt: wrote {path}", file=sys.stderr)
