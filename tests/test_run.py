"""`python -m initopt.run` without torch: the program is what `python` would make of it, and who is left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from initopt.hooks import HIDDEN
from initopt.record import Ended
from initopt.report import summary
from initopt.run import FOLDER, VARIABLE, UsageError, Wanted, behind, forget, interpreter_words
from initopt.runs import Run

ROOT = Path(__file__).parents[1]
SHOWS_ALL = """
import atexit, inspect, json, os, signal, sys, threading
atexit.register(lambda: print("exit handler", file=sys.stderr))
print(json.dumps({
    "argv": [sys.argv, sys.orig_argv, sys.path, list(sys.flags), sys.warnoptions, sys.stdout.write_through],
    "main": [__name__, __file__, getattr(__spec__, "name", None), sys.modules["__main__"].__dict__ is globals()],
    "process": [threading.active_count(), len(inspect.stack()), [str(signal.getsignal(n)) for n in (2, 13, 15)]],
    "environment": {name: os.environ[name] for name in os.environ if name not in ("PYTHONPATH", "INITOPT_RUN")},
    "finders": [finder.__class__.__name__ for finder in sys.meta_path],
}))
"""
NO_RECORD = "initopt: the script ended without a process group or a training step, so there is no record of it"


def python(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [(env or {}).get("PYTHONPATH")])])
    environment = {**os.environ, **(env or {}), "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def both(
    folder: Path, *words: str, options: Sequence[str] = (), env: dict[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """The program as Python runs it, and recorded."""
    return python(folder, *options, *words, env=env), python(folder, *options, "-m", "initopt.run", *words, env=env)


def without_ours(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("initopt: "))


def script(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return name


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["python", "-m", "initopt.run"], ["python"]),
        (["python", "-u", "-X", "dev", "-m", "initopt.run"], ["python", "-u", "-X", "dev"]),
        (["python", "-um", "initopt.run"], ["python", "-u"]),
        (["python", "-minitopt.run"], ["python"]),
        (["python", "-uminitopt.run"], ["python", "-u"]),
    ],
)
def test_the_interpreter_s_own_options_are_kept(words: list[str], kept: list[str]) -> None:
    assert interpreter_words(words) == kept


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no script is named"),
        (["-m"], "no script is named"),
        (["--until"], "--until needs a value"),
        (["--until=", "script.py"], "--until needs a value"),
        (["--root", "", "script.py"], "--root needs a value"),
        (["--optimise", "script.py"], "there is no option --optimise"),
        (["--optimize=yes", "script.py"], "--optimize takes no value"),
        (["--optimize", "--no-magic", "script.py"], "there is no option --no-magic"),
        (["--no-plan", "script.py"], "--no-plan takes something away from --optimize"),
        (["-root", "x", "script.py"], "there is no option -root"),
        (["--optimize", "script.py"], "INITOPT_DISABLE names 'magic', which is no optimization or rewrite; there are "),
    ],
)
def test_what_makes_no_sense_is_said_with_the_usage(tmp_path: Path, words: list[str], problem: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("INITOPT_DISABLE", "plan,magic")  # which matters with --optimize only
        done = python(tmp_path, "-m", "initopt.run", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "usage: python -m initopt.run" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        (None, FOLDER, None),
        ("", FOLDER, ""),
        ("a:b", f"{FOLDER}:a:b", "a:b"),
        ("a", f"new:{FOLDER}:a", "new:a"),
        ("a", "new", "new"),
        (None, None, None),
    ],
)
def test_the_environment_is_given_back(
    monkeypatch: pytest.MonkeyPatch, before: str | None, now: str | None, after: str | None
) -> None:
    monkeypatch.setenv(VARIABLE, "word")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if now is not None:
        monkeypatch.setenv("PYTHONPATH", now)
    for _ in range(2):
        forget(Wanted(1, "script.py", "", "", before))
        assert os.environ.get("PYTHONPATH") == after
        assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["-m", "initopt.run", "--optimize", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["-m", "initopt.run", "--root", "x", "-m", "train", "-m"], ["-m", "train", "-m"]),
        (["-m", "initopt.run", "--help"], None),
        (["-m", "train", "-m", "initopt.run"], None),
        (["train.py"], None),
    ],
)
def test_what_a_command_line_becomes_is_known_without_running_it(words: list[str], becomes: list[str] | None) -> None:
    found = behind(["python", "-u", *words])
    assert (found and found[1]) == (becomes and ["python", "-u", *becomes])
    if found is not None:
        assert (bool(found[0].optimize), found[0].root) == ("--optimize" in words, "x" if "--root" in words else "")


def test_a_command_line_that_makes_no_sense_becomes_nothing() -> None:
    with pytest.raises(UsageError, match="there is no option --optimise"):
        behind(["python", "-u", "-m", "initopt.run", "--optimise", "train.py"])


def test_help_is_no_error(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "initopt.run", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m initopt.run")


@pytest.mark.parametrize("options", [[], ["-u", "-W", "error", "-X", "utf8"]])
@pytest.mark.parametrize("program", ["script.py", "-m module", "folder"])
def test_the_program_sees_what_it_would_see(tmp_path: Path, program: str, options: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("script.py", "module.py", "folder/__main__.py"):
        script(tmp_path, SHOWS_ALL, name)
    stock, recorded = both(tmp_path, *program.split(), "--root", "-m", "x y", options=options)
    assert stock.returncode == recorded.returncode == 0, recorded.stderr
    assert json.loads(recorded.stdout) == json.loads(stock.stdout)
    assert without_ours(recorded.stderr) == stock.stderr == "exit handler\n"


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('words')",
        "raise ValueError('own')",
        "def f(:",
        "import nothing_like_this",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 2)",
        "import os; os.kill(os.getpid(), 15)",
        "import os; os._exit(4)",
        "import atexit; atexit.register(int, 'x')",
        "import threading; threading.Thread(target=lambda: 1 / 0).start()",
    ],
)
def test_it_ends_as_it_would(tmp_path: Path, text: str) -> None:
    stock, recorded = both(tmp_path, script(tmp_path, text))
    assert recorded.returncode == stock.returncode
    assert without_ours(recorded.stderr) == stock.stderr
    assert recorded.stdout == stock.stdout
    # The script's own words are the first.
    assert recorded.stderr.startswith(stock.stderr)


def test_a_missing_script_or_module_is_python_s_to_say(tmp_path: Path) -> None:
    for words in (["missing.py"], ["-m", "missing"]):
        stock, recorded = both(tmp_path, *words)
        assert recorded.returncode == stock.returncode != 0
        assert recorded.stderr == stock.stderr
    assert not (tmp_path / ".initopt").exists()


def test_a_signal_reaches_the_script_itself(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("up", flush=True)
        signal.pause()
        """,
    )
    words = [sys.executable, "-m", "initopt.run", name]
    with subprocess.Popen(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as up:
        assert up.stdout is not None
        assert up.stdout.readline() == b"up\n"
        up.send_signal(signal.SIGTERM)
        assert up.wait(30) == 7


def test_a_script_that_never_trains_says_so_and_has_a_record_of_its_steps(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import initopt
        with initopt.step("features"):
            pass

        @initopt.step
        def model():
            pass

        model()
        """,
    )
    done = python(tmp_path, "-m", "initopt.run", "--root", "kept", name)
    assert done.returncode == 0
    assert done.stderr == "initopt: the script ended without a training step, and so does its record: kept/0001\n"
    run = Run.latest(tmp_path / "kept")
    assert [span.name for span in run.spans if span.kind == "step"] == ["features", "model"]
    assert run.headers[0].job == "script.py"


def test_until_names_the_step_that_ends_the_record(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import sys
        import initopt

        with initopt.step("plan"), initopt.step("inner"):
            pass
        with initopt.step("ready"):
            pass
        with initopt.step("later"):
            pass
        print("initopt.record" in sys.modules, initopt.record.current_recorder())
        """,
    )
    done = python(tmp_path, "-m", "initopt.run", "--until", "ready", name)
    assert done.returncode == 0
    assert done.stdout == "True None\n"
    first, second = done.stderr.splitlines()
    assert first.startswith("initopt: ready after ")
    # The command says so, too.
    assert Run.latest(tmp_path / ".initopt").goal == "ready"
    assert second == "initopt: .initopt/0001   next: initopt blame"
    run = Run.latest(tmp_path / ".initopt")
    assert [span.name for span in run.spans if span.kind == "step"] == ["plan", "inner", "ready"]
    assert [note.text for note in run.notes] == ["the step 'ready' ends this start-up (--until)"]


def test_an_exception_is_in_the_step_that_it_has_ended_and_in_the_last_line(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import sys
        import initopt
        sys.excepthook = lambda kind, error, trace: print("theirs", file=sys.stderr)
        with initopt.step("features"):
            pass

        def model():
            with initopt.step("model") if "inside" in sys.argv else initopt.step("other"):
                if "inside" in sys.argv:
                    raise KeyError("a row")
            raise ValueError("it is ill\\nvery")

        model()
        """,
    )
    end = "without a training step, and so does its record: .initopt/0001\n"
    for word, error, place in (("inside", "KeyError", 11), ("between", "ValueError", 12)):
        folder = tmp_path / word
        folder.mkdir()
        done = python(folder, "-m", "initopt.run", f"../{name}", word)
        assert done.returncode == 1
        assert done.stderr == f"theirs\ninitopt: the script ended with {error} at script.py:{place}, {end}"
        run = Run.latest(folder / ".initopt")
        failed = [(span.name, span.error) for span in run.spans if span.error]
        said = {"inside": "'a row'", "between": "it is ill"}[word]
        where = {"inside": "model", "between": "script.py:9-12"}[word]
        assert failed == [(where, f"{error} at script.py:{place}: {said}")]
        # The command names the cause with its line.
        assert f"{error} at script.py:{place}" in summary(run).plain


@pytest.mark.parametrize(
    ("way", "how", "failed"),
    [
        ("exit", "exit code 3 at script.py:12", "script.py:8-23: exit code 3 at script.py:12"),
        ("step", "exit code 4 at script.py:15", "model: exit code 4 at script.py:15"),
        ("words", "exit code 1 at script.py:16", "script.py:8-23: exit code 1 at script.py:16: no data"),
        (
            "handled",
            "exit code 2 at script.py:20 after KeyError at script.py:18",
            "script.py:8-23: exit code 2 at script.py:20 after KeyError at script.py:18: 'a row'",
        ),
        # The interpreter tells nobody with which code.
        ("unseen", "SystemExit at script.py:26", "script.py:8-26: SystemExit at script.py:26"),
        ("other", "SystemExit at script.py:25", "script.py:8-25: SystemExit at script.py:25"),
        ("caught", "", ""),
        ("late", "", ""),
        ("well", "", ""),
    ],
)
def test_an_exit_code_is_in_the_record_and_in_the_last_line(tmp_path: Path, way: str, how: str, failed: str) -> None:
    name = script(
        tmp_path,
        """
        import atexit
        import sys
        from sys import exit
        import initopt
        way = sys.argv[1]
        atexit.register(lambda: way == "late" and exit(7))
        with initopt.step("features"):
            pass
        def main():
            if way in ("exit", "caught", "other"):
                exit(3)
            if way == "step":
                with initopt.step("model"):
                    raise SystemExit(260)
            way == "words" and sys.exit("no data")
            try:
                way == "handled" and {}["a row"]
            except KeyError:
                sys.exit(2)
            if way == "unseen":
                raise SystemExit(6)
        try: main()
        except SystemExit as error:
            if way == "other": raise SystemExit(5)
            if way != "caught": raise
        way == "well" and exit()
        """,
    )
    stock, done = both(tmp_path, name, way)
    theirs, own = (re.sub("0x[0-9a-f]+", "", text) for text in (stock.stderr, without_ours(done.stderr)))
    if sys.version_info < (3, 11):  # its bare `raise` brings the frame back
        own = re.sub(rf".*{re.escape(HIDDEN)}.*\n", "", own)
    assert (done.returncode, own) == (stock.returncode, theirs)
    ours = f"with {how}, " if how else ""
    last = f"initopt: the script ended {ours}without a training step, and so does its record: .initopt/0001"
    assert done.stderr.splitlines()[-1] == last
    run = Run.latest(tmp_path / ".initopt")
    assert [f"{span.name}: {span.error}" for span in run.spans if span.error] == ([failed] if failed else [])
    ended = run.trailers[0].ended
    assert ended == (Ended(failed.partition(": ")[2], ended.at, "model" if way == "step" else "") if ended else None)
    assert bool(ended) == bool(failed)


@pytest.mark.parametrize(("words", "mode"), [([], "stock"), (["--optimize"], "optimized")])
def test_the_record_says_whether_it_was_optimized(tmp_path: Path, words: list[str], mode: str) -> None:
    name = script(tmp_path, "import initopt\nwith initopt.step('first_step'):\n    pass")
    assert python(tmp_path, "-m", "initopt.run", *words, name).returncode == 0
    run = Run.latest(tmp_path / ".initopt")
    assert run.headers[0].mode == mode
    assert f" {mode} " in summary(run).plain


def test_a_step_that_is_named_so_ends_the_record(tmp_path: Path) -> None:
    name = script(tmp_path, "import initopt\nwith initopt.step('first_step'):\n    pass")
    done = python(tmp_path, "-m", "initopt.run", name)
    assert done.stderr.startswith("initopt: first batch after ")


def test_until_a_step_that_never_comes_says_so(tmp_path: Path) -> None:
    name = script(tmp_path, "import initopt\nwith initopt.step('model'):\n    pass")
    done = python(tmp_path, "-m", "initopt.run", "--until", "ready", name)
    assert "the script ended without a step 'ready' (its steps: model), and so does its record" in done.stderr


def test_an_error_that_was_only_shown_has_ended_nothing(tmp_path: Path) -> None:
    text = """
        import code, initopt
        with initopt.step("model"):
            pass
        code.InteractiveInterpreter().runsource("1 / 0")
    """
    done = python(tmp_path, "-m", "initopt.run", script(tmp_path, text))
    assert done.returncode == 0
    assert "initopt: the script ended without a training step" in done.stderr
    assert Run.latest(tmp_path / ".initopt").trailers[0].ended is None


def test_an_exit_in_a_ring_of_exceptions(tmp_path: Path) -> None:
    text = """
        import sys
        one, two = ValueError(1), ValueError(2)
        one.__context__, two.__context__ = two, one
        try:
            raise one
        except ValueError:
            sys.exit(12)
    """
    assert python(tmp_path, "-m", "initopt.run", script(tmp_path, text)).returncode == 12


def test_a_folder_that_can_t_be_written_costs_the_record_only(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    name = script(tmp_path, "import initopt\nwith initopt.step('model'):\n    print('went on')")
    done = python(tmp_path, "-m", "initopt.run", "--root", "kept", name)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert done.stderr.startswith("initopt: this process is not recorded: NotADirectoryError: ")


@pytest.mark.parametrize("own", ["print('mine')", "raise ValueError('mine')", None])
def test_the_user_s_own_sitecustomize_runs(tmp_path: Path, own: str | None) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    if own is not None:
        script(folder, own, "sitecustomize.py")
    name = script(tmp_path, "import sys\nprint(getattr(sys.modules.get('sitecustomize'), '__file__', None))")
    stock = python(tmp_path, name, env={"PYTHONPATH": str(folder)})
    done = subprocess.run(
        [sys.executable, "-m", "initopt.run", name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # It runs in the interpreter that leaves word as well.
    said = "mine\n" if own and own.startswith("print") else ""
    assert done.stdout == said + stock.stdout
    assert set(done.stderr.splitlines()) - {NO_RECORD} == set(stock.stderr.splitlines())


def test_a_script_without_a_start_up_has_no_record_and_that_is_said(tmp_path: Path) -> None:
    name = script(tmp_path, "print('nothing')")
    done = python(tmp_path, "-m", "initopt.run", name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing\n", f"{NO_RECORD}\n")
    second = python(tmp_path, "-m", "initopt.run", name, env={"RANK": "1", "WORLD_SIZE": "2"})
    assert second.stderr == ""
    failed = python(tmp_path, "-m", "initopt.run", script(tmp_path, "import sys\nsys.exit(3)", "failed.py"))
    assert (failed.returncode, failed.stderr) == (3, "")
    assert not (tmp_path / ".initopt").exists()


def test_an_interpreter_that_does_not_import_torch_has_nothing_of_ours(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import subprocess, sys
        code = "import sys; print(sorted(name for name in sys.modules if 'initopt' in name), sys.path)"
        print(subprocess.check_output([sys.executable, "-c", code], text=True))
        """,
    )
    stock, recorded = both(tmp_path, name)
    assert recorded.stdout == stock.stdout
    assert "[] [" in recorded.stdout


def test_another_installation_is_left_alone(tmp_path: Path) -> None:
    name = script(tmp_path, "import sys\nprint('initopt.watched_run' in sys.modules)")
    folder = ROOT / "initopt" / "every_process"
    done = python(tmp_path, name, env={"PYTHONPATH": str(folder), VARIABLE: "2.7 /elsewhere:1:{}"})
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_word_that_can_t_be_read_is_said_once(tmp_path: Path) -> None:
    name = script(
        tmp_path, "import torch_is_not_here" if False else "import importlib.util as u; u.find_spec('torch'); print(1)"
    )
    folder = ROOT / "initopt" / "every_process"
    version = f"{sys.version_info[0]}.{sys.version_info[1]} {sys.prefix}"
    done = python(tmp_path, name, env={"PYTHONPATH": str(folder), VARIABLE: f"{version}:1:no json"})
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("initopt: this process is not recorded: JSONDecodeError: ")
    assert len(done.stderr.splitlines()) == 1


def test_python_without_its_environment_is_not_recorded_and_says_so(tmp_path: Path) -> None:
    name = script(tmp_path, "print('ran')")
    words = [sys.executable, "-E", "-m", "initopt.run", name]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.orig_argv[:] = {words}; sys.argv[1:] = [{name!r}]"
    done = python(tmp_path, "-E", "-c", f"{code}; from initopt.run import main; main()")
    assert done.stdout == "ran\n"
    assert done.stderr == "initopt: nothing is recorded: python -E or -I leaves out what watches the script\n"
