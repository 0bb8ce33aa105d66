"""What the first batch did not need: what is found, what is not, and that a saving is simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from initopt import Graph, Run, Span, Step, report
from initopt.deferral import Finding, findings, not_needed, together
from initopt.imports import ImportLine
from initopt.planned import saving
from initopt.record import Watched
from initopt.runs import RecordError
from initopt.unused import Unused
from tests.synthetic import serial_spans, wasteful, write_run

STEPS = [
    Step("model", uses=("rng",)),
    Step("loader", lane="io:data"),
    Step("val_data", lane="io:val", call_site="train.py:40"),
    Step("val_loader", needs=("val_data",), call_site="train.py:50"),
    Step("dmp", needs=("model",)),
    Step("first_step", needs=("dmp", "loader")),
]
SECONDS = {"model": 1.0, "loader": 2.0, "val_data": 1.0, "val_loader": 3.0, "dmp": 1.0, "first_step": 0.5}


def recorded(
    folder: Path,
    graph: Graph | None,
    seconds: Mapping[str, float],
    *,
    extra: tuple[Unused | ImportLine, ...] = (),
    ranks: int = 1,
) -> Run:
    """A run whose steps ran one after the other."""
    spans: list[list[Span]] = []
    for rank in range(ranks):
        now, mine = 0.5, [Span("imports", 0.0, 0.5, rank, kind="import")]
        for name, took in seconds.items():
            lane = graph[name].lane if graph is not None else "main"
            mine.append(Span(name, now, now + took, rank, lane))
            now += took
        spans.append(mine)
    return Run.load(write_run(folder, spans, graph=graph, extra=extra))


def by_name(run: Run) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings(run)}


def test_a_step_from_which_no_value_leads_to_the_first_step() -> None:
    assert not_needed(Graph(STEPS)) == ("val_data", "val_loader")


def test_a_stated_order_is_a_need_and_a_resource_is_none() -> None:
    steps = [Step("groups", lane="comms"), Step("flags"), *STEPS]
    late = [replace(step, after=("flags",)) if step.name == "dmp" else step for step in steps]
    late = [replace(step, lane="comms") if step.name == "dmp" else step for step in late]
    graph = Graph(late)
    assert any(edge.before == "groups" and edge.kind == "resource" for edge in graph.predecessors("dmp"))
    assert not_needed(graph) == ("groups", "val_data", "val_loader")


def test_a_plugin_needs_its_own_steps_and_only_follows_others() -> None:
    steps = [
        Step("pipeline", origin="torchrec"),
        Step("checkpoint", needs=("pipeline",), lane="comms", origin="torchrec"),
        Step("mine"),
        Step("used_by_it"),
        Step("other", needs=("used_by_it",), origin="torchrec"),
        Step("first_step", after=("checkpoint", "mine", "other"), lane="comms", origin="torchrec"),
    ]
    assert not_needed(Graph(steps)) == ("mine",)
    own = [replace(step, origin="") for step in steps]
    assert not_needed(Graph(own)) == ()


def test_what_follows_the_first_step_or_has_none_is_no_finding() -> None:
    assert not_needed(Graph([*STEPS, Step("report", after=("first_step",))])) == ("val_data", "val_loader")
    assert not_needed(Graph(STEPS[:-1])) == ()


def test_a_saving_is_simulated_and_what_needs_a_step_goes_with_it(tmp_path: Path) -> None:
    run = recorded(tmp_path, Graph(STEPS), SECONDS)
    found = by_name(run)
    # On lane main: model 1, val_loader 3 (it waits for val_data, 1), dmp 1, first_step 0.5; the loader takes 2 beside.
    assert found["val_loader"].saves == pytest.approx(3.0)
    assert found["val_data"].saves == pytest.approx(3.0)
    assert (found["val_data"].took, found["val_loader"].took) == (1.0, 3.0)
    assert together(run) == pytest.approx(3.0)
    assert found["val_loader"].place == "train.py:50"


def test_a_step_beside_the_chain_saves_nothing(tmp_path: Path) -> None:
    steps = [step for step in STEPS if step.name != "val_loader"]
    run = recorded(tmp_path, Graph(steps), {name: SECONDS[name] for name in SECONDS if name != "val_loader"})
    [one] = findings(run)
    assert (one.what, one.saves) == ("val_data", 0.0)


def test_what_has_to_hold_is_said(tmp_path: Path) -> None:
    steps = [*STEPS[:-1], Step("metrics", needs=("dmp",), uses=("rng",), lane="comms"), STEPS[-1]]
    run = recorded(tmp_path, Graph(steps), {**SECONDS, "metrics": 1.0})
    provided = " ".join(by_name(run)["metrics"].provided)
    assert "changes nothing in dmp" in provided
    assert "draws" in provided
    assert "every rank" in provided
    assert by_name(run)["val_loader"].provided == ()


def test_what_takes_no_time_is_no_finding(tmp_path: Path) -> None:
    run = recorded(tmp_path, Graph(STEPS), {**SECONDS, "val_data": 0.001, "val_loader": 0.002})
    assert findings(run) == ()


SERIAL = {"process_group": 1.0, "validation": 2.0, "loader": 1.0, "first_step": 0.5}


def test_without_a_graph_an_unused_loader_shows_its_step(tmp_path: Path) -> None:
    run = recorded(tmp_path, None, SERIAL, extra=(Unused("loader", "train.py:12", "validation"),))
    [one] = findings(run)
    assert (one.kind, one.place, one.step) == ("loader", "train.py:12", "validation")
    assert one.took == pytest.approx(2.0)
    assert one.saves == pytest.approx(2.0)
    assert "nothing else" in one.provided[0]


def test_a_step_that_made_used_ones_too_has_no_known_saving(tmp_path: Path) -> None:
    made = (Unused("loader", "train.py:12", "loader", alone=False),)
    [one] = findings(recorded(tmp_path, None, SERIAL, extra=made))
    assert one.saves is None


def test_a_step_that_is_needed_or_meets_others_has_no_known_saving(tmp_path: Path) -> None:
    made = (Unused("loader", "train.py:12", "dmp"),)
    [one] = [one for one in findings(recorded(tmp_path, Graph(STEPS), SECONDS, extra=made)) if one.kind == "loader"]
    assert one.saves is None
    meets = Span("barrier", 2.0, 2.1, kind="collective", step="validation", op="barrier", group="world", sequence=0)
    spans = [Span("validation", 1.0, 3.0), meets, Span("first_step", 3.0, 3.5)]
    met = (Unused("loader", "train.py:12", "validation"),)
    [one] = findings(Run.load(write_run(tmp_path / "meets", [spans], graph=None, extra=met)))
    assert one.saves is None


def test_a_step_that_is_not_needed_is_found_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    made = (Unused("loader", "train.py:51", "val_loader"),)
    found = findings(recorded(tmp_path / "long", Graph(STEPS), SECONDS, extra=made))
    assert [one.what for one in found] == ["val_data", "val_loader"]
    quick = {**SECONDS, "val_data": 0.001, "val_loader": 0.002}
    assert findings(recorded(tmp_path / "quick", Graph(STEPS), quick, extra=made)) == ()


def test_what_one_rank_used_is_needed(tmp_path: Path) -> None:
    made = (Unused("loader", "train.py:12", "validation", rank=1),)
    assert findings(recorded(tmp_path, None, SERIAL, extra=made, ranks=2)) == ()
    made = (*made, Unused("loader", "train.py:12", "validation", rank=0))
    run = recorded(tmp_path / "all", None, SERIAL, extra=made, ranks=2)
    assert [one.saves for one in findings(run)] == [pytest.approx(2.0)]


def test_an_unused_group_saves_what_making_it_took(tmp_path: Path) -> None:
    spans = [Span("groups", 0.5, 2.5), Span("first_step", 2.5, 3.0)]
    for number, name in enumerate(("one", "two")):
        at = 0.5 + number
        call = {"kind": "collective", "step": "groups", "op": "new_group", "group": name, "sequence": 0}
        spans.append(Span("new_group", at, at + 0.9, call_site=f"train.py:{9 + number}", **call))  # type: ignore[arg-type]
    # Rank 1 is no member of either.
    other = [Span("groups", 0.5, 0.6), Span("first_step", 0.6, 1.0)]
    made = (Unused("group", "train.py:10", "groups", "two", alone=False),)
    run = Run.load(write_run(tmp_path, [spans, other], graph=None, extra=made))
    [one] = findings(run)
    assert one.took == pytest.approx(0.9)
    assert one.saves == pytest.approx(0.9)


def test_a_group_of_one_line_that_some_rank_used_is_needed(tmp_path: Path) -> None:
    spans = []
    for rank in range(2):
        call = {"kind": "collective", "step": "groups", "op": "new_group", "group": f"of {rank}", "sequence": 0}
        steps = [Span("groups", 0.5, 2.5), Span("first_step", 2.5, 3.0)]
        spans.append([*steps, Span("new_group", 1.0, 2.0, call_site="train.py:9", **call)])  # type: ignore[arg-type]
    idle = [Unused("group", "train.py:9", "groups", f"of {rank}", rank=rank) for rank in range(2)]
    assert findings(Run.load(write_run(tmp_path / "one", spans, graph=None, extra=idle[:1]))) == ()
    [one] = findings(Run.load(write_run(tmp_path / "both", spans, graph=None, extra=idle)))
    assert one.saves == pytest.approx(1.0)


def line(needed: str, rank: int = 0, own: bool = True) -> ImportLine:
    packages = (("heavy", 0.15), ("part", 0.05))
    unneeded, kept = {"no": (packages, ()), "yes": ((), ("heavy", "part")), "": ((), ())}[needed]
    return ImportLine("train.py:3", 0.2, packages, needed, "imports", own, rank, unneeded, kept)  # type: ignore[arg-type]


def test_a_line_of_imports_that_no_rank_needed(tmp_path: Path) -> None:
    run = recorded(tmp_path, None, SERIAL, extra=(line("no"), line("no", 1)), ranks=2)
    [one] = findings(run)
    assert (one.kind, one.what, one.place) == ("import", "import heavy, part", "train.py:3")
    assert one.saves == pytest.approx(0.2)
    other = recorded(tmp_path / "other", None, SERIAL, extra=(line("no"), line("yes", 1)), ranks=2)
    assert findings(other) == ()
    others = recorded(tmp_path / "others", None, SERIAL, extra=(line("no", own=False),))
    assert findings(others) == ()
    unknown = recorded(tmp_path / "unknown", None, SERIAL, extra=(line(""),))
    assert findings(unknown) == ()


def test_the_part_of_a_line_that_no_rank_needed(tmp_path: Path) -> None:
    packages = (("heavy", 0.15), ("part", 0.05), ("shutil", 0.01))

    def in_part(
        *unneeded: tuple[str, float], kept: tuple[str, ...], rank: int = 0, step: str = "imports"
    ) -> ImportLine:
        return ImportLine("train.py:3", 0.2, packages, "yes", step, True, rank, unneeded, kept)

    first = in_part(*packages[:2], kept=("shutil",))
    [one] = findings(recorded(tmp_path / "one", None, SERIAL, extra=(first,)))
    assert (one.what, one.kept) == ("import heavy, part", ("shutil",))
    assert (one.took, one.saves) == (pytest.approx(0.2), pytest.approx(0.2))
    # Another rank needed one of them, and what it took in two steps adds up.
    other = in_part(packages[0], kept=("shutil", "part"), rank=1)
    again = in_part(packages[0], kept=(), rank=1, step="validation")
    [one] = findings(recorded(tmp_path / "two", None, SERIAL, extra=(first, other, again), ranks=2))
    assert (one.what, one.kept, one.took) == ("import heavy", ("shutil", "part"), pytest.approx(0.3))
    # Of a package of which a part was imported later and needed, nothing is found.
    late = in_part(kept=("heavy", "part"), step="validation")
    assert findings(recorded(tmp_path / "late", None, SERIAL, extra=(first, late))) == ()


def test_an_iterator_that_was_begun_draws(tmp_path: Path) -> None:
    made = Unused("loader", "train.py:12", "validation", begun=True)
    [one] = findings(recorded(tmp_path, None, SERIAL, extra=(made,)))
    assert "DataLoader(..., generator=torch.Generator().manual_seed(seed))" in one.provided[-1]


def test_an_iterator_saves_what_making_it_took_in_the_one_step_that_made_it(tmp_path: Path) -> None:
    spans = [
        [
            Span("loader", 1.0, 1.3, rank),
            Span("model", 1.3, 2.0, rank),
            Span("loader", 2.0, 2.5, rank),
            Span("first_step", 2.5, 3.0, rank),
        ]
        for rank in range(2)
    ]
    one = Unused("loader", "train.py:9", "", alone=False, begun=True, start=0.99, end=1.31)
    idle = [replace(one, rank=rank) for rank in range(2)]
    run = Run.load(write_run(tmp_path / "early", spans, graph=None, extra=idle))
    [found] = findings(run)
    assert (found.place, found.step) == ("train.py:9", "loader")
    # The other step of that name made another loader, which is needed.
    assert (found.took, found.saves, together(run)) == (pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3))
    assert not any("its step does nothing else" in text for text in found.provided)
    # In a step that made more, only the iterator goes.
    idle = [replace(made, begun_in="model", start=1.4, end=1.5) for made in idle]
    [found] = findings(Run.load(write_run(tmp_path / "inside", spans, graph=None, extra=idle)))
    assert (found.step, found.saves) == ("model", pytest.approx(0.1))
    # When it was made is not in older records.
    idle = [replace(made, start=0.0, end=0.0) for made in idle]
    [found] = findings(Run.load(write_run(tmp_path / "old", spans, graph=None, extra=idle)))
    assert (found.took, found.saves) == (0.0, None)


def test_the_rank_that_would_be_last_decides(tmp_path: Path) -> None:
    run = Run.load(write_run(tmp_path, serial_spans()))
    # Rank 2 imports longest; on ranks 0 and 1 there is nothing to gain.
    only = saving(run, {0: {"imports": 3.0}, 1: {"imports": 3.0}, 2: {}})
    everywhere = saving(run, {rank: {"imports": 1.0} for rank in range(3)})
    assert only < 0.5 < everywhere <= 1.0 + 1e-9


def test_a_run_without_a_first_batch_has_no_findings(tmp_path: Path) -> None:
    run = recorded(tmp_path, None, {"process_group": 1.0}, extra=(line("no"),))
    assert findings(run) == ()
    with pytest.raises(RecordError):
        saving(run, {0: {}})


def test_a_rank_without_a_first_batch_has_nothing_to_save(tmp_path: Path) -> None:
    spans, graph, found = wasteful()
    spans[1] = [span for span in spans[1] if span.name != "first_step"]
    run = Run.load(write_run(tmp_path, spans, graph=graph, extra=found))
    assert "group" in {finding.kind for finding in findings(run)}


def test_savings_that_are_all_unknown_have_no_sum(tmp_path: Path) -> None:
    unknown = Unused("loader", "train.py:90", "", alone=False)
    run = Run.load(write_run(tmp_path, serial_spans()[:1], graph=None, extra=[Watched(True), unknown]))
    view = report.defer_view(run)
    assert [one.saves for one in findings(run)] == [None]
    assert view.data["saves"] is None is together(run)
    assert "       ?  data loader, no batch taken" in view.plain
    assert "What they save is not known" in view.plain
    assert "~0" not in view.plain + report.summary(run).plain
