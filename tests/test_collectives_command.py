"""What `initopt collectives` and `initopt verify` print, as it was last looked at, and their exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from initopt.collectives_view import collectives_view, verify_view
from initopt.comm_elim.left_out import WHY, left_out, told
from initopt.record import Note, Optimized
from tests.comm_elim.recorded import Script, stock
from tests.golden import check_golden
from tests.test_cli import run as command


def differing() -> Script:
    script = Script()
    script.meet("init_process_group", ("train.py:8 main",))
    for name in ("1", "2", "3"):
        script.make_group(name, (0, 1, 2, 3), ("train.py:12 main",))
    for rank in range(4):
        for group in ("2", "1", "3") if rank == 2 else ("1", "2", "3"):
            script.meet("all_reduce", ("train.py:17 main",), members=(rank,), group=group)
    return script


def narrow(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80


def test_verdicts(tmp_path: Path) -> None:
    view = collectives_view(stock().run(tmp_path))
    assert view.finding
    narrow(view.plain)
    check_golden("collectives_stock.txt", view.plain)


def test_the_proof_of_one(tmp_path: Path) -> None:
    run = stock(seeds="rank").run(tmp_path)
    for name in ("ec_metadata", "groups", "ddp_sync", "ddp_sync#2", "dp_tables", "setup.barrier"):
        view = collectives_view(run, why=name)
        assert view.finding == (name not in ("ddp_sync#2", "setup.barrier"))
        narrow(view.plain)
        check_golden(f"collectives_why_{name.partition('.')[0].replace('#', '_')}.txt", view.plain)


def test_what_was_left_out_is_named(tmp_path: Path) -> None:
    script = Script()
    script.meet("init_process_group", ("train.py:8 main",), options="gloo")
    counts = {"plan": 1, "ddp_sync": 2}
    gone = tuple(counts.items())
    said = [Optimized("eliminate", True, told(counts), "train.py:62", rank, gone) for rank in range(4)]
    run = replace(script.run(tmp_path), optimized=tuple(said))
    view = collectives_view(run)
    narrow(view.plain)
    check_golden("collectives_left_out.txt", view.plain)
    assert {one["name"]: one["count"] for one in view.data["left_out"]} == counts
    why = collectives_view(run, why="ddp_sync")
    assert not why.finding
    check_golden("collectives_why_left_out.txt", why.plain)
    with pytest.raises(ValueError, match="there are init_process_group, plan, ddp_sync"):
        collectives_view(run, why="nothing")
    noted = replace(run, optimized=(), notes=(Note(told({"ddp_sync": 1}), "dmp", 2, (("ddp_sync", 1),)), Note("else")))
    assert [(one.name, one.count, one.place) for one in left_out(noted)] == [("ddp_sync", 1, "dmp")]


def test_every_rewrite_has_its_reason() -> None:
    from initopt.optimizations import REWRITES

    assert tuple(WHY) == REWRITES


def test_the_figures_are_of_one_rank_and_add_up(tmp_path: Path) -> None:
    script = Script(ranks=2)
    for number, late in enumerate((0, 1, 0, 1)):
        script.meet("barrier", (f"train.py:{number} main",), late={late: 0.5})
    view = collectives_view(script.run(tmp_path))
    assert sum(one["wait"] for one in view.data["findings"]) == pytest.approx(1.0)
    assert "4 meetings before the first training step: 1.0s on the median rank, 1.0s of" in view.plain


def test_a_start_up_that_never_trained(tmp_path: Path) -> None:
    script = Script(ranks=2)
    script.meet("init_process_group", ("train.py:8 main",))
    run = script.run(tmp_path, steps=False)
    view = verify_view(run)
    assert not view.finding
    check_golden("verify_unfinished.txt", view.plain)
    said = collectives_view(run).plain
    assert "! no rank reached its first batch" in said and "on rank 0, 0 of it waiting" in " ".join(said.split())


def test_meetings_of_the_training_step_are_told_apart(tmp_path: Path) -> None:
    script = Script(ranks=2)
    script.meet("init_process_group", ("train.py:8 main",))
    run = script.run(tmp_path)
    start = max(span.start for span in run.spans if span.name == "first_step")
    later = [
        replace(span, start=start + 0.1, end=start + 0.2, op="barrier", sequence=1)
        for span in run.spans
        if span.kind == "collective"
    ]
    view = verify_view(replace(run, spans=(*run.spans, *later)))
    assert "2 meetings, 1 of them before the first training step, in one order on all" in view.plain
    assert (view.data["meetings"], view.data["before_training"]) == (2, 1)


def test_one_order(tmp_path: Path) -> None:
    view = verify_view(stock().run(tmp_path))
    assert not view.finding
    check_golden("verify_stock.txt", view.plain)


def test_two_orders(tmp_path: Path) -> None:
    run = differing().run(tmp_path)
    view = verify_view(run)
    assert view.finding
    narrow(view.plain)
    check_golden("verify_differing.txt", view.plain)
    check_golden("collectives_differing.txt", collectives_view(run).plain)


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    stock().run(tmp_path / ".initopt", number=1)
    differing().run(tmp_path / ".initopt", number=2)
    assert command("collectives", "1") == 1
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and out.splitlines()[-1].startswith("next: initopt")
    assert command("collectives", "1", "--why", "train.py:60") == 0
    assert command("collectives", "1", "--why", "nothing") == 2
    assert "there are" in capsys.readouterr().err
    assert command("verify", "1") == 0
    assert command("verify", "2") == command("collectives", "2") == 1
    capsys.readouterr()
    for words in (("collectives", "1"), ("verify", "2")):
        command(*words, "--json")
        data = json.loads(capsys.readouterr().out)
        assert data["version"] == 1
    assert data["problems"][0]["parties"][1]["ranks"] == [2]
