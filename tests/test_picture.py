"""What the picture shows, read from its data and from the file it writes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from initopt import picture
from initopt.chain import split
from initopt.record import Span
from initopt.runs import Run
from tests.synthetic import overlapped_spans, serial_spans, wasteful, write_run
from tests.test_html_report import chromium  # noqa: F401  a fixture


@pytest.fixture
def serial(tmp_path: Path) -> Run:
    return Run.load(write_run(tmp_path, serial_spans(), labels=("emulated: reader first batch 5 s",)))


@pytest.fixture
def overlapped(tmp_path: Path) -> Run:
    return Run.load(write_run(tmp_path, overlapped_spans(), number=8, mode="overlap"))


def test_recorded_above_planned_on_the_same_rank(serial: Run) -> None:
    recorded, planned = picture.panels(serial, 1)
    assert (recorded.name, planned.name) == ("recorded", "planned")
    assert recorded.first_batch == pytest.approx(serial.first_batch(1))
    assert planned.first_batch == pytest.approx(3.2 + 2.0 + 4.0 + 0.5)
    assert recorded.lanes == ("main",)
    assert planned.lanes == ("main", "comms", "process:compile", "io:data")


def test_a_run_without_a_graph_has_no_plan(tmp_path: Path) -> None:
    run = Run.load(write_run(tmp_path, serial_spans(), graph=None))
    assert [panel.name for panel in picture.panels(run, 0)] == ["recorded"]


def test_the_longest_chain_is_marked(overlapped: Run) -> None:
    recorded = picture.panels(overlapped, 0)[0]
    chain = ["imports", "process_group", "plan", "plan.broadcast", "shard", "optimizer", "first_step"]
    assert [bar.name for bar in recorded.bars if bar.longest] == chain


def test_the_waits_are_where_the_rank_waited(serial: Run) -> None:
    bars = {bar.name: bar for bar in picture.panels(serial, 1)[0].bars}
    waits = bars["plan.broadcast"].waits
    assert len(waits) == 1
    assert waits[0][1] - waits[0][0] == pytest.approx(2.7)
    assert bars["plan.broadcast"].start <= waits[0][0] < waits[0][1] <= bars["plan.broadcast"].end
    assert bars["compile"].waits == ()


def test_the_queue_is_the_one_of_the_summary(serial: Run) -> None:
    queues = picture.panels(serial, 1)[0].queues
    assert sum(queue.end - queue.start for queue in queues) == pytest.approx(split(serial, 1).queue)
    assert [(queue.step, queue.behind) for queue in queues] == [
        ("model", ("process_group", "reader")),
        ("optimizer", ("compile",)),
    ]


def test_times_start_at_the_process_of_the_rank(overlapped: Run) -> None:
    for panel in picture.panels(overlapped, 0):
        assert min(bar.start for bar in panel.bars) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_same_run_gives_the_same_bytes(form: str, serial: Run) -> None:
    drawn = [picture.draw(serial, 1, form=form) for _ in range(2)]  # type: ignore[arg-type]
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"\x89PNG" if form == "png" else b"<?xml")


def test_the_file_names_the_run_and_its_labels(serial: Run) -> None:
    svg = picture.draw(serial, 1).decode()
    for text in ("dlrm", "serial", "3 ranks on 2 hosts", "3f9c2e1", "torch 2.13.0", "emulated: reader first batch 5 s"):
        assert text in svg


def test_every_bar_says_more_under_the_pointer(serial: Run) -> None:
    svg = picture.draw(serial, 1).decode()
    titles = {node.text for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")}
    bars = [bar for panel in picture.panels(serial, 1) for bar in panel.bars]
    assert titles == {bar.about for bar in bars}
    broadcast = next(text for text in titles if text and text.startswith("plan.broadcast: 2.8s"))
    assert "60ms work, 2.7s wait for other ranks" in broadcast
    assert "needs plan" in broadcast
    assert "train.py:45" in broadcast


def test_names_that_are_markup_stay_text(tmp_path: Path) -> None:
    run = Run.load(write_run(tmp_path, [[Span("a<b & $c$", 0, 1), Span("first_step", 1, 2)]], graph=None))
    titles = ElementTree.fromstring(picture.draw(run, 0)).iter("{http://www.w3.org/2000/svg}title")
    assert any(node.text and node.text.startswith("a<b & $c$: 1.0s") for node in titles)


def test_a_start_up_that_stopped_can_be_drawn(tmp_path: Path) -> None:
    run = Run.load(write_run(tmp_path, [[Span("model", 0, 1, error="OSError")]]))
    panels = picture.panels(run, 0)
    assert [panel.first_batch for panel in panels] == [None]
    assert picture.draw(run, 0, form="png").startswith(b"\x89PNG")


def test_many_short_steps_can_be_drawn(tmp_path: Path) -> None:
    spans = [Span(f"step_{number}", number / 100, number / 100 + 0.01) for number in range(60)]
    run = Run.load(write_run(tmp_path, [[*spans, Span("first_step", 0.6, 20.0)]], graph=None))
    assert picture.draw(run, 0, form="png").startswith(b"\x89PNG")


def test_without_matplotlib_the_way_out_is_named(serial: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(picture.PlotError, match=r"pip install 'initopt\[plot\]'"):
        picture.draw(serial, 0)


def test_imports_are_parts_of_their_bar(tmp_path: Path) -> None:
    spans, graph, found = wasteful()
    run = Run.load(write_run(tmp_path, spans, graph=graph, extra=found))
    recorded, planned = picture.panels(run, 1)
    bars = {bar.name: bar for bar in recorded.bars}
    assert [package for _, _, package in bars["imports"].imports] == ["torch", "torchrec"]
    (start, end, _), _ = bars["imports"].imports
    assert 0 < start < end < bars["imports"].end
    assert not any(name.startswith("import ") for name in bars)
    assert not any(bar.imports for bar in planned.bars)
    assert bars["imports"].about.splitlines()[1] == "torch 1.6s, torchrec 1.3s"
    assert "<!-- torch -->" in picture.draw(run, 1).decode()


_TEXTS = """() => {
  const found = [];
  for (const group of document.querySelectorAll('g[id^="text_"]')) {
    const boxes = [...group.querySelectorAll("use")].map((one) => one.getBoundingClientRect()).filter((b) => b.width);
    if (!boxes.length) continue;
    const edge = (side, most) => most(...boxes.map((box) => box[side]));
    found.push([edge("left", Math.min), edge("top", Math.min), edge("right", Math.max), edge("bottom", Math.max)]);
  }
  const page = document.documentElement.getBoundingClientRect();
  return [[page.left, page.top, page.right, page.bottom], found];
}"""


def test_no_text_lies_over_another_or_is_cut_off(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    forty = [Span(f"step number {n}", 3 + n / 10, 3.09 + n / 10, lane=("main", "io:data")[n % 2]) for n in range(40)]
    long = [Span("a", 0, 0.02), Span("b", 0.02, 0.04), Span("x" * 90, 0.04, 1.0), Span("y" * 160, 1, 3, lane="z" * 60)]
    cases = [
        [[Span("imports", 0, 3, kind="import"), *forty, Span("first_step", 7, 7.2)]],
        [[*long, Span("w" * 60, 3, 3.1), Span("first_step", 3.1, 3.15)]],
        [[Span("first_step", 0, 0.05), Span("later", 0.1, 10.0, lane="io:x")]],
        [serial_spans()[rank % 3] for rank in range(8)],
    ]
    tab = chromium.new_page()
    for number, spans in enumerate(cases):
        graph = {} if number == 3 else {"graph": None}
        run = Run.load(write_run(tmp_path, spans, number=number + 1, **graph))  # type: ignore[arg-type]
        file = tmp_path / f"{number}.svg"
        file.write_bytes(picture.draw(run, 0))
        tab.goto(file.as_uri())
        page, texts = tab.evaluate(_TEXTS)
        assert len(texts) > 10
        for left, top, right, bottom in texts:
            assert page[0] <= left and page[1] <= top and right <= page[2] and bottom <= page[3], (number, left, right)
        for one, other in itertools.combinations(texts, 2):
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (number, one, other)
