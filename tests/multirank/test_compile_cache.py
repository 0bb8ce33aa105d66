"""Compiled code between ranks and starts: real ranks and their store; what stands for a compile writes files."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from initopt.compile_cache import board
from tests.multirank.forked import fork_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "POLL", 0.01)


@dataclass(frozen=True)
class Started:
    """What one rank saw in one start: whether it compiled, what was in its folder then and afterwards, its words."""

    compiled_from: frozenset[str]
    files: frozenset[str]
    graphs: int
    found: Any
    warned: tuple[str, ...]


def kept() -> None:
    """Wait for what is being kept: a forked rank ends without its threads."""
    for thread in threading.enumerate():
        if thread.name == "initopt-compile-cache":
            thread.join()


def start(
    disk: Path,
    place: str,
    *,
    own: bool = True,
    shared: bool = True,
    model: str = "m",
    fails: Callable[[int], bool] = lambda rank: False,
    graphs: int = 1,
) -> Started:
    import torch
    from torch.distributed import TCPStore

    from initopt.compile_cache.bundle import names_in
    from initopt.compile_cache.cache import Cache, Ranks
    from initopt.compile_cache.key import Key

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(disk / str(rank) if own else disk)
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
    seen: list[frozenset[str]] = []

    def compile_now(say: Callable[[str], None]) -> int:
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        seen.append(names_in(folder))
        if fails(rank):
            raise RuntimeError("no compiler")
        if graphs and "entry" not in seen[-1]:
            say("compiles 'part'")
            (folder / "entry").write_text("compiled code")
        return graphs

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = Cache.open(
            Key({"model": model}), torch.device("meta"), Ranks(store, rank, world_size), place=place, shared=shared
        )
        cache.look_up()
        try:
            made = cache.make(compile_now)
        except RuntimeError:
            made = -1
        assert cache.meet() == ()
        cache.keep()
        kept()
    there = names_in(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    told = tuple(str(one.message) for one in caught if str(one.message).startswith("initopt: "))
    # Rank 0 serves the store.
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world_size:
        pass
    return Started(seen[0], there, made, cache.found, told)


def test_one_rank_compiles_and_the_others_load(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    cold = fork_ranks(start, tmp_path / "a", place, ranks=4)
    assert sorted(one.found.role for one in cold) == ["follower", "follower", "follower", "leader"]
    assert sorted(len(one.compiled_from) for one in cold) == [0, 1, 1, 1]
    assert not any(one.found.hit or one.warned for one in cold)
    # The same disks, and disks that are empty.
    for disk in ("a", "b"):
        again = fork_ranks(start, tmp_path / disk, place, ranks=4)
        assert all(one.found.hit and one.compiled_from == {"entry"} and not one.warned for one in again)


def test_ranks_of_one_folder_need_no_store_between_them(tmp_path: Path) -> None:
    file = tmp_path / "store"
    file.write_text("no folder can be made here")
    cold = fork_ranks(start, tmp_path / "a", str(file), own=False, shared=False)
    assert sorted(len(one.compiled_from) for one in cold) == [0, 1]
    assert all(one.graphs == 1 and len(one.warned) == 1 and str(file) in one.warned[0] for one in cold)
    again = fork_ranks(start, tmp_path / "a", str(file), own=False, shared=False)
    assert all(one.found.hit for one in again)


def test_without_a_shared_place_ranks_of_own_folders_still_compile_once(tmp_path: Path) -> None:
    """They are on one host here, so that they see the same place: a host has one leader."""
    cold = fork_ranks(start, tmp_path / "a", str(tmp_path / "store"), shared=False)
    assert sorted(len(one.compiled_from) for one in cold) == [0, 1]


def test_an_emptied_store_is_filled_again_from_a_disk(tmp_path: Path) -> None:
    fork_ranks(start, tmp_path / "a", str(tmp_path / "store"))
    again = fork_ranks(start, tmp_path / "a", str(tmp_path / "other"))
    assert all(one.found.hit for one in again)
    moved = fork_ranks(start, tmp_path / "b", str(tmp_path / "other"))
    assert all(one.found.hit for one in moved)


def test_another_model_is_a_miss_that_says_why(tmp_path: Path) -> None:
    fork_ranks(start, tmp_path / "a", str(tmp_path / "store"))
    other = fork_ranks(start, tmp_path / "a", str(tmp_path / "store"), model="other")
    assert not any(one.found.hit for one in other)
    assert all("differs in model" in one.found.why for one in other)


@pytest.mark.parametrize("damage", ["truncated", "edited", "foreign", "swapped"])
def test_what_does_not_carry_the_signature_leads_to_compiling(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(start, tmp_path / "a", str(tmp_path / "store"))
    [bundle] = (tmp_path / "store").glob("*/*.bundle")
    data = bytearray(bundle.read_bytes())
    if damage == "truncated":
        bundle.write_bytes(data[:-1])
    elif damage == "edited":
        data[-1] ^= 1
        bundle.write_bytes(data)
    elif damage == "foreign":
        monkeypatch.setenv("INITOPT_CACHE_KEY", "the secret of somebody else, and not of these tests")
    else:
        bundle.rename(bundle.with_name(f"{bundle.name[:17]}{'0' * 32}.bundle"))
    found = fork_ranks(start, tmp_path / "b", str(tmp_path / "store"))
    assert sorted(len(one.compiled_from) for one in found) == [0, 1]
    assert all(one.files == {"entry"} for one in found)
    said = [text for one in found for text in one.warned]
    assert said and all("was not opened" in text and bundle.parent.name in text for text in said)
    # It has been compiled and kept anew.
    assert all(one.found.hit for one in fork_ranks(start, tmp_path / "c", str(tmp_path / "store")))


def test_a_leader_whose_compile_fails_is_replaced(tmp_path: Path) -> None:
    first: list[Started] = fork_ranks(start, tmp_path / "a", str(tmp_path / "store"), fails=lambda rank: rank == 0)
    assert first[0].graphs == -1 or first[0].found.role == "follower"
    assert first[1].graphs == 1 and first[1].files == {"entry"}


def test_where_nothing_is_compiled_ahead_nothing_is_taken_for_complete(tmp_path: Path) -> None:
    none = fork_ranks(start, tmp_path / "a", str(tmp_path / "store"), graphs=0)
    assert all(one.graphs == 0 and not one.warned for one in none)
    assert not list((tmp_path / "a").glob("*/*.complete"))


HIDDEN = {"rank": -1}
"""A global, which no key of initopt's has."""


