"""`initopt plan`: what it prints and writes, its exit codes, and what it says of a function that does not do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from initopt import cli, plan_view
from tests.golden import check_golden

MODEL = """
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection


def of(rows, dim=128):
    print("a factory may print")
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=n, feature_names=[f"f{i}"])
        for i, n in enumerate(rows)
    ]
    ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    return nn.ModuleDict({"sparse": nn.ModuleDict({"ebc": ebc}), "over": nn.Linear(8, 1)})


def small():
    return of([100_000, 200_000, 1_000, 5_000_000])


def large():
    return of([1_000 * (i + 1) ** 3 for i in range(26)])


def odd():
    return of([100, 200], dim=6)


def dense():
    return nn.Linear(8, 8)


def limits():
    return {"t0": ParameterConstraints(sharding_types=["row_wise"])}


def sharders():
    return [EmbeddingBagCollectionSharder()]


def needs(place):
    return small()


def fails():
    raise RuntimeError("no data")


def leaves():
    raise SystemExit(3)


def gives_a_list():
    return [small()]


NAME = 17
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a module `model_to_plan`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model_to_plan.py").write_text(MODEL)
    yield tmp_path
    for name in ("model_to_plan", "broken", "leaving"):
        sys.modules.pop(name, None)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def without_versions(out: str) -> str:
    return re.sub(r"(initopt|torchrec|torch) [\d.]+(\+\w+)?", r"\1 VERSION", out)


SMALL = ("model_to_plan:small", "--world-size", "4", "--local-size", "2", "--hbm", "32GB")
LARGE = ("model_to_plan:large", "--world-size", "128", "--local-size", "8", "--hbm", "80GB")


@pytest.mark.parametrize(("name", "words"), [("plan_small.txt", SMALL), ("plan_large.txt", LARGE)])
def test_what_it_prints(name: str, words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    out, err = capsys.readouterr()
    check_golden(name, without_versions(out))
    assert max(len(line) for line in out.splitlines()) <= 80
    assert len(out.splitlines()) < 50
    assert "\x1b" not in out
    assert err == (
        f"initopt: making the model of {words[0]}\na factory may print\ninitopt: planning for {words[2]} ranks\n"
    )


def test_all_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LARGE, "--all") == 0
    out = capsys.readouterr().out
    assert "\n127 " in out
    assert len(out.splitlines()) > 128


def test_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["version"] == 1
    assert data["planned_for"]["world_size"] == 4
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2, 3]
    assert sum(kind["tables"] for kind in data["kinds"]) == 4
    assert {table["name"]: table["rows"] for table in data["tables"]}["t3"] == 5_000_000
    assert data["tables"][0]["sharding"]["sharding_type"]
    assert data["slowest_rank"] == max(data["ranks"], key=lambda rank: rank["time"])["rank"]


def test_a_plan_is_written_and_shown_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "-o", "plan.json") == 0
    first, err = capsys.readouterr()
    assert err.endswith("initopt: wrote plan.json\n")
    assert first.splitlines()[-1] == "next: initopt plan plan.json --all, initopt plan ... --diff plan.json"
    assert run("plan.json") == 0
    again = capsys.readouterr().out
    assert again.splitlines()[2:-1] == first.splitlines()[2:-1]


def test_it_is_the_plan_that_a_job_makes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.sharding_plan import get_default_sharders

    from initopt.sharding_plan.pinning import load_plan

    assert run(*SMALL, "-o", "plan.json", "--constraints", "model_to_plan:limits") == 0
    import model_to_plan  # type: ignore[import-not-found]

    on = Topology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=32 << 30)
    with pytest.warns(FutureWarning, match="HeuristicalStorageReservation"):
        planner = EmbeddingShardingPlanner(topology=on, constraints=model_to_plan.limits())
    stock = planner.plan(model_to_plan.small(), get_default_sharders())
    pinned = load_plan("plan.json", model_to_plan.small(), world_size=4, local_world_size=2, device="cuda", topology=on)
    assert pinned == stock


