"""The TorchRec trainer plugin: the start-up of a TorchRec trainer as ready-made steps.

    start = trainer(model=make_model, loader=make_loader, dense_optimizer=make_dense_optimizer)
    ready = start.run(config=config)
    for _ in range(steps):
        ready.pipeline.progress(ready.batches)

Every factory is the function of a step: its parameters name what it needs, which may be any step of this file
(`place`, `process_group`, `model`, `sharding_plan`, `dmp`, ...), a step that the user adds, or an input given to
`run`. The steps draw random numbers in the order model, DistributedModelParallel, loader: that of a script which
makes them one after the other.

Tested with torch 2.13 and torchrec 1.9. Nothing of either is imported before its step runs.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
import itertools
import os
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import initopt
from initopt import (
    FIRST_STEP,
    Compile,
    Graph,
    GraphError,
    OrderError,
    Recorder,
    Span,
    Startup,
    StartupFailed,
    Step,
    Values,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from initopt import Elimination, Filled, OwnPlan

ORIGIN = "torchrec"


@dataclass(frozen=True)
class Place:
    """Where this rank stands: its numbers, as the launcher gave them, and its device."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    def enter(self) -> None:
        """Make the device the current one of the calling thread, which torch keeps per thread."""
        import torch

        if self.device.type != "cpu" and self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)


