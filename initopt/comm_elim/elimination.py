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
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn

from initopt.agreement import Agreement, Difference
from initopt.comm_elim import assumed, default_plan, dp_tables, ec_metadata, groups, mc_metadata, validation_flag
from initopt.comm_elim import ddp_sync as ddp
from initopt.comm_elim.assumed import Dense
from initopt.comm_elim.due import due
from initopt.comm_elim.left_out import told
from initopt.hooks import caller_level
from initopt.optimizations import REWRITES, disabled, unknown_disabled
from initopt.replaced import on_this_thread

TESTED = {"torch": "2.13.", "torchrec": "1.9."}
"""The versions whose code between two meetings is known. With others nothing is left out."""

_SHAPES, _FORMS, _VALUES = "shapes of dense parameters", "dense parameters", "values of dense parameters"
_HARMLESS = frozenset(
    (
        *("__init__", "__module__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl", "__qualname__"),
        *("__dict__", "__weakref__", "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"),
        *("forward", "state_dict", "load_state_dict"),
    )
)
"""What a subclass may have of its own: nothing of it runs while TorchRec's __init__ does."""


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
        self._known = not _untested()
        self._model: nn.Module | None = None
        self._dense: Dense | None = None
        self._flag = validation_flag.Flag(False, False)
        self._ask_for_flag = False
        self._making: Any = None
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
        everything = functools.partial(self._stay, REWRITES)
        self._agreement = agreement = Agreement(group, device, strict=self.strict, untold=everything)
        self._model = model
        self._rewrites = self._chosen
        tell = functools.partial(_tell, agreement)
        tell("rewrites", lambda: "\n".join(self._rewrites), everything)
        tell("versions", lambda: assumed.versions(model), everything)
        tell("environment", assumed.environment, everything)
        tell("schedule", lambda: schedule, everything)
        tell("tables", lambda: assumed.tables(model, sharders))
        tell("validation flag", self._find_flag, self._flag_stays)
        which = groups.found if "groups" in self._rewrites else str
        tell("process groups", which, functools.partial(self._stay, ["groups"]))
        if parameters:
            self._compare_parameters(agreement, model, sharders, wrapped=True)
        return agreement

    def _find_flag(self) -> str:
        if "validation_flag" in self._rewrites:
            self._flag = validation_flag.found()
        return self._flag.text()

    @contextmanager
    def block(self) -> Iterator[None]:
        """Make each DistributedModelParallel and DMPCollection that this thread makes in the block so.

        What `agreement` returned, and `hold` has compared, is not compared again for the first of them. The block may
        be as short as one call of a class or of its `__init__`, looked up in the block.
        """
        from torchrec.distributed import model_parallel

        kinds = [(model_parallel.DistributedModelParallel, _stays)]
        if hasattr(model_parallel, "DMPCollection"):
            kinds.append((model_parallel.DMPCollection, _collection_stays))
        with ExitStack() as stack:
            for kind, why in kinds:
                init = functools.partial(self._init, kind, why)
                stack.enter_context(on_this_thread(kind, "__init__", init))
            yield

    def summary(self) -> str:
        """Return in a sentence what was left out; empty if nothing was."""
        return told(self.left_out)

    def _init(
        self,
        kind: Any,
        stays: Callable[[Any, dict[str, Any]], str],
        dmp: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        make = functools.partial(kind.__init__, dmp, *args, **kwargs)
        if dmp is self._making:
            # A collection calls the __init__ of its base.
            make()
            return
        bound = inspect.signature(kind.__init__).bind(dmp, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        why = stays(dmp, given)
        if why:
            self._keep(REWRITES, why, whole=False)
            make()
            return
        self._making = dmp
        try:
            self._make(make, given)
        finally:
            self._making = None

    def _make(self, make: Callable[[], None], given: dict[str, Any]) -> None:
        from torchrec.distributed import model_parallel

        model, plan, device = given["module"], given["plan"], given["device"] or torch.device("cpu")
        sharders = model_parallel.get_default_sharders() if given["sharders"] is None else given["sharders"]
        wrapper, collection = given["data_parallel_wrapper"], "global_pg" in given
        agreement, self._agreement = self._agreement, None
        if agreement is None or model is not self._model or not agreement.held("rewrites"):
            if not (self.strict or collection or wrapper is not None or _due(model, plan, sharders)):
                self._keep(REWRITES, "there is no more than one meeting", whole=False)
                make()
                return
            where = torch.device("cpu") if "gloo" in distributed.get_backend() else device
            agreement = self.agreement(distributed.group.WORLD, where, model, sharders)
        if plan is not None and agreement.plan is not plan:
            _tell(agreement, "sharding plan of DistributedModelParallel", lambda: assumed.placement(plan))
        if collection:
            # TorchRec turns the plans into those of a rank's own sharding group: this is before.
            _tell(agreement, "two-dimensional sharding", lambda: assumed.two_dimensional(given))
        if wrapper is not None:
            _tell(agreement, "data-parallel wrapper", lambda: assumed.wrapper(wrapper))
        if not agreement.held(_VALUES):
            self._compare_parameters(
                agreement, model, sharders, wrapped=wrapper is None and given["init_data_parallel"]
            )
        with ExitStack() as stack:
            if plan is None and self._known:
                # The agreement is held when the plan is made. Until then no rank is sure of anything.
                agreed, local = functools.partial(self._agreed, stack, unasked=True), "plan" in self._rewrites
                stack.enter_context(default_plan.rewritten(agreement, agreed, self._by("plan")[0], local=local))
                stack.enter_context(on_this_thread(model_parallel, "init_collective_validation", lambda group: None))
            else:
                if agreement.waits:
                    agreement.hold()
                self._agreed(stack)
            foreign = _foreign(sharders)
            init = functools.partial(self._shard, stack, agreement, foreign)
            stack.enter_context(on_this_thread(model_parallel.DistributedModelParallel, "_init_dmp", init))
            make()

    def _agreed(self, stack: ExitStack, *, unasked: bool = False) -> None:
        """Say what differs, settle the flag (TorchRec was kept from asking if `unasked`), and see to the groups."""
        self._say()
        if self._ask_for_flag:
            validation_flag.ask_rank_0(distributed.group.WORLD)
        elif "validation_flag" in self._rewrites:
            self._count("validation_flag", int(self._flag.keep()))
        elif unasked:
            validation_flag.as_ever(distributed.group.WORLD)
        self._ask_for_flag = False
        if "groups" in self._rewrites:
            stack.enter_context(groups.rewritten(*self._by("groups")))

    def _shard(self, whole: ExitStack, agreement: Agreement, foreign: str, dmp: Any, module: nn.Module) -> nn.Module:
        if foreign:
            self._keep(["ddp_sync"], f"{foreign} may write to dense parameters")
        if "ddp_sync" in self._rewrites:
            assert self._dense is not None
            equal = len(set(agreement.told(_VALUES))) == 1
            whole.enter_context(ddp.rewritten(self._dense, *self._by("ddp_sync"), equal=equal))
        kinds = {sharder.module_type for sharder in dmp.sharders}
        mine = [one for one in module.modules() if type(one) in kinds]
        # Their values are loaded over the tables, so what ranks hold of them is sent before.
        loads = any(getattr(one, "device", None) != torch.device("meta") for one in mine)
        with ExitStack() as stack:
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

    def _compare_parameters(
        self, agreement: Agreement, model: nn.Module, sharders: Sequence[Any], *, wrapped: bool
    ) -> None:
        # DistributedDataParallel would fail on some ranks, and leave the others waiting for them.
        unwrapped = functools.partial(self._stay, ["ddp_sync"])
        found: list[Dense] = []

        def dense() -> Dense:
            if not found:
                found.append(Dense(model, sharders))
            return found[0]

        _tell(agreement, _SHAPES, lambda: dense().shapes(), None if wrapped else unwrapped)
        _tell(agreement, _FORMS, lambda: dense().forms(), unwrapped)
        # Other seeds on other ranks are no mistake: TorchRec sends rank 0's values.
        _tell(agreement, _VALUES, lambda: dense().values(), self._values_stay, explained=False)
        self._dense = found[0] if found else None

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
        if told:
            _warn(f"{'; '.join(told)}: TorchRec's own way is taken there")

    def _keep(self, names: Iterable[str], why: str, *, whole: bool = True) -> None:
        for name in names:
            if name in self._rewrites:
                self.kept.setdefault(name, why)
        if whole:
            self._rewrites = tuple(name for name in self._rewrites if name not in names)


@contextmanager
def eliminated(rewrites: Iterable[str] = REWRITES, *, strict: bool = False) -> Iterator[Elimination]:
    """Make each DistributedModelParallel or DMPCollection of this thread in the block with as few meetings as it needs.

    All ranks enter such a block. Weights, optimizer state and losses are those without it. One all_gather of 256 bytes
    a rank shows that ranks hold the same model, plan, dense parameters, versions and environment. Where they don't,
    TorchRec's own way is taken, with a warning on rank 0, or Disagreement is raised on all ranks: if tables, the given
    plan, shapes of dense parameters, ignored parameters or the division in two dimensions differ, or anything with
    `strict`. Where no plan is given each rank makes it (see `agree_on_plan`, which may raise PlanError). Where TorchRec
    would meet at most once nothing is compared, but with `strict`. `rewrites` and INITOPT_DISABLE choose among
    REWRITES, and must be the same on all ranks to be of use. Raises ValueError for an unknown name.
    """
    elimination = Elimination(rewrites, strict=strict)
    with elimination.block():
        yield elimination


def _due(model: nn.Module, plan: Any, sharders: Sequence[Any]) -> str:
    """As `due`; where that can't be looked at on this rank the others mostly meet, and it comes to meet them."""
    try:
        return due(model, plan, sharders)
    except Exception as error:
        return f"what could not be looked at ({type(error).__name__})"


def _tell(
    agreement: Agreement,
    key: str,
    found: Callable[[], str],
    otherwise: Callable[[Difference], None] | None = None,
    *,
    explained: bool = True,
) -> None:
    """Assume what is found. Where that fails on this rank it still has to meet the others, who wait for it."""
    try:
        value = found()
    except Exception as error:
        agreement.cannot_tell(key, f"{type(error).__name__}: {error}", otherwise)
    else:
        agreement.assume(key, value, otherwise, explained=explained)


def _chosen(rewrites: Iterable[str]) -> tuple[str, ...]:
    wanted = list(rewrites)
    unknown = [name for name in wanted if name not in REWRITES]
    if unknown:
        raise ValueError(f"there is no rewrite {unknown[0]!r}; there are {', '.join(REWRITES)}")
    if wrong := unknown_disabled():
        _warn(wrong)
    other = _untested()
    if other:
        tested = " and ".join(f"{name} {number}*" for name, number in TESTED.items())
        _warn(f"no meeting of ranks is left out: {other} is not what was tested ({tested})")
        return ()
    return tuple(name for name in REWRITES if name in wanted and name not in disabled())


def _warn(text: str) -> None:
    """Say it on rank 0, which speaks for all, of the line that has called into initopt or TorchRec.

    Where warnings are errors it is one on all ranks, so that none goes on alone.
    """
    rank = distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", "0"))
    level = caller_level("torchrec")
    with warnings.catch_warnings(record=True) if rank else nullcontext():
        warnings.warn(f"initopt: {text}", stacklevel=level)


def _untested() -> str:
    """What has another version than was tested; empty if nothing has."""
    import torchrec  # noqa: F401  its version is asked for

    found = {name: assumed.version(name) for name in TESTED}
    return " and ".join(
        f"{name} {found[name]}" for name, tested in TESTED.items() if not found[name].startswith(tested)
    )


def _stays(dmp: Any, given: dict[str, Any]) -> str:
    """Why a DistributedModelParallel is made as ever; empty if it is not."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    env = given["env"]
    why = _changed(dmp, DistributedModelParallel)
    if not why and env is not None and type(env) is not ShardingEnv:
        why = f"its sharding environment is a {type(env).__name__}"
    return why or _apart(distributed.group.WORLD if env is None else env.process_group, given["device"])


def _collection_stays(dmp: Any, given: dict[str, Any]) -> str:
    """Why a DMPCollection is made as ever; empty if it is not."""
    from torchrec.distributed.model_parallel import DMPCollection

    why = _changed(dmp, DMPCollection) or _apart(given["global_pg"], given["device"])
    return why or ("" if given["world_size"] == distributed.get_world_size() else "it is for a part of the ranks")


def _changed(dmp: Any, own: type) -> str:
    """What a subclass of `own` may do in another way while it is made; empty if it does nothing so."""
    for kind in type(dmp).__mro__:
        if kind is own:
            break
        for name in vars(kind):
            if hasattr(own, name) and name not in _HARMLESS:
                return f"{kind.__name__} has a {name} of its own"
    return ""


def _apart(group: Any, device: torch.device | None) -> str:
    """Why the ranks don't meet, or can't; empty if they do."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return "there is nobody to meet"
    if group is not distributed.group.WORLD:
        return "its process group is not that of all ranks"
    kind = device.type if device is not None else "cpu"
    if kind == "meta" or (kind == "cpu" and distributed.get_backend() == "nccl"):
        return f"ranks can't meet on the device {kind}"
    return ""


def _foreign(sharders: Sequence[Any]) -> str:
    """The name of a sharder that is not TorchRec's own, of which it is not known what it does; empty if all are."""
    kinds = [type(sharder) for sharder in sharders]
    return next((kind.__name__ for kind in kinds if not kind.__module__.startswith("torchrec.distributed.")), "")
