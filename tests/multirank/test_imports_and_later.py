"""On real ranks: modules imported beside the rendezvous, never beside a fork; what comes after the first step."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from initopt import GraphError, Recorder, Run, StartupFailed
from initopt.deferral import findings
from tests.multirank.forked import fork_ranks
from tests.multirank.test_torchrec_plugin import config, small

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("INITOPT_DATA", str(tmp_path_factory.getbasetemp() / "criteo"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "runs"


def module(root: Path, name: str, text: str) -> str:
    (root.parent / f"{name}.py").write_text(textwrap.dedent(text))
    return name


def digest(**changes: Any) -> str:
    """Train three steps; the digest of all that came out."""
    import torch

    from benchmarks.trainers.trained_state import trained_state

    torch.manual_seed(0)
    ready = small(config(steps=3), **changes).run()
    losses = [ready.pipeline.progress(ready.batches)[0] for _ in range(3)]
    return trained_state(ready.model, ready.optimizer, losses)


def test_heavy_imports_run_beside_the_store_and_change_no_bit(root: Path) -> None:
    # The module's import ends once `store` has: they overlap, or the start-up stops with StepTimeout.
    name = module(root, "heavy_module", "import meeting\nassert meeting.there.wait(60)\n")
    module(root, "meeting", "import threading\nthere = threading.Event()\n")

    def job(imports: tuple[str, ...]) -> str:
        import meeting

        from initopt.plugins import torchrec

        made = torchrec.trainer

        def with_a_step(**given: Any) -> Any:
            start = made(**given)
            start.step(lambda store: meeting.there.set(), name="tells", lane="io:tells")
            return start

        import tests.multirank.test_torchrec_plugin as plugin_tests

        plugin_tests.trainer = with_a_step
        return digest(imports=imports)

    expected = fork_ranks(job, ())
    # Without a ledger, and with one, where the loader starts before the rendezvous.
    for _ in range(2):
        assert fork_ranks(job, (name,)) == expected
        run = Run.latest(root)
        assert run.graph is not None
        for rank in range(2):
            spans = {span.name: span for span in run.of_rank(rank) if span.kind == "step"}
            assert spans["heavy_imports"].end >= spans["store"].end
            assert spans["heavy_imports"].end <= min(spans[name].start for name in ("model", "loader", "planner"))
            assert spans["first_step"].error == ""
    early = run.graph["process_group"].after
    assert "loader" in early and "loader.settle" in run.graph


def test_nothing_forks_while_modules_are_imported(root: Path) -> None:
    # As in the hang of a loader whose worker needs a module that another thread is in the middle of importing.
    name = module(
        root,
        "slow_module",
        """
        import meeting
        meeting.begun.set()
        assert meeting.may_fork.wait(60)
        # Time enough for a fork that does not wait for this import.
        forked_meanwhile = meeting.forked.wait(0.5)
        """,
    )
    names = "begun, may_fork, forked"
    module(root, "meeting", f"import threading\n{names} = (threading.Event() for _ in range(3))\n")

    def job() -> tuple[bool, int]:
        import meeting

        start = small(config(), imports=(name,))

        @start.step(lane="io:tells")
        def ready_to_fork() -> None:
            assert meeting.begun.wait(60)
            meeting.may_fork.set()

        @start.step(uses="fork")
        def forks(ready_to_fork: None) -> int:
            meeting.forked.set()
            child = os.fork()
            if child == 0:
                __import__(name)
                os._exit(7)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        ready = start.run()
        ready.pipeline.progress(ready.batches)
        return sys.modules[name].forked_meanwhile, ready.values.forks

    assert fork_ranks(job) == [(False, 7)] * 2


def test_a_module_that_draws_is_refused(root: Path) -> None:
    name = module(root, "drawing_module", "import torch\nnoise = torch.rand(3)\n")

    def job() -> str:
        try:
            small(config(), imports=(name,)).run()
        except StartupFailed as error:
            return str(error.exceptions[0])
        return "it ran"

    [said] = fork_ranks(job, ranks=1)
    assert said.startswith("the import of 'drawing_module' draws random numbers")


def test_a_name_alone_is_no_list_of_modules() -> None:
    with pytest.raises(TypeError, match=r"\('torchrec',\)"):
        small(config(), imports="torchrec")


def test_without_imports_the_steps_are_as_before() -> None:
    plain = small(config()).graph()
    assert "heavy_imports" not in plain
    imports = small(config(), imports=("json",)).graph()
    added = imports.diff(plain)
    assert added.removed == ("heavy_imports",)
    assert set(added.changed) == {"loader", "model", "pipeline", "planner", "sharders"}


def later_loader(place: Any, size: int) -> Any:
    from benchmarks.trainers import dlrm_model

    return (
        dlrm_model.make_loader(config(), place.rank, place.world_size),
        size,
        threading.current_thread().name,
    )


def test_what_comes_later_is_there_after_the_first_step_and_changes_no_bit(root: Path) -> None:
    def job(deferred: bool) -> tuple[str, list[str], int]:
        import torch

        from benchmarks.trainers.trained_state import trained_state

        torch.manual_seed(0)
        later: Mapping[str, Any] = {"validation": later_loader, "names": lambda validation, dmp: type(dmp).__name__}
        start = small(config(steps=3), **({"later": later} if deferred else {}))
        if not deferred:
            start.step(later_loader, name="validation")
        ready = start.run(size=3)
        assert not ready.later
        losses = [ready.pipeline.progress(ready.batches)[0] for _ in range(3)]
        if deferred:
            assert ready.later["names"] == "DistributedModelParallel"
        loader, size, thread = (ready.later if deferred else ready.values)["validation"]
        assert (size, thread) == (3, "MainThread") or not deferred
        return trained_state(ready.model, ready.optimizer, losses), sorted(ready.later), len(loader.dataset)

    before = fork_ranks(job, False)
    found = [finding.what for finding in findings(Run.latest(root))]
    assert set(found) <= {"validation"}
    after = fork_ranks(job, True)
    assert [state for state, _, _ in after] == [state for state, _, _ in before]
    assert after[0][1:] == (["names", "validation"], before[0][2])
    run = Run.latest(root)
    assert "validation" not in {span.name for span in run.spans}
    assert {note.step for note in run.notes} >= {"validation", "names"}


def test_what_comes_later_must_not_draw(root: Path) -> None:
    def job(kind: str) -> tuple[str, bool]:
        import random

        import numpy
        import torch

        draw = {"torch": lambda: torch.rand(1), "python": random.random, "numpy": lambda: numpy.random.rand()}[kind]
        with Recorder("job", mode="overlap") as recorder:
            ready = small(config(), later={"validation": lambda place: draw()}).run(recorder=recorder)
            with pytest.raises(RuntimeError) as raised:
                ready.pipeline.progress(ready.batches)
        return str(raised.value), "progress" in vars(ready.pipeline)

    for kind in ("torch", "python", "numpy"):
        [(said, hooked)] = fork_ranks(job, kind, ranks=1)
        assert said.startswith("'validation' of `later` drew random numbers")
        assert not hooked


def test_what_comes_later_is_checked_before_anything_runs() -> None:
    with pytest.raises(GraphError, match=r"'validation' of `later` takes 'plaice', which no step or input provides"):
        small(config(), later={"validation": lambda plaice: 1}).run()
    with pytest.raises(GraphError, match=r"'model' of `later` is the name of a step"):
        small(config(), later={"model": lambda: 1}).run()
    with pytest.raises(TypeError, match="later is a list: give a dict of names and factories"):
        small(config(), later=[lambda: 1])
