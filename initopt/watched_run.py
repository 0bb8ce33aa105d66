"""The start-up of this process, recorded while the script knows nothing of it: what `initopt.run` puts into each rank.

A process is a rank once it makes the default process group, or is the script itself and trains without one. What it
does before is kept in memory, and dropped where it does neither. After the first training step every hook is out.
What goes wrong in here costs the record, never the job, and is said once.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from initopt.entry_points import Event, Hooks
from initopt.exits import Exit, Exits
from initopt.first_training_step import FirstStep, Trained
from initopt.imports import Recording, record_imports, recording
from initopt.own_lines import Between, Line, Moment, Own
from initopt.process_tree import cpu_seconds
from initopt.record import (
    FIRST_STEP,
    Ended,
    Mode,
    Recorder,
    Span,
    Trailer,
    Usage,
    current_recorder,
    run_numbers,
    run_root,
)
from initopt.run import Wanted, forget, wanted

if TYPE_CHECKING:
    from initopt.optimize.applied import Optimizing
    from initopt.optimize.arrivals import Arrivals

THROWN_AWAY = "thrown_away_step"
"""A training step whose outcome was overwritten from a checkpoint before the next one."""

_MESSAGE = 100
"""Characters of an exception's message that are kept."""

_DMP = "dmp"
_STEPS: dict[Event, tuple[str, str]] = {
    "checkpoint": ("checkpoint", "pre_train"),
    "derived": (_DMP, "train_module_creation"),
    "dmp": (_DMP, "train_module_creation"),
    "group": ("process_group", "process_group_init"),
    "loader": ("loader", "preproc_creation"),
    "new_group": ("new_group", "process_group_init"),
    "plan": ("sharding_plan", "train_module_creation"),
    "rendezvous": ("rendezvous", "process_group_init"),
}
_FIRST_BATCH = ("first_batch", "get_first_batch_data")


def begin(entered: float) -> None:
    """Watch this process as the environment asks for. Called once, as the interpreter starts or imports torch.

    What it took since `entered` (`time.thread_time`) is part of the recorder's own cost.
    """
    WatchedRun(wanted()).begin(entered)


