"""What must happen before the first batch: steps, what each needs, what each touches.

A graph holds data only, never functions, so it can be saved, compared and drawn without the trainer's code. It does not
know how long a step takes (see `record`) nor when it starts (see `overlap`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

STAGES = (
    "device_init",
    "process_group_init",
    "preproc_creation",
    "train_module_creation",
    "init_plugins",
    "pre_train",
    "get_first_batch_data",
)
"""The seven stages of a trainer's initialization, in the order of Meta's effective-training-time work."""

EdgeKind = Literal["value", "order", "resource"]


class GraphError(ValueError):
    """A graph that can't be run. The message names the step and the way out."""


class OrderError(GraphError):
    """Two steps whose order would depend on timing."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A meeting of the ranks of one process group that a step is known to hold.

    `bytes` is the payload per rank, `call_site` is `file:line`.
    """

    op: str
    group: str = "world"
    bytes: int = 0
    call_site: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A named piece of start-up.

    `needs` are the steps (or inputs of the run) whose values it takes, `after` are steps it only follows. `lane` is the
    thread it runs on, `uses` are the exclusive resources it touches (`rng`, `comms`, `cuda:0`; `fork` shuts out every other
    step while it runs). `timeout` is in seconds. `origin` says who declared it: program order is known only among the steps
    of one origin. `call_site` is `file:line` of its definition.
    """

    name: str
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    lane: str = "main"
    uses: tuple[str, ...] = ()
    stage: str | None = None
    timeout: float | None = None
    collectives: tuple[Collective, ...] = ()
    origin: str = ""
    call_site: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """`before` ends before `after` starts: for its value, for a stated order, or for the `resource` that both touch."""

    before: str
    after: str
    kind: EdgeKind
    resource: str = ""
