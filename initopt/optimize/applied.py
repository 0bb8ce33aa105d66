"""Applies the optimizations to one process: which one acts at which entry point, from its start to its first step.

Watching hooks the entry points (see `entry_points`); this says what is called in their place. Where an optimization
can't act what was there is called, as it was.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from initopt.entry_points import Event
from initopt.hooks import drop_own_frames
from initopt.optimizations import NAMES, TABLE, enabled
from initopt.optimize import arrivals
from initopt.optimize.arrivals import Arrivals
from initopt.optimize.compiled import CompiledOnce
from initopt.optimize.eliminate import eliminate
from initopt.optimize.garbage import Garbage
from initopt.optimize.loaders import Loaders
from initopt.optimize.plan import Plan, explained
from initopt.optimize.rendezvous import EarlyStore
from initopt.optimize.saying import Saying
from initopt.optimize.tables import filled_once
from initopt.optimize.together import Together

_COMPILES = "torch._dynamo.callback"
"""The module that tells of compiles."""

_TORCHREC = "1.9."
_AT_DMP = {
    "plan": ("initopt.sharding_plan",),
    "eliminate": ("initopt.comm_elim.elimination", "initopt.comm_elim.default_plan"),
    "fill-once": ("initopt.table_init.fill_once",),
}
"""What an optimization imports when it acts: a process that makes no DistributedModelParallel needs none of it."""

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def import_ahead(names: Sequence[str]) -> None:
    """Import what these optimizations will import at a DistributedModelParallel, where TorchRec has been imported."""
    if "torchrec.distributed.model_parallel" in sys.modules:
        for name in enabled(names):
            for module in _AT_DMP.get(name, ()):
                importlib.import_module(module)


class Optimizing:
    """The optimizations of this process.

    `names` are those that were asked for, `script` is what the job is called, `root` where its runs are kept.
    With `is_script` this process is the one that was started, and not one that it has started.
    """

    def __init__(self, names: Sequence[str], script: str, root: str, saying: Saying, *, is_script: bool) -> None:
        self._asked = names
        self._on = enabled(names)
        self._saying = saying
        self._together = Together([one.name for one in TABLE if one.together and one.name in self._on])
        self._plan = Plan(self._together, saying)
        self._loaders = Loaders(saying)
        self._here = threading.local()
        self._compiled = CompiledOnce(script, root, saying) if "compile" in self._on else None
        early = "rendezvous" in self._on and is_script
        self._early = EarlyStore(saying) if early else None
        self._garbage = Garbage(saying) if "gc" in self._on else None
        at_meetings = [name for name in arrivals.NAMES if name in self._on]
        self.arrivals = Arrivals(at_meetings, self._together, saying) if at_meetings else None
        """Who comes to meetings, None where that is nobody's business."""

    def outermost_import(self, begins: bool) -> None:
        """The main thread begins to import what is not the trainer's own, or has ended that."""
        if self._garbage is not None:
            self._garbage.outermost_import(begins)

    def imports_ended(self) -> None:
        """The program goes on from its imports to something else."""
        if self._garbage is not None:
            self._garbage.imports_ended()

    def wants(self, module: str) -> bool:
        """Whether something may begin when this module was imported."""
        return module in ("torch", _COMPILES)

    def imported(self, module: str) -> None:
        """It was: begin."""
        if self._early is not None and module == "torch":
            with self._saying.costs_only("rendezvous"):
                self._early.begin()
        if self._compiled is not None and module == _COMPILES:
            with self._saying.costs_only("compile"):
                self._compiled.watch(sys.modules[module])

    def joined(self) -> None:
        """The default process group was made."""
        with self._saying.costs_only("eliminate"):
            if self.arrivals is not None:
                self.arrivals.joined()
            self._together.joined()

    def instead(self, event: Event, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called at an entry point in place of `function`."""
        if event in ("plan", "dmp") and self._is_another_torchrec():
            return function
        if event == "plan" and "plan" in self._on:
            return _clean(self._plan.instead(function))
        if (
            event == "dmp"
            and {"eliminate", "fill-once", "plan"} & set(self._on)
            and not getattr(self._here, "in_dmp", False)
        ):
            return _clean(functools.partial(self._dmp, function.__qualname__.partition(".")[0]))
        if event == "rendezvous" and self._early is not None:
            return self._early.instead(function)
        return function

    def _is_another_torchrec(self) -> bool:
        """Whether TorchRec is recorded, but not known well enough to change what it does, which is said then."""
        version = str(getattr(sys.modules.get("torchrec.version"), "__version__", _TORCHREC))
        if version.startswith(_TORCHREC):
            return False
        for name in _AT_DMP:
            if name in self._on:
                self._saying.never(name, f"torchrec {version} is not what was tested ({_TORCHREC}*)")
        return True

    def loader_made(self, loader: Any, at: float) -> None:
        """A data loader was made, `at` this `time.perf_counter`."""
        self._loaders.made(loader, at)

    def loader_begins(self, loader: Any, at: float) -> None:
        """It is asked for an iterator."""
        self._loaders.begins(loader, at)

    def first_batch(self, iterator: Any, seconds: float, step: str) -> None:
        """An iterator has given its first batch, after so many seconds, in the outermost step `step`."""
        self._loaders.first_batch(iterator, seconds, step)

    def trained(self) -> None:
        """The first training step is over: keep what the next start can use, and say what was not used."""
        if self._compiled is not None:
            with self._saying.costs_only("compile"):
                self._compiled.keep()
        early = "the job's store is not torchrun's, or no process group was made of it"
        late = "only a rank that torchrun has started itself reaches the job's store early"
        unused = {
            "plan": "no sharding planner made a plan",
            "eliminate": "no DistributedModelParallel was made",
            "fill-once": "no DistributedModelParallel was made",
            "compile": "nothing was compiled before the first training step had ended",
            "gc": "the script has set the collector's thresholds",
            "rendezvous": early if self._early is not None else late,
        }
        for name in NAMES:
            if name in self._on:
                # Of those that act when something goes wrong there is nothing to say where nothing does.
                if name in unused:
                    self._saying.never(name, unused[name])
            else:
                asked = name in self._asked
                self._saying.never(name, "INITOPT_DISABLE names it" if asked else f"--no-{name}")

    def end(self) -> None:
        """Take out what this has put anywhere."""
        if self._compiled is not None:
            self._compiled.end()
        if self._early is not None:
            self._early.end()
        if self._garbage is not None:
            self._garbage.end()
        if self.arrivals is not None:
            self.arrivals.over()

    def _dmp(self, kind: str, *args: Any, **kwargs: Any) -> None:
        """Make one of the kind, which is the name of a class of TorchRec."""
        parallel = sys.modules["torchrec.distributed.model_parallel"]
        self._here.in_dmp = True
        try:
            with ExitStack() as stack:
                if "plan" in self._on:
                    stack.enter_context(explained(getattr(parallel, kind), *args, **kwargs))
                if "fill-once" in self._on:
                    with self._saying.costs_only("fill-once"):
                        stack.enter_context(filled_once(self._saying))
                if "eliminate" in self._on:
                    self._enter_eliminate(stack)
                # Looked up anew: the blocks have put something in its place.
                getattr(parallel, kind).__init__(*args, **kwargs)
        finally:
            self._here.in_dmp = False

    def _enter_eliminate(self, stack: ExitStack) -> None:
        """Enter its block. Where only this rank can't, the others would wait for it: that is an error."""
        try:
            stack.enter_context(eliminate(self._together, self._saying, plan="plan" in self._on))
        except Exception:
            if not self._together.all_fail("eliminate"):
                raise
            with self._saying.costs_only("eliminate"):
                raise


def _clean(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose own frames are in no traceback of what the script or a library raises in it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as raised:
            drop_own_frames(raised, _FOLDER)
            raise

    return call