def own_constant(disk: Path, place: str) -> Any:
    """Compile a part whose code has the rank baked in where no key of ours sees it; return what it computes."""
    import torch
    from torch import nn
    from torch.distributed import TCPStore

    from initopt import Call, Compile
    from initopt.compile_cache.fast_batch import Examples

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(disk / str(rank))
    # Spares the probes of instruction sets and a compiled header.
    torch._inductor.config.cpp.vec_isa_ok = True
    torch._inductor.config.cpp_cache_precompile_headers = False
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
    HIDDEN["rank"] = rank

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (HIDDEN["rank"] + 2)

    part, device = Scaled(), torch.device("cpu")
    compile = Compile(lambda model: {"part": model}, dynamic=False, cache=place, shared=True)  # type: ignore[dict-item]
    compile.apply(part)
    cache = compile.open_cache(compile.prepare(part, device), device, store=store, rank=rank, world_size=world_size)
    cache.look_up()
    examples = Examples({"part": (Call((torch.empty(4),)),)})
    with torch.no_grad():
        assert cache.make(lambda say: compile.warm_up(part, device, examples, cache, say=say)) == 1
        cache.meet()
        with torch.compiler.set_stance("fail_on_recompile"):
            result = part(torch.ones(4)).tolist()
    with compile.first_step(part, (torch.ones(4),), cache):
        pass
    kept()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world_size:
        pass
    return result, cache.found


