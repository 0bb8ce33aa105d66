"""The HTML report: what its document holds, that its file is whole and safe, and what a browser makes of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from initopt import cli, picture, report
from initopt.collectives_view import collectives_view
from initopt.graph import Graph, Step
from initopt.html_report import document as documents
from initopt.html_report.document import DRAWN_STEPS, document
from initopt.html_report.page import page
from initopt.record import Advised, Begun, Optimized, Span
from initopt.runs import Run
from tests.synthetic import compiled_spans, overlapped_spans, serial_spans, wasteful, write_run

LABEL = "emulated: 20 ms per collective"
HOSTILE = (
    '</script><script>window.hacked = 1</script><!-- <img src=x onerror="window.hacked = 2"> & \u2028 模型 \U0001f680'
)


def stopping_spans() -> list[list[Span]]:
    """Three ranks of which none reaches its first batch: rank 1 fails in `shard`."""
    spans = [of_rank[:-2] for of_rank in serial_spans()]
    broken = next(number for number, span in enumerate(spans[1]) if span.name == "shard")
    spans[1] = [*spans[1][:broken], replace(spans[1][broken], error="OutOfMemoryError")]
    return spans


def many_steps(count: int) -> tuple[list[Span], Graph]:
    """So many short steps on four lanes, each after the one before on its lane, and the first training step."""
    lanes = ("main", "comms", "io:a", "io:b")
    names = [f"step {number}" for number in range(count)]
    steps, spans = [], []
    for number, name in enumerate(names):
        lane, start = lanes[number % 4], number // 4 / 100
        steps.append(Step(name, lane=lane, needs=(names[number - 4],) if number > 3 else ()))
        spans.append(Span(name, start, start + 0.009, lane=lane))
    spans.append(Span("first_step", spans[-1].end, spans[-1].end + 0.5))
    return spans, Graph([*steps, Step("first_step", needs=(names[-1],))])


def embedded(file: bytes) -> Any:
    """The document that stands in a page."""
    found = re.findall(rb'<script type="application/json" id="data">(.*?)</script>', file, flags=re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def plain(value: Any) -> Any:
    """The value as JSON would give it back."""
    return json.loads(json.dumps(value))


@pytest.fixture
def wasting(tmp_path: Path) -> Run:
    spans, graph, found = wasteful()
    return Run.load(write_run(tmp_path, spans, graph=graph, labels=(LABEL,), extra=found))


def test_the_document_has_what_the_views_have(wasting: Run) -> None:
    found = document(wasting)
    median = found["median_rank"]
    assert found["sentence"] == report.sentence(wasting)
    assert found["labels"] == [LABEL]
    assert found["chain"]["chain"] == report.chain_view(wasting).data["chain"]
    assert [one["name"] for one in found["collectives"]["findings"]] == [
        one["name"] for one in collectives_view(wasting).data["findings"]
    ]
    assert found["defer"]["findings"] == report.defer_view(wasting).data["findings"]
    assert found["imports"]["packages"] == report.imports_view(wasting).data["packages"]
    lanes = found["lanes"][str(median)]
    for shown, panel in zip(lanes["panels"], picture.panels(wasting, median), strict=True):
        assert [(bar["name"], bar["start"], bar["end"]) for bar in shown["bars"]] == [
            (bar.name, bar.start, bar.end) for bar in panel.bars
        ]
    assert [row["step"] for row in lanes["steps"]] == [row.step for row in report.blame_rows(wasting, median)]
    assert [step["name"] for step in found["graph"]["steps"]] == list(wasting.graph.order() if wasting.graph else ())


def test_what_was_compiled_is_there(tmp_path: Path) -> None:
    spans, compiles = compiled_spans()
    run = Run.load(write_run(tmp_path, spans, compiles=compiles))
    assert document(run)["compile"]["graphs"] == report.compile_view(run).data["graphs"]


def test_ranks_are_slowest_first_and_say_where_they_differ(tmp_path: Path) -> None:
    path = write_run(tmp_path, overlapped_spans())
    odd = path / "rank00002.jsonl"
    odd.write_text(odd.read_text().replace('"torch": "2.13.0"', '"torch": "2.12.0"', 1))
    rows = document(Run.load(path))["ranks"]
    assert [row["first_batch"] for row in rows] == sorted((row["first_batch"] for row in rows), reverse=True)
    by_rank = {row["rank"]: row for row in rows}
    assert by_rank[2]["odd"] == ["torch 2.12.0, not 2.13.0"]
    assert by_rank[0]["odd"] == []
    name, by = by_rank[0]["differs"][0]
    assert (name, by) == ("plan", pytest.approx(2.9))


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.load(write_run(tmp_path, serial_spans()))
    everybody = document(run)
    assert set(everybody["lanes"]) == {"0", "1", "2"}
    monkeypatch.setattr(documents, "_BARS", 1)
    found = document(run)
    assert list(found["lanes"]) == [str(found["median_rank"])]
    assert any(text.startswith("lanes and steps of 2 ranks (0, 2)") for text in found["left_out"])


def test_the_file_is_whole_and_names_the_digests_of_all_that_it_runs(wasting: Run) -> None:
    found = document(wasting)
    file = page(found)
    assert file == page(document(wasting))
    assert embedded(file) == plain(found)
    text = file.decode()
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    assert "unsafe" not in policy[1]
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    for part in (style, script):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" in policy[1]


def test_names_of_a_run_end_no_element(tmp_path: Path) -> None:
    spans = [Span(HOSTILE, 0, 1, call_site=HOSTILE), Span("first_step", 1, 2)]
    run = Run.load(write_run(tmp_path, [[*spans]], graph=None, labels=(HOSTILE,)))
    found = document(run)
    found["title"] = HOSTILE
    file = page(found)
    assert embedded(file) == plain(found)
    assert file.count(b"<script") == file.count(b"</script") == 2
    assert b"<img" not in file and b"<!--" not in file


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / ".initopt", serial_spans(), number=7)
    return tmp_path / ".initopt"


def run_cli(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_writes_the_page(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("report", "--html", "run.html") == 0
    assert capsys.readouterr() == ("", "initopt: wrote run.html\n")
    assert embedded(Path("run.html").read_bytes())["run"] == 7
    assert run_cli("report", "7", "--json") == 0
    assert json.loads(capsys.readouterr().out) == embedded(Path("run.html").read_bytes())


def test_a_start_up_that_stopped_gets_a_page_and_exit_code_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root, stopping_spans(), number=9, world_size=8)
    assert run_cli("report", "--html", "run.html") == 1
    assert capsys.readouterr().err == "initopt: wrote run.html\ninitopt: no rank reached its first batch\n"
    found = embedded(Path("run.html").read_bytes())
    assert found["sentence"] is None
    assert found["missing"] == "3-7"
    assert found["shown_rank"] == found["ranks"][0]["rank"] == 1
    assert found["ranks"][0]["stopped"]["error"] == "OutOfMemoryError"


def test_half_of_a_record_is_said(root: Path) -> None:
    file = root / "0007" / "rank00001.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    begun = Begun("all_reduce", 5.0, "world", 3, "train.py:9", rank=1)
    file.write_text("".join(lines[:6]) + json.dumps({"kind": "begun", **asdict(begun)}) + '\n{"kind": "st')
    assert run_cli("report", "--html", "run.html") == 0
    found = embedded(Path("run.html").read_bytes())
    assert any("half-written" in text for text in found["warnings"])
    assert found["ranks"][0]["rank"] == 1
    assert found["ranks"][0]["stuck"] == ["in all_reduce (call 3 on world) at train.py:9 since 5.0s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report",), "initopt: say where to: `initopt report --html run.html`\n"),
        (("report", "--html"), "initopt: say where to: `initopt report --html run.html`\n"),
        (("report", "--html", "--json"), "initopt: say where to: `initopt report --html run.html`\n"),
        (("report", "--html", "7"), "the report is a page"),
        (("report", "--html", "nowhere/run.html"), "nowhere/run.html can't be written"),
        (("report", "8", "--html", "run.html"), "there is no run 8 here"),
    ],
)
@pytest.mark.usefixtures("root")
def test_what_can_t_be_done_is_said(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*words) == 2
    assert said in capsys.readouterr().err


def test_a_run_of_a_newer_initopt_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = root / "0007" / "rank00000.jsonl"
    file.write_text(file.read_text().replace('"format": 1', '"format": 99', 1))
    assert run_cli("report", "--html", "run.html") == 2
    assert "written by a newer initopt" in capsys.readouterr().err
    assert not Path("run.html").exists()


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The Chromium that `make` put beside this Python, else the one on PATH."""
    own = Path(sys.prefix) / "browser" / "chromium"
    program = str(own) if own.exists() else shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium: npm brings one where it is installed (make), or have `chromium` on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def shown(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the report of a run. At the end: nothing was written to the console, no other address was asked."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def show(run: Run, *, scheme: str = "light", width: int = 1280) -> Any:
        file = tmp_path / "run.html"
        file.write_bytes(page(document(run)))
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(file.as_uri())
        tab.wait_for_selector("html[data-drawn]", state="attached")
        return tab

    yield show
    for context in contexts:
        context.close()
    assert said == []
    assert {url for url in asked if not url.startswith("data:")} == {(tmp_path / "run.html").as_uri()}


def brightness(tab: Any) -> int:
    color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", color)[:3])


def shown_from_to(tab: Any) -> str:
    return str(tab.locator("#lanes .tools [aria-live]").inner_text())


def test_every_part_is_on_the_page_in_light_and_dark(wasting: Run, shown: Open) -> None:
    for scheme, width in (("light", 1280), ("dark", 700)):
        tab = shown(wasting, scheme=scheme, width=width)
        assert tab.locator("h2").all_inner_texts() == [
            "Lanes over time",
            "The chain that decided",
            "The graph of steps",
            "Blame: the longest steps",
            "Collectives: which meetings are needed",
            "Ranks",
            "What was compiled",
            "What was imported",
            "Advice: what the first batch did not need",
            "What this page leaves out",
        ]
        assert tab.locator("#sentence").inner_text() == report.sentence(wasting)
        assert LABEL in tab.locator(".warn").all_inner_texts()[0]
        assert (brightness(tab) > 600) == (scheme == "light")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tab.emulate_media(media="print")
        assert brightness(tab) > 600


def test_what_was_optimized_and_whose_name_stands_where(tmp_path: Path, shown: Open) -> None:
    spans = []
    for rank, (joined, late) in enumerate(((9.78, 9.78), (10.9, 10.9))):
        met = Span("all_reduce", late, 11.0, rank, "main", "collective", "process_group")
        met = replace(met, op="all_reduce", group="world", sequence=0)
        nested = [
            Span(f"inside {name}", at, at + 4.0, rank, "main", "step", "imports") for name, at in (("a", 1), ("b", 5))
        ]
        first = [Span("imports", 0.0, 9.72, rank, "main", "import"), *nested, Span("until a.py:88", 9.72, joined, rank)]
        first += [Span("process_group", late, 11.0, rank), met, Span("model", 11.0, 12.0, rank)]
        spans.append([*first, Span("first_step", 12.0, 15.0, rank)])
    place = "trainers/of_a_long_name/a_trainer.py:1088"
    gone = "1 meeting of ranks was left out (1 by plan)"
    said = [Optimized("eliminate", True, gone, "a.py:62", rank, (("plan", 1),)) for rank in (0, 1)]
    said += [Optimized("compile", False, "nothing was compiled", rank=1)]
    tips = [Advised("call iter() of this loader where it is made", place, {"model": 0.5}, rank) for rank in (0, 1)]
    run = Run.load(write_run(tmp_path, spans, graph=None, extra=[*said, *tips]))
    tab = shown(run)
    told = tab.locator("#optimized").inner_text()
    for text in ("Optimized", "As it was", "(1 by plan)", "nothing was compiled", "rank 1", "~500ms", "call iter()"):
        assert text in told
    heights = tab.evaluate("[...document.querySelectorAll('.place')].map((one) => one.getClientRects().length)")
    assert heights and set(heights) == {1}
    assert "Left out: 1 meeting by plan" in tab.locator("#collectives").inner_text()
    names = tab.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#chart .bar')].map((bar) => [bar.dataset.step, "
        "['rect', 'text'].map((what) => bar.querySelector(what)?.getBoundingClientRect().toJSON() ?? null)]))"
    )
    bar, name = names["process_group"]
    assert name is not None and abs(name["left"] - bar["left"]) < 4
    # A name over the wait beside it would be taken for that wait's.
    assert names["until a.py:88"][1] is None
    # What ran inside is drawn over it, so its name stands before that or above.
    inside, name = names["inside a"][0], names["imports"][1]
    assert name["right"] < inside["left"] or name["bottom"] < inside["top"]


