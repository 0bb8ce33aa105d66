"""A finished start-up as OpenTelemetry spans, handed to the tracer provider that the trainer has set up.

Each rank hands on its own spans: one for the start-up, its steps below it, their collectives below them. Where no
tracer provider is set there is nothing to do; initopt sets none, so where the spans go stays the trainer's business.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from initopt.plugins import hookimpl

if TYPE_CHECKING:
    from initopt import Run


@hookimpl
def initopt_run_ended(path: Path) -> None:
    """Export this process's part of the run in `path`. A run that can't be read costs the export and one warning."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    from initopt import Run

    try:
        run = Run.load(path)
    except ValueError as error:
        logging.getLogger("initopt").warning("no OpenTelemetry spans of this start-up: %s", error)
        return
    me = (platform.node(), os.getpid())
    for rank, header in run.headers.items():
        if (header.host, header.pid) == me:
            _export(run, rank)


def _export(run: Run, rank: int) -> None:
    from opentelemetry import trace

    tracer = trace.get_tracer_provider().get_tracer("initopt")
    header = run.headers[rank]
    spans = run.of_rank(rank)
    zero = header.process_start - run.zero[rank]
    root = tracer.start_span(
        f"start-up {header.job}",
        context=trace.set_span_in_context(trace.INVALID_SPAN),
        start_time=_nanoseconds(header.process_start),
        attributes={
            "initopt.run": run.name,
            "initopt.mode": header.mode,
            "initopt.rank": rank,
            "initopt.world_size": header.world_size,
            "initopt.labels": header.labels,
        },
    )
    contexts = {"": trace.set_span_in_context(root)}
    # An outer step starts before what is inside it, and at the same moment it is the longer one.
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        exported = tracer.start_span(
            span.name,
            context=contexts.get(span.step, contexts[""]),
            start_time=_nanoseconds(zero + span.start),
            attributes={
                f"initopt.{name}": value
                for name in ("lane", "kind", "stage", "wait", "cpu", "op", "group", "bytes", "call_site")
                if (value := getattr(span, name)) not in (None, "")
            },
        )
        if span.error:
            exported.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        if span.kind in ("import", "step"):
            contexts[span.name] = trace.set_span_in_context(exported)
        exported.end(_nanoseconds(zero + span.end))
    root.end(_nanoseconds(zero + max((span.end for span in spans), default=run.zero[rank])))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
