"""Which calls are seen, as what, and that torch's functions are back afterwards. One process, a group of one rank."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp

from initopt.hooks import Meeting, watched


class Listener:
    def __init__(self) -> None:
        self.meetings: list[Meeting] = []
        self.begun: list[tuple[str, str]] = []
        self.entered: list[Meeting] = []
        self.groups: dict[str, tuple[int, ...]] = {}
        self.made: list[tuple[str, str]] = []
        self.seconds = 0.0

    def met(self, meeting: Meeting) -> None:
        self.meetings.append(meeting)

    def begins(self, op: str, call_site: str) -> None:
        self.begun.append((op, call_site))

    def enters(self, meeting: Meeting) -> None:
        self.entered.append(meeting)

    def around(self, meeting: Meeting, group: object) -> AbstractContextManager[None]:
        return nullcontext()

    def reads_payloads(self) -> bool:
        return True

    def group_seen(self, name: str, ranks: tuple[int, ...]) -> None:
        assert name not in self.groups
        self.groups[name] = ranks

    def group_made(self, group: object, name: str, call_site: str) -> None:
        self.made.append((name, call_site.rpartition(":")[0]))

    def spent(self, seconds: float) -> None:
        self.seconds += seconds

    def calls(self) -> list[tuple[str, str, int]]:
        return [(m.op, m.group, m.sequence) for m in self.meetings]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def listener() -> Listener:
    return Listener()


def functions() -> dict[str, object]:
    homes = {"dist": dist, "c10d": c10d, "ddp": ddp, "utils": torch.distributed.utils}
    return {f"{home}.{n}": v for home, module in homes.items() for n, v in vars(module).items() if callable(v)}


def test_every_name_of_a_function_is_hooked_and_put_back(group: None, listener: Listener) -> None:
    before = functions()
    elsewhere = types.ModuleType("a_trainer")
    sys.modules["a_trainer"] = elsewhere
    elsewhere.barrier = late = dist.barrier  # type: ignore[attr-defined]
    try:
        with watched(listener):
            assert functions() != before
            late = dist.barrier
            for barrier in (dist.barrier, c10d.barrier, elsewhere.barrier):
                barrier()
        assert elsewhere.barrier is before["c10d.barrier"]
    finally:
        del sys.modules["a_trainer"]
    assert functions() == before
    assert listener.calls() == [("barrier", "world", 0), ("barrier", "world", 1), ("barrier", "world", 2)]
    late()
    assert len(listener.meetings) == 3


def test_they_are_put_back_after_an_error(listener: Listener) -> None:
    before = functions()
    with pytest.raises(ZeroDivisionError), watched(listener):
        raise ZeroDivisionError
    assert functions() == before


def test_a_name_that_someone_else_has_replaced_is_hooked_too(
    group: None, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def barrier() -> None:
        c10d.barrier()

    monkeypatch.setattr(dist, "barrier", barrier)
    with watched(listener):
        dist.barrier()
        c10d.barrier()
    assert dist.barrier is barrier
    assert listener.calls() == [("barrier", "world", 0), ("barrier", "world", 1)]


def test_only_the_outermost_call_counts_and_has_the_bytes_of_those_inside(group: None, listener: Listener) -> None:
    with watched(listener):
        dist.broadcast_object_list(["a" * 1000])
    (meeting,) = listener.meetings
    assert (meeting.op, meeting.sequence) == ("broadcast_object_list", 0)
    assert 1000 < meeting.bytes < 1100


def test_what_a_rank_puts_in_is_counted(group: None, listener: Listener) -> None:
    one, two = torch.zeros(4), torch.zeros(4)
    with watched(listener):
        dist.all_reduce(one)
        dist.all_reduce(tensor=one, op=dist.ReduceOp.MAX)
        dist.all_gather([two], one.double().to(torch.float32))
        dist.reduce_scatter_single(two, one)
        dist.all_to_all_single(two, one)
        dist.barrier()
    assert [m.bytes for m in listener.meetings] == [16, 16, 16, 16, 16, 0]


def test_a_call_that_only_hands_over_says_so(group: None, listener: Listener) -> None:
    with watched(listener):
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
        dist.all_reduce(torch.zeros(1), dist.ReduceOp.SUM, None, True).wait()
        dist.all_reduce(torch.zeros(1))
    assert [m.async_op for m in listener.meetings] == [True, True, False]


def test_the_call_site_is_the_line_that_called_torch(group: None, listener: Listener) -> None:
    with watched(listener):
        line = sys._getframe().f_lineno + 1
        dist.broadcast_object_list([1])
    assert listener.meetings[0].call_site.endswith(f"test_hooks.py:{line}")


def test_an_error_goes_on_and_is_named(group: None, listener: Listener) -> None:
    with watched(listener), pytest.raises(RuntimeError, match="invalid root rank"):
        dist.broadcast(torch.zeros(1), src=5)
    assert (listener.meetings[0].op, listener.meetings[0].error) == ("broadcast", "RuntimeError")


def test_making_the_default_group_is_its_first_meeting(listener: Listener) -> None:
    with watched(listener):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.barrier()
    dist.destroy_process_group()
    assert listener.calls() == [("init_process_group", "world", 0), ("barrier", "world", 1)]
    assert listener.groups == {"world": (0,)}


def test_making_a_group_is_its_own_first_meeting(group: None, listener: Listener) -> None:
    with watched(listener):
        made = dist.new_group([0])
        dist.barrier(made)
        dist.barrier()
    name = made.group_name
    assert name != "world"
    assert listener.calls() == [("new_group", name, 0), ("barrier", name, 1), ("barrier", "world", 0)]
    assert listener.groups == {name: (0,), "world": (0,)}


def test_a_call_by_a_rank_outside_the_group_is_no_meeting(group: None, listener: Listener) -> None:
    with watched(listener), pytest.warns(UserWarning, match="does not belong to the given group"):
        dist.barrier(dist.GroupMember.NON_GROUP_MEMBER)
    assert listener.meetings == []


def test_the_two_meetings_of_a_ddp_constructor_are_seen(group: None, listener: Listener) -> None:
    with watched(listener):
        line = sys._getframe().f_lineno + 1
        DistributedDataParallel(torch.nn.Linear(4, 4))
    assert [(m.op, m.bytes) for m in listener.meetings] == [
        ("_verify_param_shape_across_processes", 0),
        ("_sync_module_states", 80),
    ]
    assert all(m.call_site.endswith(f"test_hooks.py:{line}") for m in listener.meetings)


def test_two_watches_both_see_a_call(group: None, listener: Listener) -> None:
    other = Listener()
    with watched(listener), watched(other):
        dist.broadcast_object_list([1])
    assert listener.calls() == other.calls() == [("broadcast_object_list", "world", 0)]


def test_a_collective_is_seen_while_another_thread_compiles(
    group: None, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    with watched(listener):
        dist.barrier()
    assert [meeting.op for meeting in listener.meetings] == ["barrier"]


def test_a_compiled_region_finds_torchs_own_function(group: None, listener: Listener) -> None:
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor * 2

    with watched(listener):
        compiled = torch.compile(reduced, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert listener.meetings == []


def test_times_and_own_cost_are_measured(group: None, listener: Listener) -> None:
    with watched(listener):
        dist.barrier()
    (meeting,) = listener.meetings
    assert meeting.start <= meeting.end and meeting.cpu > 0 and meeting.own > 0
    assert listener.seconds > 0


def test_a_later_watch_goes_on_counting(group: None, listener: Listener) -> None:
    calls: dict[str, int] = {}
    for _ in range(2):
        with watched(listener, calls):
            dist.barrier()
    assert [(op, sequence) for op, _, sequence in listener.calls()] == [("barrier", 0), ("barrier", 1)]


def test_a_listener_can_prevent_a_call(group: None, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(op: str, call_site: str) -> None:
        raise ValueError(f"no {op} at {call_site}")

    monkeypatch.setattr(listener, "begins", refuse)
    with watched(listener), pytest.raises(ValueError, match=r"no barrier at .*test_hooks.py:\d+"):
        dist.barrier()
    assert listener.calls() == []


def test_what_is_put_in_has_a_checksum(group: None, listener: Listener) -> None:
    with watched(listener):
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.zeros(4))
        dist.all_gather_object([None], {"a": 1})
        dist.all_gather_object([None], {"a": 1})
        dist.all_gather_object([None], {"a": 2})
        dist.broadcast_object_list(["x"])
        dist.broadcast_object_list(["y"])
        dist.barrier()
    digests = [meeting.digest for meeting in listener.meetings]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == digests[4] != digests[5]
    assert digests[6] != digests[7]
    assert all(len(digest) == 16 for digest in digests[:8]) and digests[8] == ""


def test_the_check_of_shapes_has_a_checksum_of_these(group: None, listener: Listener) -> None:
    with watched(listener):
        for seed in (0, 1):
            torch.manual_seed(seed)
            DistributedDataParallel(torch.nn.Linear(4, 4))
    shapes, values = [[m.digest for m in listener.meetings[first::2]] for first in (0, 1)]
    assert shapes[0] == shapes[1] and values[0] != values[1]


def test_the_root_is_a_rank_of_the_job(group: None, listener: Listener) -> None:
    with watched(listener):
        dist.broadcast(torch.ones(1), src=0)
        dist.broadcast(torch.ones(1), group_src=0)
        dist.broadcast_object_list([1])
        dist.all_reduce(torch.ones(1))
    assert [meeting.root for meeting in listener.meetings] == [0, 0, 0, -1]


def test_who_makes_a_group_says_for_whom_and_how(group: None, listener: Listener) -> None:
    with watched(listener):
        dist.new_group([0], backend="gloo")
        dist.new_group()
        dist.new_group([0], use_local_synchronization=True)
    assert [(m.op, m.ranks, m.options) for m in listener.meetings] == [
        ("new_group", (0,), "gloo"),
        ("new_group", (0,), "default"),
        ("new_group", (), "default"),
    ]


def test_the_callers_lead_out_of_torch(group: None, listener: Listener) -> None:
    def made() -> None:
        dist.broadcast_object_list([1])

    with watched(listener):
        made()
    found = [caller.rpartition(" ")[2] for caller in listener.meetings[0].callers]
    assert found[:2] == ["made", "test_the_callers_lead_out_of_torch"]


def test_functional_collectives_are_seen(group: None, listener: Listener) -> None:
    from torch.distributed import _functional_collectives as functional

    with watched(listener):
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum()
    assert [(m.op, m.group, m.bytes, m.async_op) for m in listener.meetings] == [("all_reduce", "world", 8, True)]


def test_a_block_of_coalesced_calls_is_one_meeting(group: None, listener: Listener) -> None:
    one, two = torch.ones(2), torch.ones(4)
    with watched(listener):
        with c10d._coalescing_manager():
            dist.all_reduce(one)
            dist.all_reduce(two)
        dist.barrier()
    assert [(m.op, m.sequence, m.bytes) for m in listener.meetings] == [
        ("_coalescing_manager", 0, 24),
        ("barrier", 1, 0),
    ]
    assert listener.meetings[0].call_site.rpartition("/")[2].startswith("test_hooks.py:")


def test_a_barrier_in_a_store_is_seen(listener: Listener) -> None:
    from torch.distributed.elastic.utils import store

    with watched(listener):
        store.barrier(dist.HashStore(), 1, "ready")
    assert listener.calls() == [("store.barrier", "store ready", 0)]
    assert listener.groups == {"store ready": (0,)}


def test_the_end_of_a_group_is_told_and_may_not_be_prevented(
    group: None, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dist.new_group([0])
    monkeypatch.setattr(listener, "begins", lambda op, site: pytest.fail(op))
    with watched(listener):
        dist.destroy_process_group(made)
    assert [(m.op, m.sequence) for m in listener.meetings] == [("destroy_process_group", -1)]


def test_a_call_is_told_before_it_is_made(group: None, listener: Listener) -> None:
    with watched(listener), pytest.raises(RuntimeError, match="invalid root rank"):
        dist.broadcast(torch.zeros(1), src=5)
    assert [(m.op, m.sequence, m.root) for m in listener.entered] == [("broadcast", 0, 5)]
