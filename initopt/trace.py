"""One start-up as Chrome trace JSON, which Perfetto and chrome://tracing open: all ranks, lanes, meetings, needs.

A host is a process, a rank's lane a thread; arrows are the values and orders that steps needed; one process more shows
the chain that decided, across ranks. It opens beside a trace of the torch profiler, but shares no clock with it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from initopt.chain import critical_chain, finished_ranks, steps_of
from initopt.report import labels, title

if TYPE_CHECKING:
    from initopt.record import Compiled, Span
    from initopt.runs import Run

_LANES = 1000
"""Thread numbers per rank: above the lanes that a start-up has."""


def chrome_trace(run: Run) -> dict[str, Any]:
    """The trace as a JSON value. Its times are microseconds from the first process start of any rank."""
    hosts = list(dict.fromkeys(header.host for header in run.headers.values()))
    events: list[dict[str, Any]] = []
    for number, host in enumerate(hosts, 1):
        events += _named("process", number, 0, f"host {host}")
    for rank, header in run.headers.items():
        process = hosts.index(header.host) + 1
        steps = {span.name: span.lane for span in steps_of(run, rank)}
        # A collective is drawn inside its step, whatever the name of the thread that made the call.
        spans = [replace(span, lane=steps.get(span.step, span.lane)) for span in run.of_rank(rank)]
        lanes = list(dict.fromkeys(span.lane for span in spans))
        threads = {lane: rank * _LANES + place for place, lane in enumerate(lanes, 1)}
        for lane, thread in threads.items():
            events += _named("thread", process, thread, f"rank {rank} {lane}")
        turns = {(one.name, one.start): _turn(one) for one in run.compiled if one.rank == rank}
        for span in spans:
            more = turns.get((span.name, span.start), {}) if span.kind == "compile" else {}
            events.append(_slice(span, process, threads[span.lane], more))
        events += _arrows(run, rank, process, threads)
    if finished_ranks(run):
        events += _named("process", 0, 0, "longest chain")
        for link in reversed(critical_chain(run)):
            about = {"rank": link.rank, "wait": link.wait, "waited_for": link.waited_for, "queue": link.queue}
            events.append(
                {
                    "name": f"{link.step} (rank {link.rank})",
                    "cat": "chain",
                    "ph": "X",
                    "pid": 0,
                    "tid": 0,
                    "ts": _micro(link.joined),
                    "dur": _micro(link.start + link.took - link.joined),
                    "args": {**about, "behind": list(link.behind)},
                }
            )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title(run), "labels": list(labels(run)), "warnings": list(run.warnings)},
    }


def encode(run: Run, *, compressed: bool = False) -> bytes:
    """The trace as a file, always the same bytes for the same run."""
    text = json.dumps(chrome_trace(run), separators=(",", ":")).encode()
    return gzip.compress(text, mtime=0) if compressed else text


def _arrows(run: Run, rank: int, process: int, threads: dict[str, int]) -> list[dict[str, Any]]:
    if run.graph is None:
        return []
    steps = {span.name: span for span in steps_of(run, rank)}
    events = []
    for number, edge in enumerate(run.graph.edges):
        before, after = steps.get(edge.before), steps.get(edge.after)
        if edge.kind == "resource" or before is None or after is None:
            continue
        known = {"name": edge.kind, "cat": "needs", "pid": process, "id": f"{rank}.{number}"}
        # An arrow starts and ends inside the slices it joins, so it leaves just before the end of the first.
        leaves = max(before.start, before.end - 1e-6)
        events.append({**known, "ph": "s", "tid": threads[before.lane], "ts": _micro(leaves)})
        events.append({**known, "ph": "f", "bp": "e", "tid": threads[after.lane], "ts": _micro(after.start)})
    return events


def _turn(one: Compiled) -> dict[str, Any]:
    """What a turn of the compiler has to say beside its times."""
    known = asdict(one)
    return {name: known[name] for name in known if name not in ("name", "start", "end", "rank", "lane", "step")}


def _slice(span: Span, process: int, thread: int, more: Mapping[str, Any]) -> dict[str, Any]:
    about = {
        "work": span.end - span.start - span.wait,
        "wait": span.wait,
        "stage": span.stage,
        "group": span.group,
        "bytes": span.bytes,
        "call_site": span.call_site,
        "error": span.error,
        **more,
    }
    return {
        "name": span.name,
        "cat": span.kind,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": _micro(span.start),
        "dur": _micro(span.end - span.start),
        "args": {
            key: value for key, value in about.items() if value not in (None, "", ()) and (key != "bytes" or value)
        },
    }


def _named(what: str, process: int, thread: int, name: str) -> list[dict[str, Any]]:
    return [{"name": f"{what}_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}]


def _micro(time: float) -> float:
    return round(1e6 * time, 3)
