"""A start-up as a program: functions become the steps of a graph, and the graph is run with its steps overlapped.

    start = Startup("dlrm")

    @start.step(uses="rng")
    def model(config): ...

    @start.step(lane="comms")
    def process_group(): ...

    trainer = start.run(config=config)
    trainer.model

A parameter names the step (or the input of `run`) whose value it takes; a parameter with a default that names neither
keeps its default.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from initopt import rng
from initopt.graph import Collective, Graph, GraphError, Step
from initopt.lanes import Execution, Task
from initopt.record import Recorder

if TYPE_CHECKING:
    import pluggy

Function = TypeVar("Function", bound=Callable[..., Any])


class Values(Mapping[str, Any]):
    """What the steps returned, by name: `values.model`, or `values["items"]` for the name of a mapping's method."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        # Copying asks before there are any.
        values = self.__dict__.get("_values", {})
        try:
            return values[name]
        except KeyError:
            raise AttributeError(f"no step is named {name!r}; there are {', '.join(values)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Values({', '.join(self._values)})"


@dataclass(frozen=True)
class _Declared:
    step: Step
    function: Callable[..., Any]
    optional: frozenset[str] = frozenset()
    early: bool = False
    discard: Callable[[Any], None] | None = None


@dataclass
class Startup:
    """The steps of one trainer's start-up, in program order.

    `name` is the job's, used in records. `timeout` is the limit in seconds of a step that has none of its own.
    """

    name: str = "startup"
    timeout: float = 1800.0
    _declared: dict[str, _Declared] = field(default_factory=dict, repr=False)
    _execution: Execution | None = field(default=None, repr=False)
    _record: Path | None = field(default=None, repr=False)
    _goes_on = False
    """Whether the start-up ends with a step of the caller's, after `run`, that `Execution.last_step` watches over."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise GraphError(f"start-up {self.name!r} has timeout {self.timeout!r}: give a positive number of seconds")

    _extended: bool = field(default=False, repr=False)

    def step(
        self,
        function: Function | None = None,
        *,
        name: str | None = None,
        lane: str = "main",
        uses: str | Iterable[str] = (),
        after: str | Iterable[str] = (),
        before: str | Iterable[str] = (),
        stage: str | None = None,
        timeout: float | None = None,
        collectives: Iterable[Collective] = (),
        pauses: bool = False,
        early: bool = False,
        discard: Callable[[Any], None] | None = None,
        origin: str = "",
    ) -> Any:
        """Declare `function` as a step; usable as a decorator with or without arguments. Returns the function.

        `lane`, `uses`, `stage`, `timeout` (seconds) and `pauses` are those of `graph.Step`. `after` and `before` order
        it against steps whose values it does not take or give. `early`: the step forks or waits long and draws random
        numbers only in passing; from the second start-up on it runs first, from the generator state that it will have
        in its turn (see `rng`). `discard` is called with the value when the start-up fails or the value is thrown
        away. `origin` is for plugins: program order between two origins is never assumed for steps that draw random
        numbers.

        Raises GraphError if there is no name or it is taken, if `before` names no step, or if parameters don't name
        steps; the rest is checked when the graph is built.
        """
        if function is None:
            return functools.partial(
                self.step,
                name=name,
                lane=lane,
                uses=uses,
                after=after,
                before=before,
                stage=stage,
                timeout=timeout,
                collectives=collectives,
                pauses=pauses,
                early=early,
                discard=discard,
                origin=origin,
            )
        name = name or getattr(function, "__name__", None)
        if name is None:
            raise GraphError(
                f"{_place(function)}: a step is named after its function, and this has no name; pass name="
            )
        step = Step(
            name,
            after=_names(after),
            lane=lane,
            uses=_names(uses),
            stage=stage,
            timeout=timeout,
            collectives=tuple(collectives),
            origin=origin,
            pauses=pauses,
        )
        if step.name in self._declared:
            raise GraphError(
                f"{_place(function)}: step {step.name!r} is declared already, at "
                f"{self._declared[step.name].step.call_site}. Use `replace` to give it another function"
            )
        for later in _names(before):
            self._find(later)
        self._declared[step.name] = _declare(step, function, early, discard)
        for later in _names(before):
            self.order(step.name, later)
        return function

    def replace(self, name: str, function: Function) -> Function:
        """Give step `name` another function, with that function's needs; lane, resources, stage and order stay.

        Raises GraphError if there is no such step.
        """
        old = self._find(name)
        self._declared[name] = _declare(old.step, function, old.early, old.discard)
        return function

    def order(self, *names: str) -> None:
        """Let each of the steps `names` start after the one before it. Raises GraphError for an unknown step."""
        for earlier, later in itertools.pairwise(names):
            self._find(earlier)
            declared = self._find(later)
            step = replace(declared.step, after=(*declared.step.after, earlier))
            self._declared[later] = replace(declared, step=step)

    def graph(self, inputs: Iterable[str] = ()) -> Graph:
        """Return the checked graph of the steps as declared. `inputs` are the names given to `run`.

        Raises GraphError with the step, its place and the way out.
        """
        known = {*self._declared, *inputs}
        steps = []
        for declared in self._declared.values():
            needs = tuple(n for n in declared.step.needs if n in known or n not in declared.optional)
            steps.append(replace(declared.step, needs=needs))
        for step in steps:
            if "rng" in step.uses and step.lane.startswith("process:"):
                raise GraphError(
                    f"{step.name!r} uses 'rng' on lane {step.lane!r}: a helper process has generators of its own, so "
                    "its draws would not be the trainer's. Put it on a thread's lane"
                )
            if self._declared[step.name].early and (step.lane == "comms" or "comms" in step.uses):
                raise GraphError(
                    f"{step.name!r} is early and meets other ranks: not all of them may know its generator states, so "
                    "their collectives would differ in order. Drop early=True"
                )
        return Graph(steps, name=self.name, inputs=tuple(inputs))

    def run(self, *, overlap: bool = True, recorder: Recorder | None = None, **inputs: Any) -> Values:
        """Run every step and return their values, one after the other with `overlap=False`.

        Without a `recorder` the run is recorded under `.initopt/` (or $INITOPT_ROOT) and the record ends with the last
        step; with one, closing it is the caller's. Raises GraphError before any step runs, StartupFailed if one fails.
        """
        from initopt import plugins

        manager = plugins.installed()
        if not self._extended:
            self._extended = True
            manager.hook.initopt_declare(startup=self)
        graph = self._runnable(inputs)
        taken = self._taken(graph)
        for name in inputs:
            if name not in taken:
                parameters = {p for declared in self._declared.values() for p in declared.step.needs}
                near = difflib.get_close_matches(name, parameters, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise GraphError(f"no step of start-up {self.name!r} takes the input {name!r}{hint}")
        own = recorder is None
        if recorder is None:
            recorder = Recorder(self.name, mode="overlap" if overlap else "serial")
        try:
            values = self._run(graph, inputs, recorder, manager, overlap=overlap)
        finally:
            if own:
                self._close(recorder)
            self._record = recorder.path
        return values

    def join(self, store: Any, rank: int, world_size: int) -> None:
        """Connect the running start-up to the other ranks, from a step that has the job's store before its group.

        Steps that only call `torch.distributed.init_process_group` need not: that is seen when they end.
        """
        if self._execution is not None:
            self._execution.join(store, rank, world_size)

    @property
    def turn(self) -> int:
        """How many start-ups of this name this process has begun, which is the same on all ranks."""
        return self._execution.turn if self._execution is not None else 0

    def note(self, text: str) -> None:
        """Leave a remark of the running step in the record, one sentence, which `initopt` shows."""
        if self._execution is not None:
            self._execution.recorder.note(text)

    def pause(self) -> None:
        """Let the steps that fork have their turn, from a long step, where its thread holds no lock.

        Returns at once where none waits. A step that calls it is declared with `pauses=True`.
        """
        if self._execution is not None:
            self._execution.pause()

    def report(self) -> str:
        """Say where the last start-up of this object spent its time, as `initopt` prints it."""
        from initopt.report import summary
        from initopt.runs import Run

        if self._record is None:
            raise RuntimeError(f"start-up {self.name!r} has not run yet; call run() first")
        return summary(Run.load(self._record)).plain

    def _run(
        self,
        graph: Graph,
        inputs: Mapping[str, Any],
        recorder: Recorder,
        manager: pluggy.PluginManager,
        *,
        overlap: bool,
    ) -> Values:
        ledger = _ledger(self.name, recorder)
        tasks = {name: _task(declared, graph) for name, declared in self._declared.items()}
        early = [name for name, declared in self._declared.items() if declared.early]
        known = [name for name in early if overlap and name in ledger]
        planned = self._with_early(graph, known)
        recorder.graph = self._recorded(planned)
        execution = Execution(
            planned,
            tasks,
            inputs,
            recorder=recorder,
            timeout=self.timeout,
            plugins=manager,
            goes_on=self._goes_on,
        )
        for name in early:
            if name in known:
                _settle(execution, tasks, name, ledger)
            else:
                tasks[name] = replace(tasks[name], function=_noting(tasks[name].function, name, ledger))
        self._execution = execution
        if overlap:
            execution.overlapped()
        else:
            execution.serially()
        if not self._goes_on:
            recorder.started()
        ledger.save()
        return Values({name: execution.values[_settled(name) if name in known else name] for name in self._declared})

    def _close(self, recorder: Recorder) -> None:
        """Close a recorder of this start-up's own and show the plugins what it wrote."""
        from initopt import plugins

        recorder.close()
        if recorder.path is not None:
            plugins.installed().hook.initopt_run_ended(path=recorder.path)

    def _runnable(self, inputs: Iterable[str]) -> Graph:
        """The graph that is run."""
        return self.graph(inputs)

    def _taken(self, graph: Graph) -> set[str]:
        """The names of what somebody takes."""
        return {need for step in graph.values() for need in step.needs}

    def _with_early(self, graph: Graph, early: Sequence[str]) -> Graph:
        """The graph with these steps, whose generator states are known, out of their turn."""
        return _with_early_steps(graph, early)

    def _recorded(self, graph: Graph) -> Graph:
        """The graph that goes into the record of a run of `graph`."""
        return graph

    def _find(self, name: str) -> _Declared:
        try:
            return self._declared[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._declared, 1)
            there = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self._declared) or 'none yet'}"
            raise GraphError(f"no step is named {name!r} ({there})") from None


