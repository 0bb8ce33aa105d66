"""Dense parameters and buffers of every kind, without the sync of their wrap: as in TorchRec, to the last bit."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from tests.multirank.eliminated_ranks import Case, Outcome, outcome
from tests.multirank.forked import fork_ranks

CASE = Case("EBC", ("table_wise", "data_parallel"), steps=2)
EVERY = ("validation_flag", "plan", "groups", "ec_metadata", "mc_metadata", "dp_tables", "ddp_sync")


def frozen(model: Any) -> None:
    model.over.bias.requires_grad_(False)


def shared(model: Any) -> None:
    from torch import nn

    model.again = nn.Linear(*reversed(model.over.weight.shape))
    model.again.weight = model.over.weight


def tied(model: Any) -> None:
    model.again = model.over


def other_buffers(model: Any) -> None:
    """Rank 0's are not sent by TorchRec: each rank keeps its own."""
    import torch

    model.over.register_buffer("seen", torch.full((2,), 10.0 + int(os.environ["RANK"])))


def half(model: Any) -> None:
    import torch

    # Not contiguous, and of another type.
    model.turned = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())
    model.turned.requires_grad_(False)


KINDS = (frozen, shared, tied, other_buffers, half)


def changed(change: Any, around: Any, case: Case = CASE, **more: Any) -> Outcome:
    """A case whose model was changed after it was built."""
    from tests.multirank import eliminated_ranks

    real = eliminated_ranks.built

    def built(*args: Any, **kwargs: Any) -> Any:
        model, plan, sharders = real(*args, **kwargs)
        change(model)
        return model, plan, sharders

    eliminated_ranks.built = built
    try:
        return outcome(case, around, **more)
    finally:
        eliminated_ranks.built = real


def kinds() -> dict[str, tuple[bool, dict[str, int], dict[str, int], list[str]]]:
    import logging

    from initopt import eliminated

    logging.disable(logging.CRITICAL)
    found = {}
    for change in KINDS:
        stock, mine = changed(change, nullcontext), changed(change, eliminated)
        buffers = [mine.state[name] for name in ("own", "over.seen") if name in mine.state]
        found[change.__name__] = mine.result() == stock.result(), mine.left_out, mine.meetings, buffers
    return found


def test_parameters_of_every_kind_are_as_in_torchrec() -> None:
    one, other = fork_ranks(kinds)
    for change in KINDS:
        equal, left_out, meetings, _ = one[change.__name__]
        assert equal and other[change.__name__][0], change
        assert left_out["ddp_sync"] == 2 and meetings == {"all_gather_single": 1, "broadcast": 1}, change
        buffers, others = one[change.__name__][3], other[change.__name__][3]
        assert not set(buffers) & set(others), "each rank keeps its own buffers"


def other_shape() -> str:
    """What a rank is told where a dense parameter has another shape on rank 1. In TorchRec rank 0 waits."""
    import logging
    import warnings

    from torch import nn

    from initopt import Disagreement, eliminated

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    def change(model: Any) -> None:
        model.more = nn.Linear(2, 2 + int(os.environ["RANK"]))

    with pytest.raises(Disagreement) as caught:
        changed(change, eliminated)
    return str(caught.value)


def test_another_shape_on_one_rank_is_the_same_error_on_all_ranks() -> None:
    one, other = fork_ranks(other_shape)
    assert one == other
    assert one.startswith(
        "shapes of dense parameters differs between ranks (rank 0: number 2 has (2, 2); rank 1: number"
    )
    assert "dense parameters differs between ranks (rank 0: more.weight: (2, 2)" in one


