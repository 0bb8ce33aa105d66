"""A DistributedModelParallel that is made with one meeting of all ranks, or two, and is TorchRec's to the last bit.

Each rewrite leaves out meetings that carry what every rank knows already. What they assume is compared in one
collective first; where ranks differ, or something is not known, TorchRec's own way is taken, on all ranks alike.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed, nn

from initopt.agreement import Agreement, Difference
from initopt.comm_elim import assumed, dp_tables, ec_metadata, groups, mc_metadata, validation_flag
from initopt.comm_elim import ddp_sync as ddp
from initopt.comm_elim.assumed import Dense
from initopt.optimizations import NAMES
from initopt.replaced import on_this_thread

REWRITES = ("validation_flag", "groups", "ec_metadata", "mc_metadata", "dp_tables", "ddp_sync")
"""The rewrites by name, as they follow each other."""

TESTED = {"torch": "2.13.", "torchrec": "1.9."}
"""The versions whose code between two meetings is known. With others nothing is left out."""

_OFF = "INITOPT_DISABLE"
_FORMS, _VALUES = "dense parameters", "values of dense parameters"


class Elimination:
    """Which meetings of ranks were left out, and which were not.

    `rewrites` names the ones to use (default: all of REWRITES); INITOPT_DISABLE, a list of names with commas, takes
    some away. With `strict` a difference between ranks is an error instead of TorchRec's own way. Raises ValueError for
    an unknown name.
    """

    def __init__(self, rewrites: Iterable[str] = REWRITES, *, strict: bool = False) -> None:
        self.strict = strict
        self.left_out: dict[str, int] = {}
        """How many meetings (calls) each rewrite has left out."""
        self.kept: dict[str, str] = {}
        """Why a rewrite was not used, or not everywhere."""
        self._chosen = self._rewrites = _chosen(rewrites)
        self._model: nn.Module | None = None
        self._dense: Dense | None = None
        self._flag = validation_flag.Flag(False, False)
        self._ask_for_flag = False
        self._agreement: Agreement | None = None
        self._differences: list[str] = []

    def agreement(
        self,
        group: Any,
        device: torch.device,
        model: nn.Module,
        sharders: Sequence[Any],
        *,
        schedule: str = "",
        parameters: bool = True,
    ) -> Agreement:
        """Return what the ranks of `group` have to hold in common for these rewrites, for `Agreement.hold`.

        `device` is that of the collective. `schedule` is the order of the job's collectives, in words. Without
        `parameters` the dense parameters are compared when DistributedModelParallel begins, in a collective of their
        own: choose that where something may still write to them.
        """
        self._agreement = agreement = Agreement(group, device, strict=self.strict)
        self._model = model
        self._rewrites = self._chosen
        everything = functools.partial(self._stay, REWRITES)
        agreement.assume("rewrites", "\n".join(self._rewrites), everything)
        agreement.assume("versions", assumed.versions(model), everything)
        agreement.assume("environment", assumed.environment(), everything)
        agreement.assume("schedule", schedule, everything)
        agreement.assume("tables", assumed.tables(model, sharders))
        if "validation_flag" in self._rewrites:
            self._flag = validation_flag.found()
        agreement.assume("validation flag", self._flag.text(), self._flag_stays)
        which = groups.found() if "groups" in self._rewrites else ""
        agreement.assume("process groups", which, functools.partial(self._stay, ["groups"]))
        if parameters:
            self._compare_parameters(agreement, model, sharders)
        return agreement

    @contextmanager
    def block(self) -> Iterator[None]:
        """Make each DistributedModelParallel that this thread makes in the block so.

        What `agreement` returned, and `hold` has compared, is not compared again for the first of them.
        """
        from torchrec.distributed.model_parallel import DistributedModelParallel as Parallel

        signature = inspect.signature(Parallel.__init__)

        def init(dmp: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(dmp, *args, **kwargs)
            given.apply_defaults()
            make = functools.partial(Parallel.__init__, dmp, *args, **kwargs)
            why = _stays(dmp, given.arguments)
            if why:
                self._keep(REWRITES, why, whole=False)
                make()
            else:
                self._make(make, given.arguments)

        with on_this_thread(Parallel, "__init__", init):
            yield

    def summary(self) -> str:
        """Return in a sentence what was left out; empty if nothing was."""
        parts = [f"{count} by {name}" for name, count in self.left_out.items()]
        return f"{sum(self.left_out.values())} meetings of ranks were left out ({', '.join(parts)})" if parts else ""

    def _make(self, make: Callable[[], None], given: dict[str, Any]) -> None:
        from torchrec.distributed.model_parallel import DistributedModelParallel as Parallel
        from torchrec.distributed.model_parallel import get_default_sharders

        model, plan, device = given["module"], given["plan"], given["device"] or torch.device("cpu")
        sharders = get_default_sharders() if given["sharders"] is None else given["sharders"]
        agreement, self._agreement = self._agreement, None
        if agreement is None or model is not self._model or not agreement.held("rewrites"):
            where = torch.device("cpu") if "gloo" in distributed.get_backend() else device
            agreement = self.agreement(distributed.group.WORLD, where, model, sharders)
        # One that TorchRec's planner makes now it sends to all ranks.
        if plan is not None and agreement.plan is not plan:
            agreement.assume("sharding plan of DistributedModelParallel", assumed.placement(plan))
        if not agreement.held(_VALUES):
            self._compare_parameters(agreement, model, sharders)
        if agreement.waits:
            agreement.hold()
        self._say()
        with ExitStack() as stack:
            foreign = _foreign(sharders)
            if foreign:
                self._keep(["ddp_sync"], f"{foreign} may write to dense parameters")
            if "ddp_sync" in self._rewrites:
                assert self._dense is not None
                equal = len(set(agreement.told(_VALUES))) == 1
                stack.enter_context(ddp.rewritten(self._dense, *self._by("ddp_sync"), equal=equal))
            stack.enter_context(on_this_thread(Parallel, "_init_dmp", self._shard))
            self._settle_flag()
            make()

    def _shard(self, dmp: Any, module: nn.Module) -> nn.Module:
        kinds = {sharder.module_type for sharder in dmp.sharders}
        mine = [one for one in module.modules() if type(one) in kinds]
        # Their values are loaded over the tables, so what ranks hold of them is sent before.
        loads = any(getattr(one, "device", None) != torch.device("meta") for one in mine)
        with ExitStack() as stack:
            if "groups" in self._rewrites:
                stack.enter_context(groups.rewritten(*self._by("groups")))
            if "ec_metadata" in self._rewrites:
                stack.enter_context(ec_metadata.rewritten(*self._by("ec_metadata")))
            # Who has none would pay for the import of what is rewritten.
            collides = any(type(one).__module__.startswith("torchrec.modules.mc_") for one in module.modules())
            if "mc_metadata" in self._rewrites and collides:
                stack.enter_context(mc_metadata.rewritten(*self._by("mc_metadata")))
            if "dp_tables" in self._rewrites:
                stack.enter_context(dp_tables.rewritten(*self._by("dp_tables"), at_once=loads))
            sharded: nn.Module = dmp._init_dmp(module)
        return sharded

    def _compare_parameters(self, agreement: Agreement, model: nn.Module, sharders: Sequence[Any]) -> None:
        self._dense = Dense(model, sharders)
        agreement.assume(_FORMS, self._dense.forms(), functools.partial(self._stay, ["ddp_sync"]))
        # Other seeds on other ranks are no mistake: TorchRec sends rank 0's values.
        agreement.assume(_VALUES, self._dense.values(), self._values_stay, explained=False)

    def _settle_flag(self) -> None:
        if self._ask_for_flag:
            validation_flag.ask_rank_0(distributed.group.WORLD)
        elif "validation_flag" in self._rewrites and self._flag.keep():
            self._count("validation_flag", 1)
        self._ask_for_flag = False

    def _by(self, name: str) -> tuple[Callable[[int], None], Callable[[str], None]]:
        return functools.partial(self._count, name), lambda why: self._keep([name], why, whole=False)

    def _count(self, name: str, meetings: int) -> None:
        if meetings:
            self.left_out[name] = self.left_out.get(name, 0) + meetings

    def _stay(self, names: Sequence[str], told: Difference) -> None:
        self._differences.append(str(told))
        self._keep(names, str(told))

    def _flag_stays(self, told: Difference) -> None:
        self._ask_for_flag = True
        self._stay(["validation_flag"], told)

    def _values_stay(self, told: Difference) -> None:
        self._keep(["ddp_sync"], str(told), whole=False)

    def _say(self) -> None:
        told, self._differences = self._differences, []
        if told and distributed.get_rank() == 0:
            warnings.warn(f"initopt: {'; '.join(told)}: TorchRec's own way is taken there", stacklevel=6)

    def _keep(self, names: Iterable[str], why: str, *, whole: bool = True) -> None:
        for name in names:
            if name in self._rewrites:
                self.kept.setdefault(name, why)
        if whole:
            self._rewrites = tuple(name for name in self._rewrites if name not in names)


@contextmanager
def eliminated(rewrites: Iterable[str] = REWRITES, *, strict: bool = False) -> Iterator[Elimination]:
    """Make each DistributedModelParallel that this thread makes in the block with as few meetings as it needs.

    All ranks enter such a block. Weights, optimizer state and losses are those without it. One all_gather of 256 bytes
    a rank shows that ranks hold the same model, plan, dense parameters, versions and environment. Where they don't,
    TorchRec's own way is taken, with a warning on rank 0, or Disagreement is raised on all ranks: if tables or the
    plan differ, or anything with `strict`. `rewrites` and INITOPT_DISABLE choose among REWRITES, and must be the same
    on all ranks to be of use. Raises ValueError for an unknown name.
    """
    elimination = Elimination(rewrites, strict=strict)
    with elimination.block():
        yield elimination


def _chosen(rewrites: Iterable[str]) -> tuple[str, ...]:
    wanted = list(rewrites)
    unknown = [name for name in wanted if name not in REWRITES]
    if unknown:
        raise ValueError(f"there is no rewrite {unknown[0]!r}; there are {', '.join(REWRITES)}")
    off = [name.strip() for name in os.environ.get(_OFF, "").split(",") if name.strip()]
    for name in off:
        if name not in (*REWRITES, *NAMES):
            warnings.warn(
                f"initopt: {_OFF} names {name!r}, which is no rewrite; there are {', '.join(REWRITES)}", stacklevel=4
            )
    import torchrec  # noqa: F401  its version is asked for

    found = {name: assumed.version(name) for name in TESTED}
    other = [f"{name} {found[name]}" for name, tested in TESTED.items() if not found[name].startswith(tested)]
    if other:
        tested = " and ".join(f"{name} {number}*" for name, number in TESTED.items())
        warnings.warn(
            f"initopt: no meeting of ranks is left out: {' and '.join(other)} is not what was tested ({tested})",
            stacklevel=4,
        )
        return ()
    return tuple(name for name in REWRITES if name in wanted and name not in off)


def _stays(dmp: Any, given: dict[str, Any]) -> str:
    """Why a DistributedModelParallel is made as ever; empty if it is not."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    if type(dmp) is not DistributedModelParallel:
        return f"{type(dmp).__name__} is not TorchRec's own"
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return "there is nobody to meet"
    env = given["env"]
    if env is not None and (type(env) is not ShardingEnv or env.process_group is not distributed.group.WORLD):
        return "its process group is not that of all ranks"
    kind = given["device"].type if given["device"] is not None else "cpu"
    if kind == "meta" or (kind == "cpu" and distributed.get_backend() == "nccl"):
        return f"ranks can't meet on the device {kind}"
    return ""


def _foreign(sharders: Sequence[Any]) -> str:
    """The name of a sharder that is not TorchRec's own, of which it is not known what it does; empty if all are."""
    kinds = [type(sharder) for sharder in sharders]
    return next((kind.__name__ for kind in kinds if not kind.__module__.startswith("torchrec.distributed.")), "")