def test_two_plans_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "-o", "plan.json") == 0
    capsys.readouterr()
    assert run(*SMALL, "--diff", "plan.json") == 0
    check_golden("plan_same.txt", capsys.readouterr().out)
    other = (*SMALL, "--constraints", "model_to_plan:limits", "--batch-size", "4096")
    assert run(*other, "--diff", "plan.json") == 1
    out = capsys.readouterr().out
    check_golden("plan_diff.txt", out)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert run(*other, "--diff", "plan.json", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert "sparse.ebc.t0" in [table["table"] for table in data["tables"]]
    assert data["planned_for"] == {"batch_size": {"before": 512, "after": 4096}}
    assert {rank["rank"] for rank in data["ranks"]} <= {0, 1, 2, 3}


def test_plans_of_other_ranks_and_tables_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "-o", "plan.json") == 0
    capsys.readouterr()
    assert run("model_to_plan:large", "--world-size", "8", "--local-size", "2", "--diff", "plan.json") == 1
    out = capsys.readouterr().out
    assert "  world_size: 4 -> 8\n" in out
    assert "  sparse.ebc.t4: not there -> " in out
    assert "  6 more (--all)\n" in out
    assert "4 more ranks with other estimates (--all)\n" in out
    assert run("plan.json", "--diff", "plan.json") == 0


def test_a_plan_that_can_not_run_is_a_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model_to_plan:odd", "--world-size", "2", "--local-size", "2", "--constraints", "model_to_plan:limits")
    assert run(*words) == 1
    out = capsys.readouterr().out
    assert "! table 'sparse.ebc.t0' is 6 wide, and the kernel 'fused' needs a multiple of 4:" in out
    assert run(*words, "--json") == 1
    assert json.loads(capsys.readouterr().out)["problems"][0].startswith("table 'sparse.ebc.t0' is 6 wide")


def test_no_plan_is_a_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model_to_plan:large", "--world-size", "2", "--local-size", "2", "--hbm", "64MB", "--ddr", "64MB")
    assert run(*words) == 1
    out = capsys.readouterr().out
    assert out.startswith("No plan for model_to_plan:large.\n")
    assert "Unable to find a plan for this model because of insufficient storage." in out
    assert out.splitlines()[-1] == "next: initopt plan ... --hbm 80GB --world-size N"
    assert max(len(line) for line in out.splitlines()) <= 80
    assert run(*words, "--json") == 1
    assert "insufficient storage" in json.loads(capsys.readouterr().out)["error"]


JOB = ("--world-size", "4", "--local-size", "2")

