"""Entry points are hooked right after the import of what they are in, if it is known, and are gone afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, dataloader

from initopt.entry_points import ENTRY_POINTS, Event, Hooks
from initopt.hooks import HIDDEN


class Noted:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.is_here = True

    def here(self) -> bool:
        return self.is_here

    @contextmanager
    def around(self, event: Event, arguments: tuple[Any, ...]) -> Iterator[None]:
        self.told.append(event)
        yield

    def instead(self, event: Event, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def becomes_rank(self) -> bool:
        return False

    def optimizer_stepped(self, optimizer: Any) -> None:
        self.told.append("stepped")

    def module_put_in(self) -> None:
        self.told.append("module")


@pytest.fixture
def noted() -> Iterator[tuple[Noted, Hooks]]:
    watcher = Noted()
    hooks = Hooks(watcher)
    yield watcher, hooks
    hooks.take_out()


def everything() -> dict[tuple[str, str], Any]:
    """What stands under the names of the table in torch."""
    found: dict[tuple[str, str], Any] = {}
    for row in ENTRY_POINTS:
        module = sys.modules.get(row.module)
        owner, _, name = row.name.rpartition(".")
        # What is called when a class is derived is not there before.
        if module is not None and owner != "*" and row.event != "derived":
            found[row.module, row.name] = vars(getattr(module, owner) if owner else module).get(name)
    return found


def test_all_is_hooked_and_all_is_as_before(noted: tuple[Noted, Hooks], monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, hooks = noted
    before = everything()
    assert None not in before.values()
    copy = ModuleType("copied")
    copy.new_group = torch.distributed.new_group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "copied", copy)
    for row in ENTRY_POINTS:
        hooks.imported(row.module)
    hooks.imported("torch")
    hooked = everything()
    assert [key for key in before if hooked[key] is before[key]] == []
    # As the modules that a process had imported before it was forked.
    assert copy.new_group is torch.distributed.new_group is before["torch.distributed.distributed_c10d", "new_group"]
    hooks.imported_before()
    assert copy.new_group is torch.distributed.new_group is hooked["torch.distributed.distributed_c10d", "new_group"]

    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in DataLoader([torch.ones(1)]):
        model(rows).sum().backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    assert watcher.told == ["module", "loader_made", "loader", "batch", "backward", "batch", "stepped", "checkpoint"]

    hooks.take_out()
    assert everything() == before
    assert copy.new_group is torch.distributed.new_group is before["torch.distributed.distributed_c10d", "new_group"]
    assert not modules._global_module_registration_hooks
    assert not optimizers._global_optimizer_post_hooks


def test_a_version_that_is_not_known_is_left_alone(noted: tuple[Noted, Hooks], monkeypatch: pytest.MonkeyPatch) -> None:
    _, hooks = noted
    before = everything()
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    for row in ENTRY_POINTS:
        if row.module.startswith("torch."):
            hooks.imported(row.module)
    hooks.imported("torch")
    assert {key: one for key, one in everything().items() if not key[0].startswith("torchrec")} == {
        key: one for key, one in before.items() if not key[0].startswith("torchrec")
    }
    assert hooks.unknown == {"torch": "3.0.0"}


def test_a_missing_name_is_left_alone(noted: tuple[Noted, Hooks], monkeypatch: pytest.MonkeyPatch) -> None:
    _, hooks = noted
    monkeypatch.delattr(dataloader, "_BaseDataLoaderIter")
    hooks.imported("torch.utils.data.dataloader")
    assert DataLoader.__iter__.__code__.co_filename == HIDDEN


def test_another_process_is_not_told(noted: tuple[Noted, Hooks]) -> None:
    watcher, hooks = noted
    hooks.imported("torch.utils.data.dataloader")
    watcher.is_here = False
    assert len(list(DataLoader([1, 2]))) == 2
    assert watcher.told == []


def test_no_frame_of_ours_is_in_a_traceback(noted: tuple[Noted, Hooks]) -> None:
    _, hooks = noted
    for row in ENTRY_POINTS:
        hooks.imported(row.module)
    with pytest.raises(RuntimeError) as found:
        torch.nn.Linear(1, 1).load_state_dict({})
    files = [str(entry.path) for entry in found.traceback]
    if sys.version_info < (3, 11):  # its bare `raise` brings the frame back
        files.remove(HIDDEN)
    assert files[1].endswith("module.py")
    assert HIDDEN not in files


def test_who_has_replaced_ours_since_keeps_his(noted: tuple[Noted, Hooks], monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, hooks = noted
    original = DataLoader.__iter__
    hooks.imported("torch.utils.data.dataloader")
    ours = DataLoader.__iter__

    def theirs(loader: Any) -> Any:
        return ours(loader)

    monkeypatch.setattr(DataLoader, "__iter__", theirs)
    hooks.take_out()
    assert DataLoader.__iter__ is theirs
    assert len(list(DataLoader([1, 2]))) == 2
    assert watcher.told == []
    monkeypatch.undo()
    DataLoader.__iter__ = original  # type: ignore[method-assign]