@dataclass(frozen=True)
class Ready:
    """A trainer that is ready for its first step.

    `model` is the DistributedModelParallel. `batches` yields every batch of the loader once, the first one fetched
    already. `values` has what each step returned, `later` what the factories of `later` did, from the end of the first
    training step on.
    """

    model: Any
    optimizer: Any
    pipeline: Any
    batches: Iterator[Any]
    device: torch.device
    values: Values
    later: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainerStartup(Startup):
    """The start-up of a TorchRec trainer; made by `trainer`. Its steps can be added to, replaced, ordered."""

    labels: tuple[str, ...] = ()
    collective_timeout: float | None = None
    compile: Compile | None = None
    later: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    loader: Any = None
    """What the loader's factory has made, once its step has run; the step's value is its iterator."""
    elimination: Elimination | None = field(default=None, init=False)
    """Which meetings of ranks were left out, once the step `sharding_plan` has run."""
    _goes_on = True
    _filled: Filled | None = field(default=None, init=False)

    def graph(self, inputs: Iterable[str] = ()) -> Graph:
        """Return the graph of the steps as declared and of the first training step, which follows them all."""
        return self._recorded(super().graph(inputs))

    def run(  # type: ignore[override]
        self, *, overlap: bool = True, recorder: Recorder | None = None, **inputs: Any
    ) -> Ready:
        """Run the steps and return the trainer. The record ends with the first `pipeline.progress`.

        A `recorder` that is given stays open, for the caller to close.

        Raises GraphError before any step runs, StartupFailed if one fails.
        """
        self._check_later(inputs)
        own = recorder is None
        if recorder is None:
            recorder = Recorder(self.name, mode="overlap" if overlap else "serial", labels=self.labels)
        try:
            values = super().run(overlap=overlap, recorder=recorder, **inputs)
        except BaseException:
            if own:
                self._close(recorder)
            raise
        # The caller trains in this thread, which has met no device yet.
        values.place.enter()
        if self.compile is not None and "compile_cache" in values:
            self.compile.use_sizes(values.compile_cache)
        ready = Ready(values.dmp, values.optimizer, values.pipeline, values.batches, values.place.device, values)
        self._until_first_step(ready, recorder, inputs, own=own)
        return ready

    def _runnable(self, inputs: Iterable[str]) -> Graph:
        return super().graph(inputs)

    def _taken(self, graph: Graph) -> set[str]:
        return super()._taken(graph).union(*(inspect.signature(factory).parameters for factory in self.later.values()))

    def _with_early(self, graph: Graph, early: Sequence[str]) -> Graph:
        graph = super()._with_early(graph, early)
        if "heavy_imports" not in graph or "loader" not in early:
            return graph
        # A fork waits for what runs, and nothing starts meanwhile: a rendezvous under way would hold up all the others.
        after = (*graph["process_group"].after, "loader")
        steps = (replace(step, after=after) if step.name == "process_group" else step for step in graph.values())
        return Graph(steps, name=graph.name, inputs=graph.inputs)

    def _recorded(self, graph: Graph) -> Graph:
        last = tuple(name for name in graph if not graph.successors(name))
        return Graph([*graph.values(), replace(_FIRST_STEP, after=last)], name=graph.name, inputs=graph.inputs)

    def _until_first_step(self, ready: Ready, recorder: Recorder, inputs: Mapping[str, Any], *, own: bool) -> None:
        """Record the first `progress` of the pipeline as the last step of the start-up, then get out of its way."""
        pipeline = ready.pipeline
        progress = pipeline.progress
        warmed = self.compile.graphs() if self.compile is not None else 0
        ahead = any(ready.values.get(name) for name in ("compile_warmup", "compile_for_loader"))
        execution = self._execution
        assert execution is not None

        def first(batches: Iterator[Any]) -> Any:
            del pipeline.progress
            start, began = recorder.now(), time.time()
            error = ""
            try:
                with (
                    recorder.collectives(),
                    recorder.current_step(FIRST_STEP, lane=_FIRST_STEP.lane),
                    self._keeping(ready),
                ):
                    result = execution.last_step(FIRST_STEP, lambda: progress(batches))
            except BaseException as raised:
                cause = raised.exceptions[-1] if isinstance(raised, StartupFailed) else raised
                error = type(cause).__name__
                raise
            finally:
                span = Span(
                    FIRST_STEP,
                    start,
                    recorder.now(),
                    rank=ready.values.place.rank,
                    lane=_FIRST_STEP.lane,
                    stage=_FIRST_STEP.stage,
                    error=error,
                )
                recorder.add(span)
                if own and error:
                    self._close(recorder)
            try:
                self._make_later(ready, recorder, inputs)
            finally:
                if own:
                    self._close(recorder)
            self._after_first_step(warmed if ahead else 0, began)
            return result

        pipeline.progress = first

    def _check_later(self, inputs: Iterable[str]) -> None:
        known = {*self._declared, *inputs}
        for name, factory in self.later.items():
            if name in known:
                raise GraphError(f"{name!r} of `later` is the name of a step or an input already: choose another")
            for parameter in inspect.signature(factory).parameters.values():
                if parameter.default is parameter.empty and parameter.name not in known:
                    raise GraphError(f"{name!r} of `later` takes {parameter.name!r}, which no step or input provides")
            known.add(name)

    def _make_later(self, ready: Ready, recorder: Recorder, inputs: Mapping[str, Any]) -> None:
        """Run the factories that the first batch did not need. Raises RuntimeError for one that draws."""
        for name, factory in self.later.items():
            known = {**inputs, **ready.values, **ready.later}
            names = [parameter for parameter in inspect.signature(factory).parameters if parameter in known]
            start, before = recorder.now(), _generators()
            ready.later[name] = factory(**{parameter: known[parameter] for parameter in names})
            if _generators() != before:
                raise RuntimeError(
                    f"{name!r} of `later` drew random numbers, after the first training step and not before it, so the "
                    "training would be another one. Give it a generator of its own, or make it a step"
                )
            recorder.note(f"came after the first batch and took {recorder.now() - start:.1f}s", step=name)

    def _keeping(self, ready: Ready) -> AbstractContextManager[None]:
        if self.compile is None or "compile_cache" not in ready.values:
            return nullcontext()
        [batch] = ready.values.first_batch
        return self.compile.first_step(ready.values.model, batch, ready.values.compile_cache)

    def filled(self, tables: Filled) -> None:
        """Leave in the record how the tables came to their values; keep it for what a checkpoint leaves to fill."""
        self._filled = tables
        left_out, made, marked = (_size(size) for size in (tables.left_out, tables.made, tables.marked))
        if tables.left_out:
            self.note(f"{left_out} of tables were not filled twice")
        if tables.marked:
            self.note(f"{marked} of tables were left to the checkpoint, {made} filled")
        if self._execution is not None:
            tables.add_to(self._execution.recorder)

    def collectives(self) -> str:
        """Return the running start-up's steps that meet other ranks, in their order, one a line."""
        graph = self._execution.graph if self._execution is not None else Graph(())
        return "\n".join(name for name in graph.order() if graph[name].lane == "comms")

    def leaves_model(self) -> bool:
        """Whether only steps of this file take the model before it is sharded, so nothing writes to it."""
        graph = self._execution.graph if self._execution is not None else Graph(())
        return all(step.origin == ORIGIN for step in graph.values() if "model" in step.needs)

    def eliminated(self) -> None:
        """Leave in the record which meetings of ranks were left out, and which were not."""
        if self.elimination is None:
            return
        if self.elimination.left_out and self._execution is not None:
            self._execution.recorder.note(self.elimination.summary(), left_out=self.elimination.left_out)
        for name, why in self.elimination.kept.items():
            self.note(f"{name} is as in TorchRec: {why}")

    def complete_tables(self) -> None:
        """Fill what a checkpoint that has the tables did not write."""
        missing = self._filled.complete() if self._filled is not None else 0
        if missing:
            self.note(f"{_size(missing)} of tables were not in the checkpoint: filled as without one")

    def came_to_code(self, found: Any) -> None:
        """Leave in the record how this rank came to its compiled code."""
        if self._execution is not None:
            self._execution.recorder.compile_cache(found)

    def _after_first_step(self, warmed: int, began: float) -> None:
        if self.collective_timeout is not None:
            from torch import distributed

            limit = datetime.timedelta(seconds=self.collective_timeout)
            distributed.distributed_c10d._set_pg_timeout(limit, distributed.group.WORLD)
        more = self.compile.graphs() - warmed if warmed and self.compile is not None else 0
        if more > 0:
            anew = initopt.recompiled_since(began)
            because = (
                f"an example of `compile` does not match what the model passes, {'; '.join(anew)}"
                if anew
                else "a part has no example, or a graph break, behind which a warm-up does not get (`initopt compile`)"
            )
            # Dynamo takes a second size for one that varies.
            fixed = self.compile is None or self.compile.dynamic is False
            also = "" if fixed or not anew else ". Its code is for any size now, unlike stock's"
            warnings.warn(
                f"initopt: the first batch compiled {more} more graphs than the warm-up had: {because}{also}",
                stacklevel=2,
            )