class WatchedRun:
    """One process that may turn out to be a rank."""

    def __init__(self, asked: Wanted) -> None:
        self._asked = asked
        self._root = os.path.abspath(run_root(asked.root or None))
        self._runs_before = run_numbers(Path(self._root))
        self._hooks = Hooks(self)
        self._watching = ExitStack()
        self._own = Own()
        self._exits = Exits()
        self._is_rank = False
        self._done = False
        self._optimizing: Optimizing | None = None
        self._anew()

    def _anew(self) -> None:
        self._pid = os.getpid()
        self._first = FirstStep()
        self._between = Between(self._found_between)
        self._usage: Usage | None = None
        self._trained: set[int] = set()
        self._asked_for_a_batch: weakref.WeakSet[Any] = weakref.WeakSet()
        self._imports: Recording | None = recording()
        self._imports_over = False
        self._recorder = _Found(self)
        if self._optimizing is not None:
            self._optimizing.end()
        if self._asked.optimize:
            # Who only records does not pay for these.
            from initopt.optimize.applied import Optimizing
            from initopt.optimize.saying import Saying

            saying = Saying(lambda: self._recorder, self._place)
            is_script = self._asked.program == self._pid
            self._optimizing = Optimizing(
                self._asked.optimize, self._asked.name, self._root, saying, is_script=is_script
            )

    def begin(self, entered: float) -> None:
        """Begin to watch."""
        # The first that is registered is the last that is called: the script's own come before.
        atexit.register(self._at_exit)
        record_imports()
        self._anew()
        if self._imports is not None:
            self._imports.imported = self._imported
            if self._optimizing is not None:
                self._imports.outermost = self._optimizing.outermost_import
        self._recorder.__enter__()
        # A rank that was forked by `initopt launch` has its imports; a fresh process has nothing of interest yet.
        for module in list(sys.modules):
            self._imported(module)
        self._hooks.imported_before()
        before = self._asked.spent if self._asked.program == self._pid else 0.0
        self._recorder.spent(before + time.thread_time() - entered)

    def here(self) -> bool:
        """Whether this process is watched."""
        return not self._done and os.getpid() == self._pid

    def becomes_rank(self) -> bool:
        """Watch collectives from now on, and let children alone. False if this process did so before."""
        forked = os.getpid() != self._pid
        if self._done or self._is_rank:
            return False
        with self._fail_safe():
            if current_recorder() is not self._recorder:
                # The script has a recorder of its own, and needs no second one.
                if self._optimizing is not None and os.environ.get("RANK", "0") == "0":
                    _say("the script has a recorder of its own, so nothing is optimized")
                self._leave()
                return False
            if forked:
                self._recorder.__exit__(None, None, None)
                self._anew()
                self._recorder.__enter__()
            self._is_rank = True
            forget(self._asked)
            around = self._arrivals.around if self._arrivals is not None else None
            self._watching.enter_context(self._recorder.collectives(around=around))
            return True
        return False

    @contextmanager
    def around(self, event: Event, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Record a call as the step that it means."""
        if event in ("backward", "batch", "progress"):
            with self._fail_safe():
                if self._main() and self._first.found is not None and not self._is_named():
                    self.finish(self._first.found)
        if self._done:
            yield
        elif event == "backward":
            with self._backward():
                yield
        elif event == "progress":
            with self._progress():
                yield
        elif event == "batch":
            with self._batch(arguments[0]):
                yield
        elif event == "loader_made":
            yield
            with self._fail_safe():
                if self._optimizing is not None and self._main():
                    self._optimizing.loader_made(arguments[0], time.perf_counter())
        else:
            name, stage = _STEPS[event]
            if event == "loader" and self._optimizing is not None and self._main():
                with self._fail_safe():
                    self._optimizing.loader_begins(arguments[0], time.perf_counter())
            if self._recorder.step_here() == name:
                yield
            else:
                with self._recorder.span(name, stage=stage):
                    yield
                with self._fail_safe():
                    self._after(event, arguments)

    @contextmanager
    def _backward(self) -> Iterator[None]:
        main = self._main()
        if main:
            self._first.backward_begins(self._own.now())
        yield
        if main:
            self._first.backward_ended(self._own.now())

    @contextmanager
    def _progress(self) -> Iterator[None]:
        if not self._main():
            yield
            return
        self._first.progress_begins(self._own.now())
        well = False
        try:
            # Should it turn out to train nothing, what is inside of it is found by its time.
            with self._recorder.current_step(self._recorder.step_here() or FIRST_STEP):
                yield
            well = True
        finally:
            self._first.progress_ended(self._own.now(), well=well)

    @contextmanager
    def _batch(self, iterator: Any) -> Iterator[None]:
        name, stage = _FIRST_BATCH
        known = iterator in self._asked_for_a_batch or self._recorder.step_here() == name
        self._asked_for_a_batch.add(iterator)
        if known:
            yield
        else:
            outer, began = self._recorder.step_here(), time.perf_counter()
            with self._recorder.span(name, stage=stage):
                yield
            with self._fail_safe():
                if self._optimizing is not None and self._main():
                    self._optimizing.first_batch(iterator, time.perf_counter() - began, outer or name)
        if self._main():
            self._first.batch_came(self._own.now())

    def named(self, step: str, stage: str) -> AbstractContextManager[None]:
        """Record a call that a plugin has named."""
        if self._done or self._recorder.step_here() == step:
            return nullcontext()
        return self._recorder.span(step, stage=stage)

    def _after(self, event: Event, arguments: tuple[Any, ...]) -> None:
        """Look at what a step has left."""
        if event == "group" and self._optimizing is not None:
            self._optimizing.joined()
        elif event == "dmp":
            # Public, but in a library that may be missing.
            split = getattr(sys.modules.get("torchrec.optim.optimizers"), "in_backward_optimizer_filter", None)
            if split is not None:
                left = [p for _, p in split(arguments[0].named_parameters()) if p.requires_grad]
                self._first.all_in_backward = not left
        elif event == "checkpoint" and self._main() and self._first.found and self._loads_what_was_trained(arguments):
            thrown_away = self._first.thrown_away()
            if thrown_away is not None:
                self._put_training(THROWN_AWAY, thrown_away)

    def _loads_what_was_trained(self, arguments: tuple[Any, ...]) -> bool:
        return not self._trained.isdisjoint(_places(arguments[0]))

    def instead(self, event: Event, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of an entry point: itself, unless it is optimized."""
        return function if self._done or self._optimizing is None else self._optimizing.instead(event, function)

    def optimizer_stepped(self, optimizer: Any) -> None:
        """See whether that was the first training step."""
        with self._fail_safe():
            if self._main():
                self._first.stepped(self._own.now())
                self._trained |= _places(optimizer)
                self._usage = Usage(self._recorder.now(), cpu_seconds())

    def exits(self, raised: SystemExit) -> None:
        """Follow it: outside of a step nobody else does."""
        with self._fail_safe():
            self._follow(raised)

    def _follow(self, raised: SystemExit) -> Exit | None:
        now = self._own.now()
        found = self._exits.follow(raised, now.time)
        if found is not None and not found.lines:
            found.lines, found.through = self._own.raised(raised) or now.lines, next(iter(now.lines), None)
            handled = raised.__context__
            if isinstance(handled, Exception):
                # It was mostly logged, and the exit code is all that the interpreter sees.
                found.after = self.failure(handled)
                found.lines = found.lines or self._own.raised(handled)
            seen: set[int] = set()
            while handled is not None and id(handled) not in seen:
                seen.add(id(handled))
                found.kept |= id(handled) == self._recorder.failed
                handled = handled.__context__
        return found

    def module_put_in(self) -> None:
        """Note it, if it isn't part of a step or an import."""
        if self._main() and not self._recorder.step_here():
            with self._fail_safe():
                if self._imports is None or not self._imports.module_here():
                    self._imports_end()
                    self._between.module_put_in(self._own.now())

    @property
    def _arrivals(self) -> Arrivals | None:
        return self._optimizing.arrivals if self._optimizing is not None else None

    def main_step_begins(self, name: str) -> None:
        """A step of the main thread begins."""
        if self._arrivals is not None:
            with self._fail_safe():
                self._arrivals.step_begins(name)

    def main_step_ended(self, error: BaseException | None) -> None:
        """It has ended, perhaps with this error."""
        if self._arrivals is not None:
            with self._fail_safe():
                self._arrivals.step_ended(error)

    def step_begins(self) -> None:
        """An outermost step of the main thread begins."""
        with self._fail_safe():
            self._imports_end()
            self._between.ends(self._own.now())

    def sharded(self) -> None:
        """A model was sharded, so it was made."""
        self._between.model_is_made = True

    def step_ended(self) -> None:
        """It has ended."""
        with self._fail_safe():
            now = self._own.now()
            self._between.begins(now)
            self._first.step_ended(now)

    def named_end(self) -> None:
        """The step that ends the start-up, by its name, has ended."""
        with self._fail_safe():
            self._keep_optimized()
            if self.until:
                self._recorder.note(f"the step {self.until!r} ends this start-up (--until)")
            self._leave()
            self._say_first_batch()

    def finish(self, found: Trained) -> None:
        """The first training step is known: write it down, and be gone."""
        self._put_training(FIRST_STEP, found)
        if self._usage is not None:
            self._recorder.usage(self._usage)
        self._keep_optimized()
        self._leave()
        self._say_first_batch()

    def _keep_optimized(self) -> None:
        if self._optimizing is not None:
            self._optimizing.trained()

    def _place(self) -> str:
        """The line of the script that the calling thread is in, empty where it is in none."""
        lines = self._own.now().lines
        return f"{lines[-1].file}:{lines[-1].number}" if lines else ""

    def step_of_imports(self) -> str:
        """What is imported outside of a step belongs to this one: later, between steps, to what has no name yet."""
        return "imports" if self._main() and not self._imports_over else ""

    @property
    def until(self) -> str:
        """The step that ends the start-up, empty where that is found."""
        return self._asked.until

    @property
    def mode(self) -> Mode:
        """How the script is run."""
        return "optimized" if self._asked.optimize else "stock"

    @property
    def name(self) -> str:
        """The script's name."""
        return self._asked.name

    @property
    def root(self) -> str:
        """Where runs are kept."""
        return self._root

    def _is_named(self) -> bool:
        """Whether the step that ends the start-up is known by its name."""
        return bool(self.until) or self._recorder.in_last_step

    def _main(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def _imported(self, module: str) -> None:
        # Called for each of thousands of modules, of which a few are of interest.
        optimizing = self._optimizing if self._optimizing is not None and self._optimizing.wants(module) else None
        if optimizing is None and not self._hooks.wants(module):
            return
        with self._fail_safe():
            self._hooks.imported(module)
            if optimizing is not None and not self._done:
                optimizing.imported(module)

    def _imports_end(self) -> None:
        """The program goes on from its imports to something else."""
        if self._imports_over:
            return
        self._imports_over = True
        self._exits.begins(self._own.outermost())
        time_, cpu = self._imports.last if self._imports is not None else (0.0, 0.0)
        if not time_:
            time_, cpu = time.perf_counter(), time.thread_time()
        self._recorder.imports_ended(time_, cpu)
        self._between.begins(Moment(time_, cpu))
        if self._optimizing is not None:
            self._optimizing.imports_ended()

    def _found_between(self, name: str, start: Moment, end: Moment, error: str) -> None:
        stage = "train_module_creation" if name == "model" else None
        self._recorder.step_seen(name, start, end, stage, error)

    def _put_training(self, name: str, found: Trained) -> None:
        self._imports_end()
        self._between.ends(found.start)
        self._recorder.step_seen(name, found.start, found.end, "get_first_batch_data")
        self._between.begins(found.end)

    def _leave(self) -> None:
        """Take all hooks out and close the record."""
        if self._done:
            return
        self._done = True
        if unknown := self._hooks.unknown_versions():
            self._recorder.note(f"{unknown}, so its steps were not looked for")
        if self._imports is not None:
            self._imports.imported, self._imports.outermost = _nobody, _nobody
        if current_recorder() is self._recorder:
            self._recorder.__exit__(None, None, None)
        self._watching.close()
        self._hooks.take_out()
        if self._optimizing is not None:
            self._optimizing.end()
        forget(self._asked)

    def _at_exit(self) -> None:
        if self._done or os.getpid() != self._pid:
            return
        with self._fail_safe():
            if self._first.found is not None and not self._is_named():
                self.finish(self._first.found)
            # Where nothing was seen but imports the script ended before it began, and has said why.
            elif self._is_rank or (self._imports_over and self._asked.program == self._pid and self._alone()):
                how = self._ended()
                self._leave()
                self._say_no_first_batch(how)
            elif self._asked.program == self._pid:
                self._say_no_record(self._ended())

    def _alone(self) -> bool:
        """Whether the script has trained in its own process, as far as is known: it has started no recorded ranks."""
        return run_numbers(Path(self._root)) == self._runs_before

    def _say_first_batch(self) -> None:
        recorder = self._recorder
        if recorder.rank or recorder.path is None:
            return
        from initopt.chain import seconds, sentence
        from initopt.runs import Run

        run = Run.load(recorder.path)
        launched = run.headers[0].after_launcher
        since = f"; {seconds(run.first_batch(0) + launched)} after its launcher began" if launched else ""
        _say(f"{sentence(run, 0)} (rank 0, own cost {seconds(run.own_cost)}{since})")
        _say(f"{_short(recorder.path)}   next: initopt blame")

    def _say_no_first_batch(self, how: str) -> None:
        recorder = self._recorder
        if recorder.path is None:
            return
        wanted_ = f"step {self.until!r}{self._steps_there_were()}" if self.until else "training step"
        with_ = f"{f' on rank {recorder.rank}' if recorder.world_size > 1 else ''}{f' with {how},' if how else ''}"
        last = f"the script ended{with_} without a {wanted_}, and so does its record: {_short(recorder.path)}"
        if recorder.world_size > 1:
            # Nobody waits for the others: it's what they have written down by now.
            from initopt.ends import ends, who_failed

            written = ends(recorder.path)
            if recorder.rank:
                # A launcher may end rank 0 before that can speak for all.
                if how and not any(one.ended for one in written if one.rank != recorder.rank):
                    _say(last)
                return
            for said in who_failed(written, recorder.world_size):
                _say(said)
        _say(last)

    def _say_no_record(self, how: str) -> None:
        if how:
            # Of one process, its own traceback or exit code says all there is.
            if int(os.environ.get("WORLD_SIZE", "1")) > 1 and self._alone():
                rank = os.environ.get("RANK")
                on = f" on rank {rank}" if rank is not None else ""
                _say(f"the script ended{on} with {how}, before it had a process group, so there is no record of it")
            return
        # Python says itself where there is no such script.
        script = next(iter(sys.argv), None)
        if isinstance(script, str) and os.path.exists(script) and self._alone() and os.environ.get("RANK", "0") == "0":
            if unknown := self._hooks.unknown_versions():
                _say(f"there is no record of the script: {unknown}")
            else:
                _say("the script ended without a process group or a training step, so there is no record of it")

    def _steps_there_were(self) -> str:
        from initopt.runs import Run

        recorder = self._recorder
        assert recorder.path is not None
        spans = Run.load(recorder.path).of_rank(recorder.rank)
        names = dict.fromkeys(span.name for span in spans if span.kind == "step" and not span.error)
        return f" (its steps: {', '.join(names)})" if names else ""

    def _ended(self) -> str:
        """What has ended the script, without its message, left in the record; empty where it came to its end."""
        left = self._exits.left_at()
        # What else has shown an error leaves it there, too.
        raised = None if self._exits.finished else _uncaught()
        here = (Line(id(left), os.path.basename(left.f_code.co_filename), left.f_lineno),) if left is not None else ()
        exit_ = None if self._exits.finished else self._exits.ended
        if raised is not None:
            lines, kept = self._own.raised(raised), id(raised) == self._recorder.failed
            self._put_end(self.failure(raised), lines, time.perf_counter(), kept=kept)
            if self._arrivals is not None:
                self._arrivals.ends(raised)
            return self._kind_and_place(raised)
        # If its line is another one, something else has left the program after this was caught.
        same = not here or self._exits.raised_again or (exit_ is not None and exit_.through in (None, here[0]))
        if exit_ is not None and same:
            return self._exited(exit_, here) if exit_.code else ""
        if not here:
            return ""
        how = f"SystemExit{_at(here)}"
        self._put_end(how, here, time.perf_counter(), kept=False)
        return how

    def _exited(self, exit_: Exit, here: tuple[Line, ...]) -> str:
        lines, last = exit_.lines or here, self._recorder.failed_last
        # Whoever was called from no line of the script has seen what a step was left by.
        kept = exit_.kept or (not exit_.lines and last is not None)
        if kept and last is not None and not exit_.after and not last.error.startswith("exit code "):
            exit_.after = last.error
        how = f"exit code {exit_.code}{_at(lines)}"
        said = _exit_message(how, exit_)
        self._put_end(said, lines, exit_.at, kept=kept)
        if self._arrivals is not None:
            self._arrivals.ends(exit_.after or said)
        return f"{how} after {exit_.after.partition(': ')[0]}" if exit_.after else how

    def _put_end(self, error: str, lines: tuple[Line, ...], at: float, *, kept: bool) -> None:
        """Leave what has ended the script in the step that it has ended; where that is `kept`, it is there."""
        recorder = self._recorder
        if kept:
            recorder.ended = recorder.failed_last
        else:
            self._between.ends(Moment(time.perf_counter(), time.thread_time(), lines), error)
            recorder.ends(error, at)

    def failure(self, raised: BaseException) -> str:
        """An exception in one line: `ValueError at train.py:3: its message`."""
        if isinstance(raised, SystemExit):
            found = self._follow(raised)
            if found is not None:
                found.kept = True
                return _exit_message(f"exit code {found.code}{_at(found.lines)}", found)
        try:
            return _message(self._kind_and_place(raised), str(raised))
        except Exception:
            # Theirs, asked for its text. The one that is being looked at goes on.
            return type(raised).__name__

    def _kind_and_place(self, raised: BaseException) -> str:
        # What has not come up to the script yet will do so where that is now.
        lines = self._own.raised(raised) or self._own.now().lines
        return f"{type(raised).__name__}{_at(lines)}"

    @contextmanager
    def _fail_safe(self) -> Iterator[None]:
        """An exception ends the recording, not the job."""
        try:
            yield
        except Exception as error:
            self._done = True
            with suppress(Exception):
                self._recorder.close()
                self._watching.close()
                if self._optimizing is not None:
                    self._optimizing.end()
            self._hooks.take_out()
            logging.getLogger("initopt").warning(
                "recording into %s stopped, the job goes on: %s: %s", self._root, type(error).__name__, error
            )


class _Found(Recorder):
    """The recorder of a watched process, which learns from its steps where the time between them is."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self.in_last_step = False
        """Whether a block with the name of the step that ends the start-up is running."""
        self.failed = 0
        """The last exception that has ended a step, by its `id`."""
        self.failed_last: Ended | None = None
        """What it was, and the innermost step that it has ended."""
        self.ended: Ended | None = None
        """What has ended the script."""
        super().__init__(watched.name, mode=watched.mode, root=watched.root)
        self._end = watched.until or FIRST_STEP
        if self._imports is not None:
            self._imports.step_here = lambda: (self.step_here() or watched.step_of_imports(), self._lane())

    def _begin(self, entered: float) -> None:
        """When the imports end is known later."""

    def imports_ended(self, at: float, cpu: float) -> None:
        """Write the imports, which ended at this `time.perf_counter` after so many CPU seconds."""
        self._write(Span("imports", 0.0, at - self._zero, kind="import", cpu=cpu), time.thread_time())

    @contextmanager
    def span(self, name: str, *, lane: str | None = None, stage: str | None = None) -> Iterator[None]:
        """Record the block as a step, and the time before it as another one."""
        watched = self._watched
        if not watched.here():
            yield
            return
        if name == self._end and self.in_last_step:
            yield
            return
        in_main = threading.current_thread() is threading.main_thread()
        outermost = in_main and not self.step_here()
        if outermost:
            watched.step_begins()
        if in_main:
            watched.main_step_begins(name)
        self.in_last_step |= name == self._end
        error: BaseException | None = None
        try:
            with super().span(name, lane=lane, stage=stage):
                yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if in_main:
                watched.main_step_ended(error)
            error = None
            self.in_last_step &= name != self._end
            if outermost:
                watched.step_ended()
            if name == _DMP:
                watched.sharded()
        if name == self._end:
            watched.named_end()

    def _failure(self, raised: BaseException) -> str:
        said = self._watched.failure(raised)
        if self.failed != id(raised) or self.failed_last is None:
            self.failed, self.failed_last = id(raised), Ended(said, self.now(), self.step_here())
        return said

    def ends(self, error: str, at: float) -> None:
        """Say what has ended the script at this `time.perf_counter`, outside of a step."""
        self.ended = Ended(error, at - self._zero)

    def _trailer(self) -> Trailer:
        return replace(super()._trailer(), ended=self.ended)

    def step_seen(self, name: str, start: Moment, end: Moment, stage: str | None, error: str = "") -> None:
        """Write a step of this thread that is over."""
        entered = time.thread_time()
        began, ended = start.time - self._zero, end.time - self._zero
        cpu = end.cpu - start.cpu
        span = Span(name, began, ended, lane=self._lane(), stage=stage, cpu=cpu, step=self.step_here(), error=error)
        self._write(span, entered)

    def spent(self, seconds: float) -> None:
        """Count CPU seconds as the recorder's own cost."""
        with self._lock:
            self._own_cost += seconds

    def usage(self, usage: Usage) -> None:
        """Say anew what was used until the first training step had ended."""
        self._write(usage, time.thread_time())


def _places(target: Any) -> set[int]:
    """Where the memory of tensors is that a module, an optimizer or a state has: a state shares it with parameters.

    Tensors of other classes than torch's own are left out: asking them may do anything.
    """
    if hasattr(target, "param_groups"):
        return {place for group in target.param_groups for tensor in group["params"] for place in _places(tensor)}
    if hasattr(target, "parameters"):
        return {place for tensor in target.parameters() for place in _places(tensor)}
    if isinstance(target, dict):
        return {place for value in target.values() for place in _places(value)}
    torch: Any = sys.modules["torch"]
    if type(target) in (torch.Tensor, torch.nn.Parameter):
        return {target.data_ptr()} - {0}
    return set()


def _message(what: str, said: str) -> str:
    """With the first line of a message, if there is any."""
    said = next(iter(said.splitlines()), "")
    said = f"{said[:_MESSAGE]}..." if len(said) > _MESSAGE else said
    return f"{what}{f': {said}' if said else ''}"


def _exit_message(how: str, exit_: Exit) -> str:
    return f"{how} after {exit_.after}" if exit_.after and not exit_.words else _message(how, exit_.words)


def _at(lines: tuple[Line, ...]) -> str:
    return f" at {lines[-1].file}:{lines[-1].number}" if lines else ""


def _uncaught() -> BaseException | None:
    """The exception that has ended the script, None where it ended otherwise. The interpreter leaves it there."""
    found = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found if isinstance(found, BaseException) else None


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    # A progress bar leaves its line open. It knows how to make room, but does so on stdout, too.
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    files = [getattr(bar.fp, "_wrapped", bar.fp) for bar in list(getattr(bars, "_instances", None) or ())]
    write = bars.write if files and bars is not None and all(file is sys.stderr for file in files) else print
    write(f"initopt: {text}", file=sys.stderr)


def _nobody(_: object) -> None:
    """Who is told of imports once nothing is watched."""