def test_a_step_is_chosen_by_pointer_and_by_keys(wasting: Run, shown: Open) -> None:
    tab = shown(wasting)
    details = tab.locator("#asked")
    assert not details.is_visible()
    tab.locator('#chart .bar[data-step="shard"]').first.click()
    assert details.locator("h2").inner_text() == "shard"
    text = details.inner_text()
    assert "train.py:" in text and "on the longest chain" in text
    assert tab.locator('.graph .node[data-step="shard"]').get_attribute("aria-pressed") == "true"
    details.locator('button[data-step="model"]').click()
    assert details.locator("h2").inner_text() == "model"
    tab.keyboard.press("Escape")
    assert not details.is_visible()
    tab.locator("#chart").focus()
    names = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
        tab.keyboard.press(key)
        names.append(details.locator("h2").inner_text())
    assert names[:2] == ["imports", "process_group"]
    assert names[2] == "validation"
    node = tab.locator('.graph .node[data-step="optimizer"]')
    node.focus()
    tab.keyboard.press("Enter")
    assert details.locator("h2").inner_text() == "optimizer"
    assert tab.evaluate("document.activeElement.dataset.step") == "optimizer"


def test_time_can_be_zoomed(wasting: Run, shown: Open) -> None:
    tab = shown(wasting)
    everything = shown_from_to(tab)
    tab.locator("#zoom-in").click()
    assert shown_from_to(tab) != everything
    tab.locator("#zoom-all").click()
    assert shown_from_to(tab) == everything
    tab.locator("#chart").scroll_into_view_if_needed()
    box = tab.locator("#chart svg").bounding_box()
    y = box["y"] + box["height"] - 40
    tab.mouse.move(box["x"] + 0.5 * box["width"], y)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], y, steps=3)
    tab.mouse.up()
    start, end = (float(value) for value in re.findall(r"([\d.]+)s", shown_from_to(tab)))
    assert 2.0 < end - start < 3.5
    assert not tab.locator("#asked").is_visible()
    tab.locator("#chart").focus()
    tab.keyboard.press("0")
    assert shown_from_to(tab) == everything


