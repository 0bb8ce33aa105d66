"""The Lightning callback: the steps of a start-up by `Trainer.fit`, up to the first training step.

    lightning.Trainer(..., callbacks=[StartUp()]).fit(model)

It only says names. They go to `python -m initopt.run`, or to the script's own `initopt.Recorder`; without one it does
nothing. It serves both names of the library, `lightning.pytorch` and `pytorch_lightning`, whose classes are different
ones: it becomes a callback of the one that the process has imported. Tested with 2.5.6, 2.6.0 and 2.6.6.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import initopt
from initopt.plugins import Phases

VERSIONS = ("2.5.", "2.6.")


class StartUp:
    """Names the steps `setup`, `sanity_check`, `train_loader`, `first_batch` and `first_step`.

    `setup` is that of module and strategy: configuring the model, moving and wrapping it, its optimizers. The sanity
    check's validation is no training step. `train_loader` is what comes after the check, or after `setup` where there
    is none, up to the start of training: the loader is made and its workers start. `first_step` ends with the first
    batch after which an optimizer has stepped, so it may be several batches long.
    """

    _version: str
    """That of the library."""

    def __new__(cls) -> Any:
        """Return a callback of the Lightning that is imported; of `lightning.pytorch` if none or both are."""
        only = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
        return object.__new__(_callback("pytorch_lightning" if only else "lightning.pytorch"))

    def __init__(self) -> None:
        self._phases = Phases("Lightning", self._version, VERSIONS)
        self._steps = 0

    def __reduce__(self) -> Any:
        # Ranks that are spawned get it pickled, and find its own class under no name.
        return StartUp, ()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The model is set up next, by its own `setup` and by the strategy."""
        if stage == "fit" and not self._phases.over:
            self._phases.begin("setup", "train_module_creation")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has set up the model."""
        if not self._phases.over:
            self._phases.end()
            if not (trainer.enable_validation and trainer.num_sanity_val_steps):
                self._phases.begin("train_loader", "preproc_creation")

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Some batches are validated next, before any training."""
        if not self._phases.over:
            self._phases.begin("sanity_check", "pre_train")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """They were."""
        if not self._phases.over:
            self._phases.begin("train_loader", "preproc_creation")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The first batch is asked for next."""
        if not self._phases.over:
            self._phases.begin("first_batch", "get_first_batch_data")
            self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch is trained next."""
        if not self._phases.over and self._phases.name != initopt.FIRST_STEP:
            self._phases.begin(initopt.FIRST_STEP, "get_first_batch_data")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch was trained; `global_step` counts the optimizers' steps."""
        if not self._phases.over and trainer.global_step > self._steps:
            self._phases.end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over, if there was any."""
        if not self._phases.over:
            self._phases.end(NoOptimizerStep())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The step that is under way has failed."""
        self._phases.end(exception)


class NoOptimizerStep(Exception):
    """Training was over before an optimizer had stepped. It is never raised: the record says so of that step."""


@cache
def _callback(library: str) -> type:
    """`StartUp` as a callback of `library`."""
    module = import_module(library)
    return type("StartUp", (StartUp, module.Callback), {"__doc__": StartUp.__doc__, "_version": module.__version__})