def ignoring() -> tuple[bool, Outcome, str]:
    """A wrapper that ignores a parameter: the same on all ranks, and another one on rank 1."""
    import logging

    from torchrec.distributed import model_parallel

    from initopt import Disagreement, eliminated
    from tests.multirank import eliminated_ranks

    logging.disable(logging.CRITICAL)

    def wrapping(name: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            wrapper = model_parallel.DefaultDataParallelWrapper(params_to_ignore=[name])
            return model_parallel.DistributedModelParallel(*args, data_parallel_wrapper=wrapper, **kwargs)

        return make

    eliminated_ranks.PARALLEL = wrapping("over.bias")
    stock, mine = outcome(CASE, nullcontext), outcome(CASE, eliminated)
    eliminated_ranks.PARALLEL = wrapping("over.bias" if os.environ["RANK"] == "0" else "over.weight")
    with pytest.raises(Disagreement) as caught:
        outcome(CASE, eliminated)
    return mine.result() == stock.result(), mine, str(caught.value)


def test_ignored_parameters_are_compared() -> None:
    for equal, found, text in fork_ranks(ignoring):
        assert equal and found.left_out["ddp_sync"] == 2
        assert text == (
            "data-parallel wrapper differs between ranks (rank 0: ignores over.bias; rank 1: ignores over.weight)"
        )


CASES = {
    "validation_flag": Case("EBC", ("table_wise",) * 2, steps=1),
    "plan": Case("EBC", ("table_wise",) * 2, steps=1),
    "groups": Case("EBC", ("table_row_wise",) * 2, local=1, steps=1),
    "ec_metadata": Case("EC", ("table_wise", "row_wise"), steps=1),
    "mc_metadata": Case("MC EC", ("row_wise",), steps=1),
    "dp_tables": Case("EBC", ("data_parallel",) * 2, steps=1),
    "ddp_sync": Case("EBC", ("table_wise",) * 2, steps=1),
}
"""One for each rewrite, in which it has something to leave out."""


def planless(*args: Any, plan: Any, **kwargs: Any) -> Any:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    return DistributedModelParallel(*args, **kwargs)


def subclassed(*args: Any, **kwargs: Any) -> Any:
    """One that does nothing in another way while TorchRec's __init__ runs."""
    from torchrec.distributed.model_parallel import DistributedModelParallel

    class Mine(DistributedModelParallel):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.calls = 0

        def forward(self, *args: Any) -> Any:
            self.calls += 1
            return super().forward(*args)

    return Mine(*args, **kwargs)


MADE_BY = {"plan": planless, "ddp_sync": subclassed}


def one_off() -> dict[str, tuple[Outcome, ...]]:
    """Each case as in TorchRec, with all rewrites, and without its own, by either switch."""
    import logging

    from initopt import eliminated
    from tests.multirank import eliminated_ranks

    logging.disable(logging.CRITICAL)
    found = {}
    for name, case in CASES.items():
        eliminated_ranks.PARALLEL = MADE_BY.get(name)
        stock, mine = outcome(case, nullcontext), outcome(case, eliminated)
        chosen = outcome(case, lambda name=name: eliminated([one for one in EVERY if one != name]))
        os.environ["INITOPT_DISABLE"] = name
        off = outcome(case, eliminated)
        del os.environ["INITOPT_DISABLE"]
        found[name] = stock, mine, chosen, off
    return found


def test_each_rewrite_is_switched_off_by_name_and_training_is_the_same() -> None:
    from initopt.optimizations import REWRITES

    assert REWRITES == EVERY
    meets = {
        "validation_flag": {"broadcast_object_list": 1},
        "plan": {"broadcast_object_list": 1},
        "groups": {"new_group": 3, "barrier": 2},
        "ec_metadata": {"all_gather_object": 2},
        "mc_metadata": {"all_gather": 1, "all_gather_object": 4},
        "dp_tables": {"_verify_param_shape_across_processes": 1, "_sync_module_states": 1, "broadcast": 2},
        "ddp_sync": {"_verify_param_shape_across_processes": 1, "_sync_module_states": 1},
    }
    for found in fork_ranks(one_off, timeout=200):
        for name, (stock, mine, chosen, off) in found.items():
            assert mine.result() == stock.result(), name
            assert sum(mine.meetings.values()) <= 2, name
            for without in (chosen, off):
                assert without.result() == stock.result(), name
                assert name not in without.left_out and name in mine.left_out, name
                assert meets[name].items() <= without.meetings.items(), (name, without.meetings)


def hardly_met() -> list[tuple[dict[str, int], dict[str, str]]]:
    """A case in which TorchRec meets once, for its flag, or not at all, as all have it; and a strict block."""
    from torchrec.distributed import collective_utils

    from initopt import eliminated

    case = Case("EBC", ("table_wise", "row_wise"), dense=False, steps=0)
    found = []
    for known, strict in ((False, False), (True, False), (True, True)):
        collective_utils._INITIALIZED = known
        one = outcome(case, partial(eliminated, strict=strict))
        found.append((one.meetings, one.kept))
    return found


def test_where_torchrec_meets_once_at_most_it_is_left_alone() -> None:
    for once, never, strict in fork_ranks(hardly_met):
        assert once[0] == {"broadcast_object_list": 1} and never[0] == {}
        assert set(once[1].values()) == set(never[1].values()) == {"there is no more than one meeting"}
        assert strict == ({"all_gather_single": 1}, {"ddp_sync": "there is no dense parameter"})


def test_a_model_that_is_the_tables_has_no_dense_parameters() -> None:
    """Its path is empty."""
    from types import SimpleNamespace

    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from initopt.comm_elim.due import due

    table = EmbeddingBagConfig(name="t0", feature_names=["f0"], embedding_dim=8, num_embeddings=4)
    model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    for kind, first in (("table_wise", ""), ("data_parallel", "table 't0'")):
        plan = SimpleNamespace(plan={"": {"t0": SimpleNamespace(sharding_type=kind)}})
        assert due(model, plan, [EmbeddingBagCollectionSharder()]) == first
