"""Meetings left out on real gloo ranks: everything is as in TorchRec, and ranks that differ are found."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from tests.multirank.eliminated_ranks import HOW, Case, Outcome, built, groups, outcome, outcomes, own_group
from tests.multirank.forked import fork_ranks

pytestmark = pytest.mark.timeout(300)

TABLE = [
    # The meetings of TorchRec, and what is left of them: the agreement, the data-parallel tables, other dense values.
    (Case("EBC", ("table_wise",) * 3), 3, 1),
    (Case("EBC", ("row_wise",) * 3), 3, 1),
    (Case("EBC", ("column_wise", "column_wise twice")), 3, 1),
    (Case("EBC", ("data_parallel",) * 4, seeds="rank"), 9, 3),
    (Case("EBC", ("table_row_wise", "grid_shard")), 9, 1),
    (Case("EBC", ("table_row_wise", "grid_shard"), local=4), 10, 1),
    (Case("EBC", ("table_row_wise",) * 2, local=1), 10, 1),
    (Case("EBC", HOW), 12, 2),
    (Case("EBC", HOW, seeds="one"), 12, 3),
    (Case("EC", ("table_wise", "row_wise", "column_wise")), 6, 1),
    (Case("EC", ("table_wise",) * 8), 11, 1),
    # TorchRec can't train these on a CPU.
    (Case("EC", ("data_parallel", "data_parallel", "table_wise"), steps=0, seeds="rank"), 8, 3),
    (Case("EC", ("table_wise", "data_parallel"), steps=0, seeds="rank", device="cpu"), 7, 3),
    (Case("EC", ("table_wise", "row_wise"), steps=0, kernel="dense"), 5, 1),
    (Case("EC", ("table_wise", "row_wise", "data_parallel"), steps=0, half=True), 8, 2),
    (Case("MC EBC", ("row_wise",) * 2), 13, 1),
    (Case("MC EC", ("row_wise",) * 2), 15, 1),
    (Case("EBC", ("table_wise",), dense=False), 1, 1),
]
CASES = [case for case, _, _ in TABLE]


def test_everything_but_the_meetings_is_as_in_torchrec() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    stock = fork_ranks(outcomes, CASES, "stock", ranks=4, timeout=150)
    mine = fork_ranks(outcomes, CASES, "eliminated", ranks=4, timeout=150)
    for case, before, after in TABLE:
        for expected, found in zip(stock, mine, strict=True):
            one, other = expected[case.name], found[case.name]
            assert other.state == one.state, case.name
            assert other.metadata == one.metadata, case.name
            assert other.result() == one.result(), case.name
            assert sum(one.meetings.values()) == before, (case.name, one.meetings)
            assert sum(other.meetings.values()) == after, (case.name, other.meetings)
            assert "new_group" not in other.meetings and "barrier" not in other.meetings
    own_seeds = next(case for case in CASES if set(case.shardings) == {"data_parallel"} and case.module == "EBC")
    states = [dict(rank[own_seeds.name].state) for rank in mine]
    assert len({(state.pop("own"), state.pop("trained own")) for state in states}) == 4, "a rank's own buffer stays"
    assert states == states[:1] * 4 and own_seeds.seeds == "rank", "all else is sent from rank 0"
    by_host = {case.local: mine[0][case.name].groups for case in CASES if case.shardings[:1] == ("table_row_wise",)}
    assert by_host == {2: 2, 4: 1, 1: 1}, "a group of all ranks is the world's"


def alone(case: Case, around: Callable[[], Any], **changes: Any) -> tuple[Outcome, list[str]]:
    """One case on this rank, and what was said."""
    import logging

    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = outcome(case, around, **changes)
    return found, [str(one.message) for one in caught if "initopt" in str(one.message)]


def one_differs(change: Callable[[int], None], case: Case, strict: bool = False) -> tuple[bool, Outcome, list[str]]:
    """Whether a case is as in TorchRec after `change` on each rank, what became of it, and what was said."""
    from initopt import eliminated

    rank = int(os.environ["RANK"])
    expected, _ = alone(case, nullcontext)
    change(rank)
    found, said = alone(case, lambda: eliminated(strict=strict))
    return found.result() == expected.result(), found, said


def unknown_version(rank: int) -> None:
    from initopt.comm_elim import elimination

    elimination.TESTED["torchrec"] = "0."


def test_with_an_unknown_version_nothing_is_left_out() -> None:
    case = Case("EC", ("table_wise", "row_wise"), steps=1)
    tested = "torch 2.13.* and torchrec 0.*"
    told = f"initopt: no meeting of ranks is left out: torchrec 1.9.2 is not what was tested ({tested})"
    for rank, (equal, found, said) in enumerate(fork_ranks(one_differs, unknown_version, case)):
        assert equal and found.left_out == {} and found.meetings["all_gather_object"] == 2
        assert said == ([told] if rank == 0 else [])


def known_flag(rank: int) -> None:
    from torchrec.distributed import collective_utils

    if rank == 1:
        collective_utils._USE_COLLECTIVE_VALIDATION, collective_utils._INITIALIZED = True, True


def test_a_flag_that_one_rank_has_already_is_asked_for() -> None:
    case = Case("EC", ("table_wise", "row_wise"), steps=1)
    for equal, found, _ in fork_ranks(one_differs, known_flag, case):
        assert equal
        assert found.meetings["broadcast_object_list"] == 1 and found.left_out == {"ec_metadata": 2, "ddp_sync": 2}
        assert "rank 1: validation of collectives on, from before" in found.kept["validation_flag"]


def made_groups_before(rank: int) -> None:
    from initopt.comm_elim import groups

    groups._generation = rank


def test_groups_that_were_made_at_other_times_are_torchrecs() -> None:
    case = Case("EBC", ("table_row_wise",) * 2, local=1, steps=1)
    for equal, found, _ in fork_ranks(one_differs, made_groups_before, case):
        assert equal and found.meetings["new_group"] == 3 and "groups" not in found.left_out
        assert "rank 1: groups made: 1" in found.kept["groups"]


def wants_barriers(rank: int) -> None:
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"


def test_groups_that_need_all_ranks_are_torchrecs() -> None:
    case = Case("EBC", ("table_row_wise",) * 2, local=1, steps=1)
    for equal, found, said in fork_ranks(one_differs, wants_barriers, case):
        assert equal and said == [] and found.meetings["new_group"] == 3
        assert found.kept["groups"].startswith("TORCH_DIST_INIT_BARRIER asks for a barrier")


def test_without_the_agreement_the_result_would_differ() -> None:
    """That a sync is left out is seen by the tests above."""

    @contextmanager
    def blind() -> Any:
        from initopt.comm_elim.ddp_sync import without_sync

        with without_sync(lambda module: True):
            yield

    case = Case("EBC", ("table_wise", "row_wise"), seeds="rank", steps=1)
    stock = fork_ranks(lambda: alone(case, nullcontext)[0].result())
    assert fork_ranks(lambda: alone(case, blind)[0].result()) != stock
    same = replace(case, seeds="equal")
    assert fork_ranks(lambda: alone(same, blind)[0].result()) == fork_ranks(
        lambda: alone(same, nullcontext)[0].result()
    )


def twice() -> tuple[list[int], list[float], bool]:
    """Two process groups in one process, with what TorchRec keeps in globals; then groups of other code."""
    import torch
    from torch import distributed
    from torchrec.distributed import comm
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from initopt import eliminated

    case = Case("EBC", ("table_row_wise",) * 2, local=2)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    made, sums = [], []
    rank = int(os.environ["RANK"])
    first = None
    for _ in range(2):
        with own_group(forgets=False):
            model, plan, sharders = built(case)
            before = groups()
            with eliminated():
                DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
            made.append(groups() - before)
            if first is not None:
                new = comm._INTRA_PG is not first
            first = comm._INTRA_PG
            total = torch.tensor([float(rank)])
            distributed.all_reduce(total, group=comm._INTRA_PG)
            sums.append(total.item())
            # Names that other code derives from what a rank has made are still the same on all members.
            pair = distributed.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
            total = torch.tensor([float(rank)])
            distributed.all_reduce(total, group=pair)
            sums.append(total.item())
            everybody = distributed.new_group()
            total = torch.tensor([float(rank)])
            distributed.all_reduce(total, group=everybody)
            sums.append(total.item())
            distributed.barrier()
    return made, sums, new


def test_groups_are_made_anew_after_a_destroy_and_leave_other_codes_alone() -> None:
    for rank, (made, sums, new) in enumerate(fork_ranks(twice, ranks=4)):
        assert made == [2, 2] and new
        pair = 1.0 if rank < 2 else 5.0
        assert sums == [pair, pair, 6.0] * 2


def patched() -> list[int]:
    """What the rewrites replace, by `id` of what stands there."""
    import torch.nn.parallel.distributed as ddp
    from torch import distributed
    from torch.distributed import device_mesh
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torchrec.distributed import embedding, embeddingbag, mc_modules, model_parallel, types
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.sharding import grid_sharding, twrw_sharding

    homes = (
        *(ddp, ddp.DistributedDataParallel, distributed, ShardedTensor, grid_sharding, twrw_sharding),
        *(embedding.ShardedEmbeddingCollection, embeddingbag.ShardedEmbeddingBagCollection),
        *(mc_modules.ShardedManagedCollisionCollection, model_parallel, model_parallel.DistributedModelParallel),
        *(model_parallel.DefaultDataParallelWrapper, model_parallel.DMPCollection),
        *(types.ShardingEnv, device_mesh, EmbeddingShardingPlanner),
    )
    return [id(value) for home in homes for _, value in sorted(vars(home).items()) if callable(value)]


def left_as_it_was() -> bool:
    from initopt import eliminated

    before = patched()
    alone(Case("EBC", ("table_row_wise", "data_parallel"), steps=0, local=1), eliminated)
    inside = []

    @contextmanager
    def failing() -> Any:
        with eliminated():
            inside.append(patched())
            yield
            raise KeyError

    with pytest.raises(KeyError):
        alone(Case("EC", ("table_wise",), steps=0), failing)
    return patched() == before and inside[0] != before


def test_nothing_stays_patched() -> None:
    assert fork_ranks(left_as_it_was) == [True, True]


def kept(kind: str) -> tuple[bool, Outcome]:
    """A case in which something is not known: whether it is as in TorchRec, and what became of it."""
    from torchrec.distributed import model_parallel

    from initopt import eliminated
    from tests.multirank import eliminated_ranks

    case = Case("EBC", ("table_wise", "data_parallel"), seeds="rank", steps=2)
    changes: dict[str, Any] = {}
    if kind == "own init_fn":
        changes["init_fn"] = lambda table: table.data.uniform_(0, 1)
    if kind == "meta dense":
        changes["dense_device"] = "meta"
    if kind == "subclass":

        class Mine(model_parallel.DistributedModelParallel):  # type: ignore[misc]
            def _init_dmp(self, module: Any) -> Any:
                return super()._init_dmp(module)

        eliminated_ranks.PARALLEL = Mine
    if kind == "sharded":
        from torchrec.distributed import embeddingbag

        class Sharded(embeddingbag.ShardedEmbeddingBagCollection):  # type: ignore[misc]
            def init_data_parallel(self) -> None:
                super().init_data_parallel()
                assert self._lookups[1].module.__class__.__name__ == "GroupedPooledEmbeddingsLookup", "wrapped once"

            def reset_parameters(self) -> None:
                import torch

                torch.rand(())
                super().reset_parameters()

        embeddingbag.EmbeddingBagCollectionSharder.shard = lambda sharder, module, params, env, device=None, fqn=None: (
            Sharded(module, params, env, sharder.fused_params, device)
        )
    if kind == "sharder":
        case = replace(case, seeds="equal")
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

        class Own(EmbeddingBagCollectionSharder):  # type: ignore[misc]
            pass

        changes["sharder"] = Own()
    expected, _ = alone(case, nullcontext, **changes)
    found, _ = alone(case, eliminated, **changes)
    return found.result() == expected.result(), found


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("own init_fn", "dp_tables", "may read its table"),
        ("meta dense", "ddp_sync", "not known before the model is sharded"),
        ("sharded", "dp_tables", "Sharded is not TorchRec's own"),
        ("subclass", "validation_flag", "Mine has a _init_dmp of its own"),
        ("sharder", "ddp_sync", "Own may write to dense parameters"),
    ],
)
def test_what_is_not_known_is_as_in_torchrec(kind: str, name: str, why: str) -> None:
    for equal, found in fork_ranks(kept, kind):
        assert equal
        assert name not in found.left_out and why in found.kept[name]


def written_to() -> str:
    """A dense parameter is written to between the agreement and the wrap of the model."""
    import torch
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from initopt import eliminated
    from initopt.replaced import on_this_thread

    def build(dmp: Any, module: Any) -> Any:
        with torch.no_grad():
            module.over.weight.add_(1)
        return dmp._init_dmp(module)

    with (
        pytest.raises(RuntimeError, match="was written to on this rank after all ranks had agreed") as caught,
        on_this_thread(DistributedModelParallel, "_init_dmp", build),
    ):
        alone(Case("EBC", ("table_wise",) * 2), eliminated)
    return str(caught.value)


def test_a_parameter_that_is_written_to_after_the_agreement_is_named() -> None:
    assert all("'over.weight'" in text for text in fork_ranks(written_to))


def test_rewrites_are_switched_off_by_name() -> None:
    def without(named: list[str], variable: str) -> dict[str, int]:
        from initopt import eliminated

        os.environ["INITOPT_DISABLE"] = variable
        found, _ = alone(Case("EC", ("table_wise", "row_wise"), steps=0), lambda: eliminated(named))
        return found.left_out

    every = ["validation_flag", "groups", "ec_metadata", "mc_metadata", "dp_tables", "ddp_sync"]
    assert fork_ranks(without, every, "") == [{"validation_flag": 1, "ec_metadata": 2, "ddp_sync": 2}] * 2
    assert fork_ranks(without, every, "ec_metadata, ddp_sync") == [{"validation_flag": 1}] * 2
    assert fork_ranks(without, ["ec_metadata"], "") == [{"ec_metadata": 2}] * 2