MISUSED: list[tuple[tuple[str, ...], str]] = [
    (
        ("model_to_plan:small",),
        "--world-size and --local-size missing: a plan is made for so many ranks, so many of them a host",
    ),
    (
        ("model_to_plan:small", "--world-size", "4"),
        "--local-size missing: a plan is made for so many ranks, so many of them a host",
    ),
    (
        ("model_to_plan:small", "--world-size", "2", "--local-size", "4"),
        "--local-size 4 is more than the --world-size 2",
    ),
    (
        ("model_to_plan", *JOB),
        "'model_to_plan' names no function: write module:function, which returns a torch.nn.Module",
    ),
    (
        ("no_such_module:make", *JOB),
        "'no_such_module' can't be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    (("broken:make", *JOB), "'broken' can't be imported: ZeroDivisionError: division by zero (broken.py line 2)"),
    (("leaving:make", *JOB), "'leaving' can't be imported: SystemExit: 2 (leaving.py line 1)"),
    (("model_to_plan:smal", *JOB), "module 'model_to_plan' has no 'smal' (did you mean 'small'?)"),
    (("model_to_plan:NAME", *JOB), "'model_to_plan:NAME' is 'int': name a function that returns a torch.nn.Module"),
    (
        ("model_to_plan:needs", *JOB),
        "'model_to_plan:needs' takes 'place': it is called without arguments, so name a function that takes "
        "none and returns a torch.nn.Module",
    ),
    (("model_to_plan:fails", *JOB), "'model_to_plan:fails' failed: RuntimeError: no data (model_to_plan.py line 49)"),
    (("model_to_plan:leaves", *JOB), "'model_to_plan:leaves' failed: SystemExit: 3 (model_to_plan.py line 53)"),
    (
        ("model_to_plan:gives_a_list", *JOB),
        "'model_to_plan:gives_a_list' returned 'list': it must return a torch.nn.Module",
    ),
    (
        ("model_to_plan:dense", *JOB, "--sharders", "model_to_plan:sharders"),
        "the model has no tables that the sharders take, which are those of EmbeddingBagCollection",
    ),
    (
        (*SMALL, "--sharders", "model_to_plan:limits"),
        "'model_to_plan:limits' returned 'dict': it must return a list of sharders",
    ),
    (
        (*SMALL, "--constraints", "model_to_plan:sharders"),
        "'model_to_plan:sharders' returned 'list': it must return a dict of ParameterConstraints by table name",
    ),
    ((*SMALL, "--device", "gpu"), "--device 'gpu' is none of cuda, cpu, mtia, tpu"),
    ((*SMALL, "--ddr", "much"), "--ddr 'much' is not understood: write a size such as 80GB (1 GB = 1024^3 bytes)"),
    ((*SMALL, "-o", "no/plan.json"), "no/plan.json: can't be written: No such file or directory"),
    ((*SMALL, "--diff", "no.json"), "no.json: can't be read: No such file or directory"),
    (("no.json",), "no.json: can't be read: No such file or directory"),
    (("torn.json",), "torn.json: is torn or no plan file: Expecting value: line 1 column 1 (char 0)"),
]


@pytest.mark.parametrize(("words", "message"), MISUSED)
def test_what_can_not_be_done_is_said(
    words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("def make(): ...\nhalf = 1 / 0\n")
    (folder / "leaving.py").write_text("raise SystemExit(2)\n")
    (folder / "torn.json").write_text("half a plan")
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == f"initopt: {message}"


def warnings_of(folder: Path, **changes: Any) -> list[str]:
    """The warnings for the small plan, with rank 0's estimates changed."""
    from initopt.sharding_plan.plan_file import PlanFile

    if not Path("plan.json").exists():
        assert run(*SMALL, "-o", "plan.json") == 0
    plan = PlanFile.read("plan.json")
    even = [replace(rank, hbm=10 << 30, ddr=0, forward_compute=1.0) for rank in plan.ranks]
    data = plan_view.plan_view(replace(plan, ranks=(replace(even[0], **changes), *even[1:])), name="x").data
    warned: list[str] = data["warnings"]
    return warned


def test_what_is_uneven_is_said_with_its_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings_of(folder) == []
    assert warnings_of(folder, forward_compute=1.2) == []
    assert warnings_of(folder, forward_compute=5.0) == [
        "uneven time: rank 0 takes ~5.2ms, 2.39 times the mean of ~2.2ms, and the others wait for it",
    ]
    assert warnings_of(folder, hbm=20 << 30) == [
        "uneven HBM: rank 0 needs ~20.0 GB, 1.60 times the mean of ~12.5 GB",
    ]
    assert warnings_of(folder, hbm=30 << 30) == ["HBM of rank 0 is ~94% full of tables"]


def test_numbers_are_short() -> None:
    assert [plan_view.milliseconds(t) for t in (0, 0.041, 4.2, 123.4, 1500)] == [
        "0", "0.04ms", "4.2ms", "123ms", "1.5s",
    ]  # fmt: skip
    assert [plan_view.size(s << 20) for s in (0, 3, 30, 80 << 10)] == ["0", "3.0 MB", "30 MB", "80.0 GB"]


def test_without_torchrec(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("initopt.sharding_plan")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec.distributed.types", None)
    assert run(*SMALL) == 2
    assert capsys.readouterr().err.startswith("initopt: a plan is made by torchrec, which does not load here: ")


def test_tables_in_memory_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import nn

    from initopt.sharding_plan import offline
    from tests.plans import bags

    monkeypatch.setattr(offline, "_LARGE", 1000)
    held = nn.ModuleDict({"e": bags(), "over": nn.Linear(100, 100)})
    found: Any = offline.plan_offline(held, world_size=2, local_world_size=2)
    assert [note[:40] for note in found.notes] == ["the model takes 0.0 GB of this machine's"]
    assert offline.plan_offline(held.to(torch.device("meta")), world_size=2, local_world_size=2).notes == ()


def test_planning_leaves_logging_as_it_was(folder: Path) -> None:
    import logging

    from initopt.sharding_plan import offline
    from tests.plans import bags, model

    before = logging.root.manager.disable
    offline.plan_offline(model(bags()), world_size=2, local_world_size=2)
    assert logging.root.manager.disable == before