_FIRST_STEP = Step(FIRST_STEP, lane="comms", stage="get_first_batch_data", origin=ORIGIN)


def trainer(
    *,
    model: Callable[..., nn.Module],
    loader: Callable[..., Iterable[Any]],
    dense_optimizer: Callable[..., Any],
    sharders: Callable[..., list[Any]] | None = None,
    planner: Callable[..., Any] | None = None,
    pipeline: Callable[..., Any] | None = None,
    plan: str | Path | None = None,
    fast_plan: bool = True,
    plan_lane: str = "main",
    fill_once: bool = True,
    eliminate: bool | Iterable[str] = False,
    strict: bool = False,
    checkpoint: Callable[..., Any] | None = None,
    checkpoint_has_tables: bool = False,
    compile: Compile | None = None,
    imports: Iterable[str] = (),
    later: Mapping[str, Callable[..., Any]] | None = None,
    device: str | None = None,
    backend: str | None = None,
    name: str = "trainer",
    timeout: float = 1800.0,
    collective_timeout: float | None = None,
    labels: Iterable[str] = (),
) -> TrainerStartup:
    """Return the start-up of a TorchRec trainer.

    Factories, whose parameters name steps or inputs:
        model: the module, its tables on the meta device, optimizers of the tables attached.
        loader: the DataLoader, or any iterable of batches; the step starts its workers.
        sharders: the list of sharders. Default: TorchRec's.
        planner: the sharding planner. Default: the one that DistributedModelParallel would make.
        pipeline: the train pipeline. Default: TrainPipelineSparseDist.
        checkpoint: restores in place what it takes, for example `dmp` and `optimizer`.
    `plan` is the file of a sharding plan (see `initopt plan -o`), which is checked and used. Without one every rank
    makes the plan that TorchRec would make, and one collective shows that all have the same; with `fast_plan=False`
    rank 0 makes it with the planner as it is, and the others wait. Planning is Python: on `plan_lane="process:plan"` it
    leaves the interpreter to other steps, and model, planner and sharders must be picklable.

    Tables are filled once, not twice as TorchRec does, with the same values (see `initopt.fill_once`), or as ever with
    `fill_once=False`. With `checkpoint_has_tables` they are not filled before `checkpoint` has run: until then they
    hold NaN, so no other step may read them. What it has not written is filled then, as TorchRec would have.

    With `eliminate` meetings of all ranks that carry what each of them knows are left out, after one collective has
    shown that they assume the same (see `initopt.eliminated`); it may name the rewrites to use, True is all of them.
    Where ranks differ TorchRec's own way is taken, with a warning; with `strict` it is an error on all ranks.

    `dense_optimizer` is called with the parameters that no optimizer of the tables has, and returns theirs.

    `imports` names modules that a step `heavy_imports` imports, beside `store`, and beside `process_group` as long as
    no loader is to start first; who gains by it imports them nowhere earlier. Every factory's step comes after it.
    `later` has factories of what the first batch does not need, such as a validation loader: they run after the first
    training step, in this order, and stand in `Ready.later`. One that draws random numbers is refused there.

    `compile` says which parts are compiled, and warmed up. `device` is `cpu` or `cuda` (default: cuda where there is
    one), `backend` the process group's (default: nccl on cuda, gloo on cpu). `timeout` limits, in seconds, each step
    and each collective until the first training step has ended; then `collective_timeout` holds, if it is given.
    `labels` go with the record.
    """
    if checkpoint_has_tables and (checkpoint is None or not fill_once):
        raise ValueError("checkpoint_has_tables needs a `checkpoint` and fill_once=True")
    if strict and not eliminate:
        raise ValueError("strict is of the rewrites that `eliminate` names: give it, too")
    start = TrainerStartup(name, timeout, labels=tuple(labels), collective_timeout=collective_timeout, compile=compile)
    if later is not None and not isinstance(later, Mapping):
        raise TypeError(f"later is a {type(later).__name__}: give a dict of names and factories")
    start.later = dict(later or {})
    if isinstance(imports, str):
        raise TypeError(f"imports is {imports!r}: give a tuple, ({imports!r},)")
    modules = tuple(imports)

    for factory, called in ((model, "model"), (loader, "loader"), (dense_optimizer, "dense_optimizer")):
        if not callable(factory) or hasattr(factory, "named_children") or hasattr(factory, "dataset"):
            raise TypeError(f"{called} is {type(factory).__name__!r}: pass a function that makes it")
    try:
        inspect.signature(dense_optimizer).bind(())
    except TypeError as error:
        raise TypeError(f"dense_optimizer is called with the dense parameters and nothing else, but: {error}") from None

    def step(function: Callable[..., Any], called: str, stage: str, **about: Any) -> None:
        start.step(function, name=called, stage=stage, origin=ORIGIN, **about)

    def place() -> Place:
        return _place(device)

    def store(place: Place) -> Any:
        from torch.distributed import rendezvous

        store, rank, world_size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))
        start.join(store, rank, world_size)
        return store

    def process_group(place: Place, store: Any) -> Any:
        from torch import distributed

        place.enter()
        distributed.init_process_group(
            backend or ("nccl" if place.device.type == "cuda" else "gloo"),
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        return distributed.group.WORLD

    def own_plan(place: Place, model: nn.Module, planner: Any, sharders: list[Any]) -> OwnPlan:
        if plan is not None:
            memory: dict[str, Any] = {
                name: getattr(planner, f"_{name}", None) for name in ("topology", "batch_size", "constraints")
            }
            pinned = initopt.load_plan(plan, model, sharders=sharders, **_job(place), **memory)
            return initopt.OwnPlan(pinned, remarks=(f"the sharding plan is that of {plan}",))
        ranks = getattr(getattr(planner, "_topology", None), "world_size", place.world_size)
        if ranks != place.world_size:
            raise initopt.PlanError([f"the planner's topology has {ranks} ranks, this job has {place.world_size}"])
        if fast_plan:
            initopt.make_fast(planner)
        return initopt.plan_locally(planner, model, sharders, rank=place.rank)

    def elimination() -> Elimination | None:
        if isinstance(eliminate, bool):
            return initopt.Elimination(strict=strict) if eliminate else None
        return initopt.Elimination(eliminate, strict=strict)

    def sharding_plan(
        place: Place, process_group: Any, model: nn.Module, own_plan: OwnPlan, sharders: list[Any]
    ) -> Any:
        for remark in own_plan.remarks:
            start.note(remark)
        start.elimination, agreement = elimination(), None
        if start.elimination is not None:
            agreement = start.elimination.agreement(
                process_group,
                place.device,
                model,
                sharders,
                schedule=start.collectives(),
                parameters=start.leaves_model(),
            )
        agreed = initopt.agree_on_plan(own_plan, process_group, place.device, agreement=agreement)
        initopt.check_plan(agreed, model, sharders=sharders, **_job(place))
        return agreed

    def dmp(place: Place, process_group: Any, model: nn.Module, sharding_plan: Any, sharders: list[Any]) -> Any:
        from torchrec.distributed.model_parallel import DistributedModelParallel

        place.enter()
        filling = initopt.fill_once(restored=checkpoint_has_tables) if fill_once else nullcontext()
        # Where the plan comes from a step of somebody else's, it is compared here.
        start.elimination = start.elimination or elimination()
        eliminating = start.elimination.block() if start.elimination is not None else nullcontext()
        with filling as filled, eliminating:
            sharded = DistributedModelParallel(module=model, device=place.device, plan=sharding_plan, sharders=sharders)
        start.eliminated()
        if filled is not None:
            start.filled(filled)
        return sharded

    def optimizer(place: Place, dmp: Any) -> Any:
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        place.enter()
        parameters = dict(in_backward_optimizer_filter(dmp.named_parameters()))
        return CombinedOptimizer([dmp.fused_optimizer, KeyedOptimizerWrapper(parameters, dense_optimizer)])

    def first_batch(place: Place, loader: Iterator[Any]) -> list[Any]:
        return _fetch(loader, place)

    def batches(loader: Iterator[Any], first_batch: list[Any]) -> Iterator[Any]:
        return itertools.chain(first_batch, loader)

    step(place, "place", "device_init")
    step(store, "store", "process_group_init", lane="comms")
    step(process_group, "process_group", "process_group_init", lane="comms")
    imported: tuple[str, ...] = ()
    if modules:

        def heavy_imports() -> None:
            for module in modules:
                try:
                    importlib.import_module(module)
                except OrderError as error:
                    raise OrderError(
                        f"the import of {module!r} draws random numbers, which a script does before it sets its seed. "
                        "Leave it out of `imports`, and import it at the top"
                    ) from error

        # The other ranks are met meanwhile, on another lane. A step that forks does not run beside it, as beside none.
        step(heavy_imports, "heavy_imports", "device_init")
        imported = ("heavy_imports",)
    step(_compiled(model, compile), "model", "train_module_creation", uses="rng", after=imported)
    step(sharders or _default_sharders, "sharders", "train_module_creation", after=imported)
    step(planner or _default_planner, "planner", "train_module_creation", after=imported)
    step(own_plan, "own_plan", "train_module_creation", lane=plan_lane)
    step(sharding_plan, "sharding_plan", "train_module_creation", lane="comms")
    unsharded: tuple[str, ...] = ()
    if compile is not None:
        _compiles_ahead(start, compile)
        unsharded = ("compile_parts", "compile_examples")
    step(dmp, "dmp", "train_module_creation", lane="comms", uses="rng", after=unsharded)
    step(optimizer, "optimizer", "init_plugins")
    if checkpoint is not None:
        restore = _completed(checkpoint, start) if checkpoint_has_tables else checkpoint
        step(restore, "checkpoint", "init_plugins", lane="comms", after="optimizer")
    step(
        _started(loader, start),
        "loader",
        "preproc_creation",
        lane="io:data",
        uses=("rng", "fork"),
        after=imported,
        early=True,
        discard=_stop_workers,
    )
    step(pipeline or _default_pipeline, "pipeline", "pre_train", after=imported)
    if compile is not None:
        _compiles_for_loader(start, compile)
    # Its sampler may draw, and without workers the data set may, too.
    step(first_batch, "first_batch", "get_first_batch_data", lane="io:data", uses="rng")
    step(batches, "batches", "get_first_batch_data")
    return start


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _completed(checkpoint: Callable[..., Any], start: TrainerStartup) -> Callable[..., Any]:
    @functools.wraps(checkpoint)
    def restore(*args: Any, **kwargs: Any) -> Any:
        result = checkpoint(*args, **kwargs)
        start.complete_tables()
        return result

    return restore


def _compiles_ahead(start: TrainerStartup, compile: Compile) -> None:
    """Declare the steps that compile parts of the model before the first batch is there, or load what was compiled.

    They come before the step `dmp`: what is read off the model is read while it is as it was made.
    """
    step = functools.partial(start.step, stage="compile", origin=ORIGIN)

    def compile_parts(place: Place, model: nn.Module) -> Any:
        place.enter()
        return compile.prepare(model, place.device)

    def compile_cache(place: Place, store: Any, compile_parts: Any) -> Any:
        place.enter()
        return compile.open_cache(
            compile_parts,
            place.device,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            startup=f"{start.name}.{start.turn}",
            # A rank waits for two leaders at the most, and then compiles within what is left of its step's time.
            patience=min(600.0, start.timeout / 4),
            between=start.pause,
        )

    def compile_examples(place: Place, model: nn.Module, compile_parts: Any, compile_cache: Any) -> Any:
        place.enter()
        recorded = compile_cache.known.calls
        return compile.calls(model, place.device, recorded=recorded, twin=compile_parts.twin)

    def compile_load(compile_cache: Any) -> bool:
        return bool(compile_cache.look_up())

    step(compile_parts)
    step(compile_cache, lane="io:compile", pauses=True)
    # A copy of the model may run, and what it draws is taken back.
    step(compile_examples, uses="rng")
    step(compile_load, lane="io:compile", uses="compile", pauses=True)
    # Beside planning it would only fight for the interpreter's lock (both are Python through and through).
    told = compile.batch is not None or compile.examples is not None
    step(
        functools.partial(_warmed_up, start, compile, told),
        name="compile_warmup",
        lane="io:compile",
        uses="compile",
        pauses=True,
        after=("compile_load", "own_plan"),
    )


def _compiles_for_loader(start: TrainerStartup, compile: Compile) -> None:
    """Declare the steps that compile what nobody but the loader could give examples for, and wait for all ranks."""
    step = functools.partial(start.step, stage="compile", origin=ORIGIN)
    last = "compile_warmup"
    if compile.batch is None and compile.examples is None:

        def loader_examples(
            place: Place, model: nn.Module, loader: Any, compile_parts: Any, compile_warmup: int
        ) -> Any:
            if compile_warmup:
                return None
            place.enter()
            return compile.calls(model, place.device, loader=start.loader, twin=compile_parts.twin)

        def compile_for_loader(place: Place, model: nn.Module, compile_cache: Any, loader_examples: Any) -> int:
            if loader_examples is None:
                return 0
            return _warmed_up(start, compile, True, place, model, compile_cache, loader_examples)

        step(loader_examples, uses="rng")
        step(compile_for_loader, lane="io:compile", uses="compile", pauses=True)
        last = "compile_for_loader"

    def compiled(compile_cache: Any) -> None:
        compile_cache.meet()

    step(compiled, lane="io:compile", pauses=True, after=last)


def _warmed_up(
    start: TrainerStartup,
    compile: Compile,
    last: bool,
    place: Place,
    model: nn.Module,
    compile_cache: Any,
    compile_examples: Any,
) -> int:
    if not compile_examples.calls:
        if last:
            start.note("it is not known yet how the parts are called, so they compile at the first batch")
        return 0
    place.enter()
    given = (model, place.device, compile_examples, compile_cache)
    graphs: int = compile_cache.make(lambda say: compile.warm_up(*given, between=start.pause, say=say))
    start.came_to_code(compile_cache.found)
    for remark in (compile.advice(model, compile_cache), *(tuned.line for tuned in compile_cache.tuned)):
        if remark:
            start.note(remark)
    return graphs


def _place(device: str | None) -> Place:
    import torch

    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{' and '.join(missing)} not in the environment: start the trainer with torchrun, or set the variables "
            "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = Place(
        rank,
        local_rank,
        world_size,
        int(os.environ.get("LOCAL_WORLD_SIZE") or world_size),
        torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank),
    )
    place.enter()
    return place