def test_another_rank_is_shown(wasting: Run, shown: Open) -> None:
    tab = shown(wasting)
    assert "Rank 1" in tab.locator("#blame p").first.inner_text()
    tab.locator('#ranks button[data-rank="2"]').click()
    assert "Rank 2" in tab.locator("#blame p").first.inner_text()
    assert "recorded, rank 2" in tab.locator("#chart").inner_text()


def test_names_of_a_run_are_text_and_nothing_else(tmp_path: Path, shown: Open) -> None:
    spans = [Span(HOSTILE, 0, 1, call_site=HOSTILE), Span("first_step", 1, 2)]
    graph = Graph([Step(HOSTILE), Step("constructor", needs=(HOSTILE,)), Step("first_step", needs=("constructor",))])
    tab = shown(Run.load(write_run(tmp_path, [spans, spans], graph=graph, labels=(HOSTILE,))))
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img").count() == 0
    button = tab.locator("#blame button.step").first
    assert HOSTILE in button.evaluate("node => node.textContent")
    button.click()
    title = tab.locator("#asked h2")
    assert title.evaluate("node => node.textContent") == HOSTILE
    # Names that every object of JavaScript has are steps like others: this one did not run.
    tab.locator('.graph .node[data-step="constructor"]').click()
    assert title.inner_text() == "constructor"
    assert "not on rank 0" in tab.locator("#asked").inner_text()


