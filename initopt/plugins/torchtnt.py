"""The torchtnt callback: the steps of a start-up by `torchtnt.framework.train` or `fit`, up to the first training step.

    fit(unit, train_dataloader=..., eval_dataloader=..., callbacks=[StartUp()])

It only says names. They go to `python -m initopt.run`, or to the script's own `initopt.Recorder`; without one it does
nothing. Tested with torchtnt 0.2.4, whose import needs `pkg_resources`: setuptools 80 has it, 84 has not.
"""

from __future__ import annotations

from typing import Any

import torchtnt
from torchtnt.framework.callback import Callback

import initopt
from initopt.plugins import Phases

VERSIONS = ("0.2.4",)


class StartUp(Callback):
    """Names the steps `first_batch`, `first_step` and, where one comes earlier, `evaluation`.

    `first_batch` begins with the first epoch and is over when the batch is there; torchtnt calls nobody between making
    the loader's iterator and asking it. `first_step` is the first `train_step`. Of a unit that accumulates gradients,
    as an AutoUnit does, it is all that the first update of the weights takes.
    """

    def __init__(self) -> None:
        self._phases = Phases("torchtnt", torchtnt.__version__, VERSIONS)

    def on_train_epoch_start(self, state: Any, unit: Any) -> None:
        """The loader is asked next."""
        if not self._phases.over:
            self._phases.begin("first_batch", "get_first_batch_data")

    def on_train_get_next_batch_end(self, state: Any, unit: Any) -> None:
        """The loader has given a batch."""
        if self._phases.name == "first_batch":
            self._phases.end()

    def on_train_step_start(self, state: Any, unit: Any) -> None:
        """A batch is trained next."""
        if not self._phases.over and not self._phases.name:
            self._phases.begin(initopt.FIRST_STEP, "get_first_batch_data")

    def on_train_step_end(self, state: Any, unit: Any) -> None:
        """A batch was trained."""
        if not self._phases.over:
            accumulated = getattr(unit, "gradient_accumulation_steps", 1)
            if unit.train_progress.num_steps_completed_in_epoch % accumulated == 0:
                self._phases.end()

    def on_train_epoch_end(self, state: Any, unit: Any) -> None:
        """An epoch is over, and with its last batch an AutoUnit has updated the weights."""
        self._phases.end()

    def on_eval_start(self, state: Any, unit: Any) -> None:
        """An evaluation begins."""
        if not self._phases.over and not self._phases.name:
            self._phases.begin("evaluation", "pre_train")

    def on_eval_end(self, state: Any, unit: Any) -> None:
        """It has ended."""
        if self._phases.name == "evaluation":
            self._phases.end()

    def on_exception(self, state: Any, unit: Any, exc: BaseException) -> None:
        """The step that is under way has failed."""
        self._phases.end(exc)