def _job(place: Place) -> dict[str, Any]:
    """What a sharding plan has to fit. TorchRec reads the same variables."""
    local, pod = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("TORCHREC_RESOLVED_POD_SIZE")
    return {
        "world_size": place.world_size,
        "local_world_size": int(local) if local else None,
        "pod_size": int(pod) if pod else None,
        "device": place.device.type,
    }


def _default_sharders() -> list[Any]:
    from torchrec.distributed.model_parallel import get_default_sharders

    return list(get_default_sharders())


def _default_planner(place: Place) -> Any:
    from torchrec.distributed.comm import get_local_size
    from torchrec.distributed.model_parallel import get_topology_domain_multiple
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    topology = Topology(
        local_world_size=get_local_size(place.world_size),
        world_size=place.world_size,
        compute_device=place.device.type,
        pod_size=get_topology_domain_multiple(),
    )
    return EmbeddingShardingPlanner(topology=topology)


def _default_pipeline(place: Place, dmp: Any, optimizer: Any) -> Any:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    place.enter()
    return TrainPipelineSparseDist(dmp, optimizer, place.device, execute_all_batches=True)


def _compiled(model: Callable[..., nn.Module], compile: Compile | None) -> Callable[..., nn.Module]:
    @functools.wraps(model)
    def made(**arguments: Any) -> nn.Module:
        module = model(**arguments)
        if not hasattr(module, "named_children"):
            raise TypeError(f"the factory of the model returned {module!r}, which is no torch.nn.Module")
        if compile is not None:
            compile.apply(module)
        return module

    return made


def _started(loader: Callable[..., Iterable[Any]], start: TrainerStartup) -> Callable[..., Iterator[Any]]:
    @functools.wraps(loader)
    def started(**arguments: Any) -> Iterator[Any]:
        start.loader = loader(**arguments)
        return iter(start.loader)

    return started


def _reads_elsewhere(loader: Iterator[Any]) -> bool:
    return getattr(loader, "_num_workers", 0) > 0


def _fetch(loader: Iterator[Any], place: Place) -> list[Any]:
    try:
        return [next(loader)]
    except StopIteration:
        raise ValueError(
            f"the loader of rank {place.rank} has no batch: its data set, or this rank's share of it, is smaller than "
            "one batch (mind drop_last)"
        ) from None


def _generators() -> list[Any]:
    """The states of all generators that a trainer shares with what it calls."""
    import torch

    states: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += [state.tolist() for state in torch.cuda.get_rng_state_all()]
    numpy = sys.modules.get("numpy")
    return states if numpy is None else [*states, pickle.dumps(numpy.random.get_state())]


def _stop_workers(loader: Iterator[Any]) -> None:
    if _reads_elsewhere(loader):
        loader._shutdown_workers()  # type: ignore[attr-defined]
