"""Everything in which one rank may differ: each is found, named with ranks and values, and no rank is left waiting.

Stock trains where it can, so all ranks do as TorchRec then; with `strict` it is an error on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tests.multirank.eliminated_ranks import Case, Outcome, built, outcome, own_group
from tests.multirank.forked import fork_ranks

TABLES = Case("EC", ("table_wise", "row_wise"), steps=2)
RANKS = 3
UNTOLD = "it can't be told (MemoryError: no room)"


@contextmanager
def put(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def version() -> Any:
    from initopt.comm_elim import assumed

    real = assumed.version
    return put(assumed, "version", lambda name: "1.9.0" if name == "torchrec" else real(name))


def script() -> Any:
    from initopt.comm_elim import assumed

    return put(assumed, "_sha256", lambda path: "of another file")


@contextmanager
def flag() -> Iterator[None]:
    """TorchRec has found its flag before, by itself. A new group makes it forget, so here it is found in each."""
    from initopt.comm_elim import validation_flag

    with put(validation_flag, "found", lambda: validation_flag.Flag(True, True)):
        yield


def groups() -> Any:
    from initopt.comm_elim import groups

    return put(groups, "_generation", 7)


def plan() -> Any:
    from tests.multirank import eliminated_ranks

    real = eliminated_ranks.sharding
    return put(eliminated_ranks, "sharding", lambda kind, index, *rest: real(kind, index + 1, *rest))


def broken(holder: str, name: str) -> Any:
    """Something of initopt's own that fails, before the ranks have compared anything."""
    import importlib

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    return put(importlib.import_module(f"initopt.{holder}"), name, fails)


@dataclass(frozen=True)
class Difference:
    """What rank 1 has otherwise, and how it is told. With `error` it is one without `strict`, too."""

    key: str
    others: str
    mine: str
    on_rank_1: Callable[[], Any] = nullcontext
    changes: Any = None
    case: Case = TABLES
    error: bool = False

    def is_told_in(self, text: str) -> bool:
        """Whether the key, all ranks and both values are."""
        _, found, told = text.partition(f"{self.key} differs between ranks (ranks 0, 2: {self.others}")
        return bool(found) and f"; rank 1: {self.mine}" in told


DIFFERENCES = {
    "plan": Difference("sharding plan of DistributedModelParallel", "tables.t0: ", "tables.t0: ", plan, error=True),
    "seed": Difference(
        "values of dense parameters",
        "over.weight: values with sha256 ",
        "over.weight: values with sha256 ",
        case=Case("EC", ("table_wise", "row_wise"), seeds="one", steps=2),
    ),
    "table order": Difference("tables", "tables: t0 32 x 8", "tables: t1 40 x 8", changes={"order": False}, error=True),
    "table size": Difference(
        "tables", "tables: t0 32 x 8", "tables: t0 48 x 8", changes={"rows": lambda index: 48}, error=True
    ),
    "flag": Difference(
        "validation flag", "validation of collectives off", "validation of collectives on, from before", flag
    ),
    "version": Difference("versions", "torchrec 1.9.2", "torchrec 1.9.0", version),
    "script": Difference("versions", "the script has sha256 ", "the script has sha256 of another file", script),
    "environment variable": Difference(
        "environment",
        "TORCHREC_VALIDATE_COLLECTIVES unset",
        "TORCHREC_VALIDATE_COLLECTIVES=1",
        lambda: variable("TORCHREC_VALIDATE_COLLECTIVES", "1"),
    ),
    "rewrites": Difference(
        "rewrites", "ec_metadata", "mc_metadata", lambda: variable("INITOPT_DISABLE", "ec_metadata")
    ),
    "tables fail": Difference(
        "tables", "tables: EmbeddingCollection", UNTOLD, lambda: broken("comm_elim.assumed", "tables")
    ),
    "flag fails": Difference(
        "validation flag", "validation of collectives off", UNTOLD, lambda: broken("comm_elim.validation_flag", "found")
    ),
    "groups fail": Difference("process groups", "groups made: ", UNTOLD, lambda: broken("comm_elim.groups", "found")),
    "placement fails": Difference(
        "sharding plan of DistributedModelParallel",
        "tables.t0: ",
        UNTOLD,
        lambda: broken("comm_elim.assumed", "placement"),
    ),
    "parameters fail": Difference(
        "shapes of dense parameters", "number 0 has ", UNTOLD, lambda: broken("comm_elim.elimination", "Dense")
    ),
    "groups made before": Difference("process groups", "groups made: ", "groups made: 7", groups),
}


@dataclass
class Found:
    """What became of a difference on one rank."""

    expected: Any = None
    found: Outcome | None = None
    said: str = ""
    error: str = ""
    strict: str = ""


def every_difference() -> dict[str, Found]:
    """Each difference in turn: as in TorchRec, without meetings, and strictly so."""
    import logging
    import warnings

    from initopt import Disagreement, eliminated

    logging.disable(logging.CRITICAL)
    mine = os.environ["RANK"] == "1"
    told = {}
    for name, one in DIFFERENCES.items():
        now = told[name] = Found()
        changes = (one.changes or {}) if mine else {}
        if not one.error:
            now.expected = outcome(one.case).result()
        with one.on_rank_1() if mine else nullcontext(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                now.found = outcome(one.case, eliminated, **changes)
            except Disagreement as raised:
                now.error = str(raised)
            try:
                outcome(one.case, lambda: eliminated(strict=True), **changes)
            except Disagreement as raised:
                now.strict = str(raised)
        now.said = "\n".join(str(warning.message) for warning in caught)
    return told


def of_another_schedule(strict: bool) -> str:
    import torch
    from torch import distributed

    from initopt import Disagreement, Elimination

    schedule = "store\nfeatures\nplan" if os.environ["RANK"] == "1" else "store\nplan"
    with own_group():
        model, _, sharders = built(Case("EBC", ("table_wise",)))
        elimination = Elimination(strict=strict)
        agreement = elimination.agreement(
            distributed.group.WORLD, torch.device("cpu"), model, sharders, schedule=schedule, parameters=False
        )
        try:
            agreement.hold()
        except Disagreement as raised:
            return f"raised {raised}"
    return "\n".join(sorted(set(elimination.kept.values())))


def all_of_them() -> tuple[dict[str, Found], str, str]:
    return every_difference(), of_another_schedule(False), of_another_schedule(True)


def test_what_differs_on_one_rank_is_named_and_nobody_hangs() -> None:
    ranks = fork_ranks(all_of_them, ranks=RANKS, timeout=200)
    for name, one in DIFFERENCES.items():
        of_ranks = [told[name] for told, _, _ in ranks]
        assert all(one.is_told_in(found.strict) for found in of_ranks), (name, of_ranks[0].strict)
        assert len({found.strict for found in of_ranks}) == 1, "all ranks say the same"
        if one.error:
            assert all(found.error == found.strict and found.found is None for found in of_ranks), name
            continue
        for rank, found in enumerate(of_ranks):
            assert found.error == "" and found.found is not None, (name, found.error)
            assert found.found.result() == found.expected, name
            assert len(found.found.losses) == one.case.steps
            # Other values are sent as ever, without a word.
            said = rank == 0 and name != "seed"
            assert one.is_told_in(found.said) == said, (name, found.said)
            assert f"{one.key} differs between ranks" in "\n".join(found.found.kept.values()), name
    for _, kept, raised in ranks:
        assert kept == "schedule differs between ranks (ranks 0, 2: plan; rank 1: features)"
        assert raised == f"raised {kept}"
