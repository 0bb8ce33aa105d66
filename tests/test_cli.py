"""The command line: exit codes, what goes where, and the options there are."""

from __future__ import annotations

import gzip
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from initopt import bench, cli
from tests.golden import check_golden
from tests.synthetic import compiled_spans, overlapped_spans, serial_spans, wasteful, write_run
from tests.test_report import measurement

LABEL = "emulated: 20 ms per collective"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run root with a serial run 7 and an overlapped run 8."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    write_run(tmp_path / ".initopt", serial_spans(), number=7, labels=(LABEL,))
    write_run(tmp_path / ".initopt", overlapped_spans(), number=8, mode="overlap")
    return tmp_path / ".initopt"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def save(root: Path, *measured: bench.Bench) -> None:
    (root / "bench").mkdir()
    for one in measured:
        (root / "bench" / f"{one.number:04}.json").write_bytes(one.to_json())


def test_without_a_verb_it_says_the_one_sentence(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out, err = capsys.readouterr()
    assert "run 0008" in out.splitlines()[0]
    assert "First batch after 11.5s" in out
    assert out.splitlines()[-1].startswith("next: initopt blame")
    assert err == ""


@pytest.mark.parametrize("name", ["7", "0007", ".initopt/0007"])
def test_a_run_is_a_number_or_a_path(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name) == run("summary", name) == 0
    assert capsys.readouterr().out.count("run 0007") == 2


def test_the_root_can_be_given(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "elsewhere", serial_spans(), number=3)
    assert run("--root", "elsewhere") == 0
    assert "run 0003" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["7"],
        ["blame"],
        ["critical-chain"],
        ["compile"],
        ["defer"],
        ["plot"],
        ["draw"],
        ["ett"],
        ["ett", "--baseline", "7"],
        ["bench"],
    ],
)
def test_every_verb_has_its_data_as_json(words: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(root, measurement())
    assert run(*words, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["version"] == 1


@pytest.mark.parametrize("words", [[], ["blame"], ["critical-chain"], ["compile"], ["defer"], ["ett"]])
def test_a_pipe_gets_80_columns_and_no_colour(words: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_what_was_not_needed_is_a_finding(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans, graph, found = wasteful()
    write_run(root, spans, number=9, graph=graph, extra=found)
    assert run("defer", "9") == 1
    assert "validation" in capsys.readouterr().out
    assert run("defer", "9", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert {one["kind"] for one in data["findings"]} == {"step", "loader", "group", "import"}
    assert run("imports", "9") == run("imports", "9", "--all") == 0
    capsys.readouterr()
    assert run("imports", "9", "--rank", "2", "--json") == 0
    packages = json.loads(capsys.readouterr().out)["packages"]
    assert [one["package"] for one in packages] == ["torch", "torchrec", "tensordict", "pandas"]
    assert run("imports", "8") == 2
    assert "initopt.record_imports()" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["blame"], ["critical-chain"], ["ett"]])
def test_no_color_changes_no_character(
    words: list[str], root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*words) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(
        cli, "Console", lambda **kw: Console(**kw, force_terminal=True, color_system="standard", width=80)
    )
    assert run(*words) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[1;31m" in coloured or words == ["ett"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(*words) == 0
    uncoloured = capsys.readouterr().out
    assert "\x1b[1;31m" not in uncoloured
    from rich.text import Text

    assert Text.from_ansi(coloured).plain.split() == Text.from_ansi(uncoloured).plain.split() == plain.split()


@pytest.mark.parametrize("words", [["blame", "7"], ["critical-chain", "7"], ["7"], ["ett", "--baseline", "7"]])
def test_what_was_emulated_is_said_in_every_view(
    words: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 0
    assert f"! {LABEL}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["blame", "9"], "there is no run 9 here; it has 0007 to 0008"),
        (["blame", "--rank", "3"], "there is no rank 3; recorded are 0-2"),
        (["critical-chain", "nowhere"], "nowhere: there is no run here"),
        (["plot", "-o", "a.pdf"], "a.pdf: a picture is .svg or .png"),
        (["plot", "-o", "no/where.svg"], "no/where.svg can't be written: No such file"),
        (["draw", "no_such_module:start"], "'no_such_module:start' can't be imported"),
        (["ett", "--jobs", "4x"], "--jobs '4x' is not understood: write a length such as 90m, 4h or 7d"),
        (["ett", "--lost", "-1"], "--lost"),
        (["bench", "--runs", "0"], "--runs"),
        (["bench"], "no measurement is saved"),
        (["bench", "--stock", "true"], "bench needs both commands"),
        (["bench", "--fail-if", "median"], "write METRIC > LIMIT"),
        (["blam"], "No such command 'blam'. Did you mean 'blame'?"),
        (["blame", "--rank", "x"], "--rank"),
    ],
)
def test_what_can_not_be_done_says_why(
    words: list[str], message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


@pytest.mark.parametrize("words", [["--bogus"], ["7", "--bogus"], ["summary", "--bogus"]])
def test_the_usage_names_no_hidden_command(words: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert capsys.readouterr().err.splitlines()[:2] == ["Usage: initopt [OPTIONS] [RUN]", "Try 'initopt -h' for help."]


def test_a_run_that_was_copied_has_the_name_of_its_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "0007", root / "before the change")
    assert run(str(root / "before the change")) == 0
    assert " · run before the change · " in capsys.readouterr().out.splitlines()[0]


def test_python_m_initopt_is_the_command(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["initopt", "7"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("initopt", run_name="__main__")
    assert ended.value.code == 0
    assert "run 0007" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["7"], ["blame"], ["plot"], ["draw"], ["ett"], ["critical-chain"], ["compile"]])
def test_without_runs_it_says_how_to_record_one(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert "no run has been recorded here: `torchrun ... -m initopt.run train.py` records one" in said


def test_a_start_up_that_stopped_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / ".initopt", [spans[:4] for spans in serial_spans()])
    assert run() == 1
    assert "No rank reached its first batch." in capsys.readouterr().out


def test_a_graph_that_was_compiled_anew_is_a_finding_of_its_rank(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans, compiles = compiled_spans()
    write_run(root, spans, number=9, mode="overlap", compiles=compiles)
    assert run("compile", "--rank", "0") == 0
    assert "compiled anew" not in capsys.readouterr().out
    assert run("compile", "--rank", "2") == run("compile") == 1
    assert run() == 0


def test_blame_shows_all_steps(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("blame", "--all", "--rank", "0") == 0
    assert "Rank 0" in capsys.readouterr().out


def test_the_picture_goes_to_stdout(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plot", "7") == 0
    assert capsys.readouterr().out.startswith("<?xml")


def test_the_picture_does_not_go_to_a_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("plot") == 2
    assert "initopt plot -o startup.svg" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_the_picture_goes_to_a_file(
    name: str, start: bytes, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plot", "7", "-o", name) == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"initopt: wrote {name}\n")


def test_the_trace_goes_to_a_file(root: Path, tmp_path: Path) -> None:
    assert run("plot", "--trace", "a.json.gz") == run("plot", "--trace", "a.json") == 0
    packed = gzip.decompress((tmp_path / "a.json.gz").read_bytes())
    assert packed == (tmp_path / "a.json").read_bytes()
    assert json.loads(packed)["traceEvents"]


def test_without_matplotlib_the_extra_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("plot") == 2
    assert "pip install 'initopt[plot]'" in capsys.readouterr().err


def test_the_graph_of_a_run_is_drawn(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("draw") == 0
    assert capsys.readouterr().out.startswith("flowchart")
    assert run("draw", "--dot") == 0
    assert capsys.readouterr().out.startswith("digraph")


def test_the_graph_of_a_start_up_is_drawn(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer_to_draw.py").write_text(
        "from initopt.overlap import Startup\n"
        "start = Startup('mine')\n"
        "@start.step\n"
        "def model(config): ...\n"
        "@start.step\n"
        "def first_step(model): ...\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run("draw", "trainer_to_draw:start", "--inputs", "config") == 0
    assert "first_step" in capsys.readouterr().out
    assert run("draw", "trainer_to_draw:start") == 2
    said = capsys.readouterr().err
    assert "'model' needs 'config'" in said and "named by --inputs" in said
    assert run("draw", "trainer_to_draw:stop") == 2


def test_ett_counts_whole_failures(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ett", "--jobs", "12h,1d,90s", "--failures-per-day", "2.5", "--lost", "100", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [(job["wall"], job["failures"]) for job in data["jobs"]] == [(43_200, 1), (86_400, 2), (90, 0)]
    assert data["lost_work"] == 100


def test_bench_hands_its_options_on(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def fake(stock: list[str], command: list[str], **options: Any) -> bench.Bench:
        options.pop("progress")("stock, run 1 of 2")
        seen.update(stock=stock, command=command, **options)
        return measurement()

    monkeypatch.setattr(bench, "run_bench", fake)
    words = ["--stock", "python 'my stock.py' --lr 1", "--runs", "2", "--warmup", "0", "--prepare", "sync"]
    assert run("bench", *words, "--timeout", "9", "--", "python", "mine.py", "--runs", "7") == 0
    assert seen == {
        "stock": ["python", "my stock.py", "--lr", "1"],
        "command": ["python", "mine.py", "--runs", "7"],
        "runs": 2,
        "warmup": 0,
        "root": Path(".initopt"),
        "prepare": "sync",
        "timeout": 9.0,
    }
    out, err = capsys.readouterr()
    assert err == "stock, run 1 of 2\n"
    assert "2.00 times as fast as stock" in out


def test_bench_shows_what_is_saved(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(root, measurement(1), measurement(2))
    assert run("bench") == run("bench", "--show", "1") == 0
    out = capsys.readouterr().out
    assert "bench 0002_3f9c2e1" in out
    assert "bench 0001_3f9c2e1" in out


def test_a_gate_fails_with_exit_code_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(root, measurement(1), measurement(2, mine=13.0))
    assert run("bench", "--compare", "1") == 0
    assert run("bench", "--compare", "1", "--fail-if", "median > +5%") == 1
    assert "Gate FAILED" in capsys.readouterr().out
    assert run("bench", "--compare", "1", "--fail-if", "median > +5s") == 0
    assert run("bench", "--fail-if", "median > +2%") == 0
    assert "Gate passed" in capsys.readouterr().out


def test_a_trained_state_that_differs_is_a_finding(root: Path) -> None:
    save(root, measurement(1, digest="b" * 64))
    assert run("bench") == 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("initopt ")


def test_the_chain_of_a_rank_that_is_asked_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("critical-chain", "--rank", "1") == 0
    assert re.search(r"^first_step .*\(rank 1\)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert run("critical-chain", "--rank", "9") == 2
    assert "there is no rank 9" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_the_verbs(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(option) == 0
    out = capsys.readouterr().out
    for verb in ("blame", "critical-chain", "compile", "plot", "report", "draw", "ett", "bench"):
        assert f"\n  {verb} " in out
    assert "..." not in out.partition("Commands:")[2]


def test_the_options_change_only_on_purpose() -> None:
    from typer.main import get_command

    lines = []
    for name, command in sorted(get_command(cli.app).commands.items()):  # type: ignore[attr-defined]
        options = sorted(option for parameter in command.params for option in parameter.opts)
        lines.append(f"{name}: {' '.join(options)}")
    check_golden("options.txt", "\n".join(lines) + "\n")


def test_the_words_of_launch_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(cli.launching, "launch", seen.append)
    assert run("launch", "--standalone", "--", "train.py", "--json", "-h", "--", "blame") == 0
    assert seen == [["--standalone", "--", "train.py", "--json", "-h", "--", "blame"]]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["launch", "--help"])
    assert seen[1] == ["--help"]


def test_a_launch_that_is_refused_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(words: list[str]) -> None:
        raise cli.LaunchError("`import odd` started 1 thread: use torchrun")

    monkeypatch.setattr(cli.launching, "launch", refuse)
    assert run("launch", "train.py") == 2
    assert capsys.readouterr().err == "initopt: `import odd` started 1 thread: use torchrun\n"


@pytest.mark.parametrize(
    ("damage", "ends", "words"),
    [
        ("a rank is missing", {0, 1}, "no record of rank 1"),
        ("a rank is half-written", {0, 1}, "rank00001.jsonl line 9: half-written"),
        ("a line is of another version", {2}, "`kind` is 'poem'"),
        ("a header is of another version", {2}, "written by a newer initopt: format 99"),
        ("nothing is there", {2}, "there is no run here"),
    ],
)
def test_every_view_says_that_a_record_is_damaged(
    damage: str, ends: set[int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans, graph, found = wasteful()
    folder = write_run(tmp_path, spans, graph=graph, extra=found)
    file = folder / "rank00001.jsonl"
    text = file.read_text()
    if damage == "a rank is missing":
        file.unlink()
    elif damage == "a rank is half-written":
        file.write_text("".join(text.splitlines(keepends=True)[:9])[:-20])
    elif damage == "a line is of another version":
        file.write_text(text + '{"kind":"poem"}\n')
    elif damage == "a header is of another version":
        header, rest = text.split("\n", 1)
        file.write_text("\n".join([json.dumps({**json.loads(header), "format": 99}), rest]))
    else:
        for one in folder.iterdir():
            one.unlink()
    for verb in ("summary", "blame", "critical-chain", "compile", "imports", "defer", "collectives", "verify", "ett"):
        assert run(verb, str(folder)) in ends, verb
        out, err = capsys.readouterr()
        said = " ".join((out + err).split())
        assert words in said, (verb, said)
        assert err.startswith("initopt: ") and not out if ends == {2} else not err