def _declare(step: Step, function: Callable[..., Any], early: bool, discard: Callable[[Any], None] | None) -> _Declared:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise GraphError(f"{_place(function)}: step {step.name!r} is no plain function: let it return its value")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise GraphError(f"step {step.name!r} is no function whose parameters can be read: {error}") from error
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise GraphError(
                f"{_place(function)}: step {step.name!r} takes {parameter}, but parameters name the steps it needs; "
                "name each of them"
            )
    optional = frozenset(p.name for p in parameters if p.default is not p.empty)
    needs = tuple(parameter.name for parameter in parameters)
    return _Declared(replace(step, needs=needs, call_site=_place(function)), function, optional, early, discard)


def _task(declared: _Declared, graph: Graph) -> Task:
    needs = graph[declared.step.name].needs
    return Task(declared.function, {need: need for need in needs}, declared.discard)


# An early step is two steps of the graph: the step itself, alone and first, and `<name>.settle` in its turn, which
# checks that the generators stand where the ledger said and hands the value on.


def _settled(name: str) -> str:
    return f"{name}.settle"


def _with_early_steps(graph: Graph, early: Iterable[str]) -> Graph:
    """Take the steps `early` out of their turn.

    The steps are listed in the graph's order, so the collectives keep the order that they have without a ledger: ranks
    agree on it whether or not each of them has one.
    """
    moved = set(early)
    if not moved:
        return graph
    first, rest = [], []
    for name in graph.order():
        step = graph[name]
        step = replace(
            step,
            needs=tuple(_settled(n) if n in moved else n for n in step.needs),
            after=tuple(_settled(n) if n in moved else n for n in step.after),
        )
        if name not in moved:
            rest.append(step)
            continue
        others = tuple(resource for resource in step.uses if resource not in ("rng", "fork"))
        first.append(replace(step, uses=(*others, "fork")))
        rest.append(replace(step, name=_settled(name), needs=(name,), uses=("rng",), lane="main"))
    return Graph([*first, *rest], name=graph.name, inputs=graph.inputs)