def test_a_start_up_that_stopped_says_where(tmp_path: Path, shown: Open) -> None:
    tab = shown(Run.load(write_run(tmp_path, stopping_spans(), world_size=8)))
    text = tab.locator("main").inner_text()
    assert "No rank reached its first batch." in text
    assert "OutOfMemoryError (in step 'shard', after 17.8s)" in text
    assert "no record of ranks 3-7" in text


def test_a_record_of_nothing_is_a_page_too(tmp_path: Path, shown: Open) -> None:
    tab = shown(Run.load(write_run(tmp_path, [[]], graph=None)))
    assert "No step was recorded on this rank." in tab.locator("#chart").inner_text()
    tab.locator("#chart").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("+")


def test_ten_thousand_steps_open(tmp_path: Path, shown: Open) -> None:
    spans, _ = many_steps(10_000)
    tab = shown(Run.load(write_run(tmp_path, [spans], graph=None)))
    assert "thinner than a pixel: zoom in" in shown_from_to(tab)
    # What is drawn is bounded by the width of the chart, not by the number of steps.
    assert tab.locator("#chart .bar").count() < 10_000
    assert tab.locator("#blame tbody tr").count() == 20
    tab.locator("#blame .more button").click()
    assert tab.locator("#blame tbody tr").count() == 520
    tab.locator("#blame input").fill("step 9999")
    assert tab.locator("#blame tbody tr").count() == 1
    tab.locator("#blame button.step").click()
    assert "step 9999" in tab.locator("#asked").inner_text()


def test_a_large_graph_is_shown_around_a_step(tmp_path: Path, shown: Open) -> None:
    spans, graph = many_steps(DRAWN_STEPS)
    tab = shown(Run.load(write_run(tmp_path, [spans], graph=graph)))
    assert "201 steps are too many to draw" in tab.locator("#graph p").inner_text()
    nodes = tab.locator(".graph .node")
    assert [node.get_attribute("data-step") for node in nodes.all()] == ["first_step", "step 199"]
    nodes.nth(1).click()
    assert {node.get_attribute("data-step") for node in nodes.all()} == {"step 195", "step 199", "first_step"}


def test_128_ranks_open(tmp_path: Path, shown: Open) -> None:
    base = overlapped_spans()
    tab = shown(Run.load(write_run(tmp_path, [base[rank % 3] for rank in range(128)])))
    assert tab.locator("#lanes select option").count() == 128
    assert tab.locator("#ranks tbody tr").count() == 20
    tab.locator("#ranks .more button").click()
    assert tab.locator("#ranks tbody tr").count() == 128
