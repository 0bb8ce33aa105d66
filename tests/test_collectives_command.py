"""What `initopt collectives` and `initopt verify` print, as it was last looked at, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from initopt.collectives_view import collectives_view, verify_view
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
    for name in ("ec_metadata", "groups", "ddp_sync", "dp_tables", "setup.barrier"):
        view = collectives_view(run, why=name)
        assert view.finding == (name not in ("ddp_sync", "setup.barrier"))
        narrow(view.plain)
        check_golden(f"collectives_why_{name.partition('.')[0]}.txt", view.plain)


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