def _settle(execution: Execution, tasks: dict[str, Task], name: str, ledger: rng.Ledger) -> None:
    task, entry = tasks[name], ledger[name]
    after: list[bytes] = []

    def ahead(**arguments: Any) -> Any:
        others, put_back = rng.others(), rng.keep_others()
        with rng.swapped(entry.before):
            value = task.function(**arguments)
            after.append(rng.cpu())
        if rng.moved(others, rng.others()):
            # These generators are not in the ledger, so this step has to wait for its turn.
            after.clear()
            put_back()
        return value

    def in_turn(value: Any) -> Any:
        # From here on the value is this step's, to hand on or to discard.
        execution.values.pop(name)
        now = rng.cpu()
        if after and after[0] == entry.before:
            # It drew nothing, so it did not matter from where it would have drawn.
            ledger[name] = rng.Entry(now, now)
            return value
        if after and now == entry.before:
            rng.write(after[0])
            ledger[name] = rng.Entry(entry.before, after[0])
            return value
        if task.discard is not None:
            task.discard(value)
        arguments = {parameter: execution.values[source] for parameter, source in task.parameters.items()}
        with execution.alone(_settled(name)):
            return _noting(task.function, name, ledger)(**arguments)

    tasks[name] = replace(task, function=ahead)
    tasks[_settled(name)] = Task(in_turn, {"value": name}, task.discard)
    for other, declared in tasks.items():
        if other != _settled(name) and name in declared.parameters.values():
            parameters = {p: _settled(name) if s == name else s for p, s in declared.parameters.items()}
            tasks[other] = replace(declared, parameters=parameters)


def _noting(function: Callable[..., Any], name: str, ledger: rng.Ledger) -> Callable[..., Any]:
    """Run a step in its turn and note what it did to the generators, for the next start-up."""

    @functools.wraps(function)
    def noted(**arguments: Any) -> Any:
        before, others = rng.cpu(), rng.others()
        value = function(**arguments)
        if before and not rng.moved(others, rng.others()):
            ledger[name] = rng.Entry(before, rng.cpu())
        else:
            del ledger[name]
        return value

    return noted


def _ledger(job: str, recorder: Recorder) -> rng.Ledger:
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    # A job may be named as its author likes, a file may not.
    file = re.sub(r"[^\w.-]", "_", job)
    path = recorder.root / "ledger" / f"{file}.rank{rank}of{world_size}.json"
    return rng.Ledger(path, rng.digest(rng.read()))


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code is not None else repr(function)