@pytest.mark.long
def test_a_constant_of_one_rank_never_gets_into_the_code_of_another(tmp_path: Path) -> None:
    place = tmp_path / "store"
    first = fork_ranks(own_constant, tmp_path / "a", str(place), timeout=120)
    assert [result for result, _ in first] == [[2.0] * 4, [3.0] * 4]
    [follower] = [found for _, found in first if found.role == "follower"]
    assert "some graphs are not those of rank" in follower.why
    # Both were kept, and each rank finds its own.
    moved = fork_ranks(own_constant, tmp_path / "b", str(place), timeout=120)
    assert [result for result, _ in moved] == [[2.0] * 4, [3.0] * 4]
    assert all(found.hit and not found.why for _, found in moved)
    # What was learned outlives the code: without it each of the two classes of ranks has a leader.
    for bundle in place.glob("*/*.bundle"):
        bundle.unlink()
    anew = fork_ranks(own_constant, tmp_path / "c", str(place), timeout=120)
    assert [result for result, _ in anew] == [[2.0] * 4, [3.0] * 4]
    assert [found.role for _, found in anew] == ["leader", "leader"]


def varying(disk: Path, place: str, dynamic: Any, sizes: tuple[int, ...]) -> tuple[int, int, str]:
    """Start up with a batch of 8 rows, train on batches of `sizes`; return the graphs ahead, the later ones, a remark.

    What stands for inductor hands the graph back: how often it is asked is what counts here.
    """
    import torch
    from torch import nn

    from initopt import Call, Compile
    from initopt.compile_cache import warmup
    from initopt.compile_cache.fast_batch import Examples

    warmup._Backend.__init__ = lambda self, *_: setattr(self, "_inductor", lambda graph, inputs: graph.forward)
    warmup.ask = lambda: None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(disk)

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    part, device = Doubled(), torch.device("cpu")
    compile = Compile(lambda model: {"part": model}, dynamic=dynamic, cache=place)  # type: ignore[dict-item]
    compile.apply(part)
    cache = compile.open_cache(compile.prepare(part, device), device, store=None, rank=0, world_size=1)
    cache.look_up()
    examples = Examples({"part": (Call((torch.empty(8),)),)})
    # The process that this one was forked from may have compiled, too.
    before = compile.graphs()
    ahead = cache.make(lambda say: compile.warm_up(part, device, examples, cache, say=say))
    compile.use_sizes(cache)
    with compile.first_step(part, (torch.ones(8),), cache):
        part(torch.ones(8))
    for size in sizes:
        assert part(torch.ones(size)).tolist() == [2.0] * size
    # As this process would where it ends.
    kept()
    cache._save()  # type: ignore[attr-defined]
    return ahead, compile.graphs() - before - ahead, compile.advice(part, cache)


def test_sizes_that_varied_are_compiled_for_at_once_in_the_next_start(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    sizes = (8, 5, 7, 3, 9)
    [first] = fork_ranks(varying, tmp_path / "a", place, None, sizes, ranks=1)
    assert first == (1, 1, "")
    [static] = fork_ranks(varying, tmp_path / "a", place, None, sizes, ranks=1)
    assert static[:2] == (1, 1)
    assert static[2].startswith(
        "one size (part: x.size(0)) varied in an earlier run, which compiled again for each: dynamic='recorded'"
    )
    assert "TORCH_COMPILE_DYNAMIC_SOURCES=\"L['x']:0\"" in static[2]
    [recorded] = fork_ranks(varying, tmp_path / "b", place, "recorded", sizes, ranks=1)
    assert recorded == (1, 0, "compiled for every value of one size (part: x.size(0)) that varied in an earlier run")
