"""The OpenTelemetry plugin: what reaches the trainer's tracer provider after a start-up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from initopt import Recorder
from initopt.plugins import otel
from initopt.record import Span


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


DAY = 86_400.0
"""Seconds. Later than the recorder's own span of the imports, which ends with the age of this process."""


def record(root: Path, *spans: Span) -> Path:
    recorder = Recorder("dlrm", mode="overlap", root=root)
    for span in spans:
        recorder.add(span)
    recorder.agree(0, 1)
    recorder.close()
    assert recorder.path is not None
    return recorder.path


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_steps_and_their_collectives_become_spans(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    path = record(
        tmp_path,
        Span("shard", DAY + 100.0, DAY + 104.0, lane="comms"),
        Span(
            "all_reduce",
            DAY + 101.0,
            DAY + 103.5,
            kind="collective",
            step="shard",
            op="all_reduce",
            group="world",
            bytes=8,
        ),
        Span("first_step", DAY + 104.0, DAY + 105.0, error="ValueError"),
    )
    otel.initopt_run_ended(path)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"start-up dlrm", "imports", "shard", "all_reduce", "first_step"}
    root, shard, meeting = spans["start-up dlrm"], spans["shard"], spans["all_reduce"]
    assert root.parent is None
    assert shard.parent == root.context
    assert meeting.parent == shard.context
    assert seconds(root) == pytest.approx(DAY + 105.0)
    assert seconds(meeting) == pytest.approx(2.5)
    assert shard.start_time is not None and root.start_time is not None
    assert (shard.start_time - root.start_time) / 1e9 == pytest.approx(DAY + 100.0)
    assert meeting.attributes is not None and shard.attributes is not None
    assert meeting.attributes["initopt.bytes"] == 8
    assert shard.attributes["initopt.lane"] == "comms"
    assert spans["first_step"].status.description == "ValueError"


def test_without_a_tracer_provider_the_run_is_not_even_read(tmp_path: Path) -> None:
    otel.initopt_run_ended(tmp_path / "no such run")


def test_a_broken_run_costs_the_export_only(
    tmp_path: Path, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    path = record(tmp_path)
    (path / "rank00000.jsonl").write_text("{}\n")
    with caplog.at_level(logging.WARNING, "initopt"):
        otel.initopt_run_ended(path)
    assert "rank00000.jsonl line 1" in caplog.text
    assert exporter.get_finished_spans() == ()


def test_another_process_of_the_run_exports_for_itself(
    tmp_path: Path, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path)
    monkeypatch.setattr("os.getpid", lambda: 1)
    otel.initopt_run_ended(path)
    assert exporter.get_finished_spans() == ()
