"""What every rank did between process start and the end of its first training step: spans, files, aligned clocks.

A recorded span and a simulated one are the same type, so that every view works on both. This file does not know what the
spans mean for the start-up (see `chain`) nor how they are shown (see `report`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["import", "step", "collective"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something with a start and an end, on one lane of one rank. Times are seconds.

    In a rank's file time zero is the start of that worker's process; in a loaded `Run` it is the earliest process start of
    all ranks. `wait` is the part of the span spent for ranks that came later (known once ranks are matched), `cpu` the CPU
    seconds of the thread. For a collective `step` is the step that issued it and `sequence` its number on its group.
    """

    name: str
    start: float
    end: float
    rank: int = 0
    lane: str = "main"
    kind: SpanKind = "step"
    stage: str | None = None
    wait: float = 0.0
    cpu: float = 0.0
    step: str = ""
    op: str = ""
    group: str = ""
    sequence: int = -1
    bytes: int = 0
    call_site: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Header:
    """Who recorded, where and with what. One per rank, the first line of its file.

    `process_start` is unix time in seconds. `mode` is `stock`, `serial` or `overlap`. `labels` go with every number made
    from this run (for example `emulated: reader latency 4 s`).
    """

    rank: int
    world_size: int
    job: str
    mode: str
    host: str
    pid: int
    process_start: float
    cores: int
    labels: tuple[str, ...] = ()
    commit: str = ""
    versions: dict[str, str] | None = None
    format: int = 1
