"""What a start-up made and did not use: data loaders and process groups, watched on the real ones."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from initopt import Recorder, Run
from initopt.unused import Unused, Watch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Own:
    pass


def unused(root: Path, job: Any) -> list[Unused]:
    with Recorder("job", mode="stock", root=root) as recorder, recorder.collectives():
        job(recorder)
        with recorder.span("first_step"):
            pass
    return list(Run.latest(root).unused)


def test_a_loader_that_nobody_iterated(root: Path) -> None:
    from torch.utils.data import DataLoader

    def job(recorder: Recorder) -> None:
        with recorder.span("validation"):
            DataLoader([1, 2])
        with recorder.span("loader"):
            next(iter(DataLoader([1, 2])))

    [one] = unused(root, job)
    assert (one.what, one.step, one.alone) == ("loader", "validation", True)
    assert one.call_site.rpartition(":")[0].endswith("test_unused.py")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_gave_no_batch(root: Path, workers: int) -> None:
    from torch.utils.data import DataLoader

    kept = []

    def job(recorder: Recorder) -> None:
        with recorder.span("validation"):
            kept.append(iter(DataLoader([1, 2], num_workers=workers)))

    [one] = unused(root, job)
    assert (one.step, one.begun, one.begun_in) == ("validation", True, "validation")
    [made] = [span for span in Run.latest(root).spans if span.name == "validation"]
    assert made.start <= one.start < one.end <= made.end
    assert next(kept[0]) == 1


def test_an_iterator_that_gave_a_batch_or_is_gone(root: Path) -> None:
    from torch.utils.data import DataLoader

    kept: list[Any] = []

    def job(recorder: Recorder) -> None:
        loaders = [DataLoader([1, 2]) for _ in range(3)]
        kept.extend(iter(loader) for loader in loaders[:2])
        next(kept[0])
        # The first one gave a batch, though the next one did not.
        kept.append(loaders[0])
        kept.append(iter(loaders[0]))
        for _ in kept[1]:
            pass
        iter(loaders[2])

    assert unused(root, job) == []


def test_an_iterator_that_gave_a_batch_after_a_second_one_was_made(root: Path) -> None:
    """As in facebookresearch/dlrm, whose training loop chains an iterator and a filler of the same loader."""
    from torch.utils.data import DataLoader

    kept: list[Any] = []

    def job(recorder: Recorder) -> None:
        loader = DataLoader([1, 2])
        kept.extend([loader, iter(loader), iter(loader)])
        next(kept[1])

    assert unused(root, job) == []


def test_persistent_workers_that_begin_anew_were_used(root: Path) -> None:
    from torch.utils.data import DataLoader

    kept: list[Any] = []

    def job(recorder: Recorder) -> None:
        loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
        assert len(list(loader)) == 2
        kept.append(iter(loader))

    assert unused(root, job) == []


def test_after_watching_nothing_is_said(root: Path) -> None:
    from torch.utils.data import DataLoader

    with Recorder("job", mode="stock", root=root) as recorder:
        with recorder.collectives():
            loader = DataLoader([1, 2])
        with recorder.span("first_step"):
            next(iter(loader))
    run = Run.latest(root)
    assert run.unused == ()
    assert not run.watched[0].objects


def test_that_objects_were_watched_is_in_the_record(root: Path) -> None:
    assert unused(root, lambda recorder: None) == []
    assert Run.latest(root).watched[0].objects


def test_a_step_that_also_made_one_that_was_used(root: Path) -> None:
    from torch.utils.data import DataLoader

    def job(recorder: Recorder) -> None:
        with recorder.span("loaders"):
            loaders = [DataLoader([1, 2]) for _ in range(2)]
        next(iter(loaders[0]))

    [one] = unused(root, job)
    assert not one.alone


def test_a_loader_with_an_iterator_of_its_own_is_not_judged(root: Path) -> None:
    from torch.utils.data import DataLoader

    class Mine(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter([1])

    assert unused(root, lambda recorder: Mine([1, 2])) == []  # type: ignore[arg-type]


def test_loaders_are_as_ever(root: Path) -> None:
    from torch.utils.data import DataLoader

    before = DataLoader.__init__, DataLoader.__iter__
    signature = inspect.signature(DataLoader)

    def job(recorder: Recorder) -> None:
        assert DataLoader.__init__ is not before[0]
        assert inspect.signature(DataLoader) == signature
        kept = pickle.loads(pickle.dumps(DataLoader([1, 2])))
        assert [batch.item() for batch in kept] == [1, 2]
        with pytest.raises(TypeError):
            DataLoader()  # type: ignore[call-arg]

    unused(root, job)
    assert (DataLoader.__init__, DataLoader.__iter__) == before


def test_a_group_that_carried_no_collective(root: Path, group: None) -> None:
    import torch
    import torch.distributed as dist

    made = {}

    def job(recorder: Recorder) -> None:
        with recorder.span("groups"):
            made.update({name: dist.new_group([0]) for name in ("idle", "python", "compiled", "ddp")})
        dist.barrier(made["python"])
        from torch.distributed import _functional_collectives as functional

        assert functional.all_reduce(torch.ones(1), "sum", made["compiled"]).item() == 1
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=made["ddp"])

    [one] = unused(root, job)
    assert (one.what, one.step, one.group, one.alone) == ("group", "groups", made["idle"].group_name, False)
    [call] = [span for span in Run.latest(root).spans if span.group == one.group]
    assert call.op == "new_group"


def test_a_group_that_can_not_be_counted_is_not_judged() -> None:
    class Uncounted:
        def _get_sequence_number_for_group(self) -> int:
            raise RuntimeError("no sequence numbers here")

    class Gone:
        def __init__(self) -> None:
            self.asked = 0

        def _get_sequence_number_for_group(self) -> int:
            self.asked += 1
            if self.asked > 1:
                raise RuntimeError("the group was destroyed")
            return 0

    watch = Watch(lambda: "groups")
    for number, other in enumerate((object(), Uncounted(), Gone())):
        watch.group_made(other, str(number), "train.py:3")
    assert watch.found() == []
