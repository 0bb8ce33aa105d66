"""Recording imports: what is found, and that nothing about an import is other than without it."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from initopt import Run

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder for a script, with a folder of installed packages beside it."""
    (tmp_path / "site-packages").mkdir()
    return tmp_path


def installed(job: Path, name: str, text: str = "") -> None:
    """Write a module `a.b`, and its packages where they are not there yet, among the installed ones."""
    *packages, last = name.split(".")
    folder = job / "site-packages"
    for package in packages:
        folder /= package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / f"{last}.py").write_text(textwrap.dedent(text))


def run_script(job: Path, text: str, *, env: Mapping[str, str] | None = None, fails: bool = False) -> tuple[str, str]:
    """Run a script in a fresh interpreter; what it wrote to stdout and stderr."""
    script = job / "train.py"
    script.write_text(textwrap.dedent(text))
    path = os.pathsep.join([str(job / "site-packages"), str(REPOSITORY)])
    known = {name: value for name, value in os.environ.items() if name != "INITOPT_IMPORTS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=job,
        env={**known, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout, done.stderr


END = """
from initopt.imports import recording
print(json.dumps(dataclasses.asdict(recording().end())))
"""


def recorded(job: Path, text: str, *, used: bool = False) -> dict[str, Any]:
    """What was found while the script ran, packages by name."""
    script = f"import dataclasses, json, initopt; initopt.record_imports()\n{textwrap.dedent(text)}{END}"
    out, _ = run_script(job, script, env={"INITOPT_IMPORTS": "used"} if used else {})
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    found["packages"] = {one["package"]: one for one in found["packages"]}
    return found


def test_a_package_has_its_own_time_and_that_of_all_it_was_the_first_to_import(job: Path) -> None:
    installed(job, "outer.part", "import inner")
    installed(job, "outer.other", "import inner")
    installed(job, "inner", "total = sum(range(3_000_000))")
    (job / "site-packages/outer/__init__.py").write_text("\nimport outer.part, outer.other")
    found = recorded(job, "import outer")
    outer, inner = found["packages"]["outer"], found["packages"]["inner"]
    assert (outer["modules"], inner["modules"]) == (3, 1)
    assert inner["seconds"] == inner["total"] > 0.001
    assert outer["total"] >= outer["seconds"] + inner["total"]
    assert outer["seconds"] < inner["seconds"]
    assert sum(one["seconds"] for one in found["packages"].values()) <= 2 * outer["total"]
    assert [name for name, _ in inner["slowest"]] == ["inner"]


def test_who_asked_and_which_line_of_ones_own_led_to_it(job: Path) -> None:
    installed(job, "outer.part", "\n\nimport inner")
    installed(job, "inner", "total = sum(range(2_000_000))")
    (job / "mine.py").write_text("# own code\nimport outer.part\n")
    found = recorded(job, "\nimport mine")
    packages = found["packages"]
    assert packages["mine"]["asked"] == packages["mine"]["line"] == "train.py:3"
    assert (packages["outer"]["asked"], packages["outer"]["importer"]) == ("mine.py:2", "")
    assert (packages["inner"]["asked"], packages["inner"]["importer"]) == ("outer/part.py:3", "outer")
    assert packages["inner"]["line"] == "mine.py:2"
    line = max(found["lines"], key=lambda line: line["seconds"])
    assert line["line"] == "mine.py:2"
    assert line["packages"][0][0] == "inner"
    assert [(span["package"], span["line"], span["lane"]) for span in found["spans"]] == [
        ("outer", "mine.py:2", "main")
    ]


def test_code_that_a_library_has_generated_is_the_librarys(job: Path) -> None:
    installed(job, "library", "")
    installed(job, "needed", "total = sum(range(2_000_000))")
    (job / "generated.py").write_text("import needed")
    found = recorded(
        job,
        """
        import importlib.util, sys, threading
        import library
        def load():
            spec = importlib.util.spec_from_file_location("library.generated", "generated.py")
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        load()
        """,
    )
    assert found["packages"]["needed"]["importer"] == "library"
    assert found["packages"]["needed"]["asked"] == "generated.py:1"
    [line] = [line for line in found["lines"] if line["packages"][0][0] == "needed"]
    assert (line["line"], line["own"]) == ("train.py:7", True)


def test_what_nothing_of_ones_own_led_to(job: Path) -> None:
    installed(
        job,
        "library",
        """
        import threading
        def load():
            import needed
        def start():
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
        """,
    )
    installed(job, "needed", "total = sum(range(2_000_000))")
    found = recorded(job, "import library\nlibrary.start()")
    [line] = [line for line in found["lines"] if line["packages"][0][0] == "needed"]
    assert (line["line"], line["own"]) == ("library.py:4", False)


def test_a_span_for_each_package_in_turn(job: Path) -> None:
    for name in ("first.a", "first.b", "second"):
        installed(job, name, "total = sum(range(1_000_000))")
    found = recorded(job, "import first.a\nimport first.b\nimport second")
    spans = [span for span in found["spans"] if span["package"] in ("first", "second")]
    assert {span["step"] for span in spans} == {"imports"}
    assert list(dict.fromkeys(span["package"] for span in spans)) == ["first", "second"]
    assert all(one["end"] <= other["start"] for one, other in itertools.pairwise(spans))


def test_imports_of_two_threads_are_told_apart(job: Path) -> None:
    # Each module waits, in the middle of its import, until the other one has begun.
    for mine in ("left", "right"):
        installed(job, mine, f"import meet; meet.here({mine!r}); import {mine}_part")
        installed(job, f"{mine}_part", "total = sum(range(1_000_000))")
    installed(
        job,
        "meet",
        """
        import threading
        both = threading.Barrier(2)
        def here(name):
            both.wait(30)
        """,
    )
    found = recorded(
        job,
        """
        import threading
        import meet
        threads = [threading.Thread(target=__import__, args=(name,), name=name) for name in ("left", "right")]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """,
    )
    for name in ("left", "right"):
        assert found["packages"][f"{name}_part"]["importer"] == name
        assert [span["lane"] for span in found["spans"] if span["package"] == name] == [name]


def test_it_leaves_nothing_behind(job: Path) -> None:
    installed(job, "late")
    text = """
        import importlib.machinery as machinery, zipimport, builtins, sys, threading
        places = [machinery.SourceFileLoader, machinery.SourcelessFileLoader, machinery.ExtensionFileLoader,
                  zipimport.zipimporter]
        def state():
            return [dict(vars(place)) for place in places], builtins.__import__, sys.getprofile()
        before = state()
        import initopt
        from initopt.imports import recording
        initopt.record_imports()
        assert state() != before
        initopt.record_imports()
        found = recording().end()
        assert state() == before and recording() is None
        import late
        assert "late" not in [one.package for one in found.packages]
        print("fine")
        """
    assert run_script(job, text)[0] == "fine\n"
    assert run_script(job, text, env={"INITOPT_IMPORTS": "used"})[0] == "fine\n"


def test_what_somebody_else_has_replaced_meanwhile_stays(job: Path) -> None:
    installed(job, "late")
    out, _ = run_script(
        job,
        """
        from importlib.machinery import SourceFileLoader
        import initopt
        from initopt.imports import recording
        initopt.record_imports()
        ours = SourceFileLoader.exec_module
        def theirs(loader, module):
            print("theirs", module.__name__)
            return ours(loader, module)
        SourceFileLoader.exec_module = theirs
        known = recording()
        known.end()
        assert SourceFileLoader.exec_module is theirs
        import late
        assert [one.package for one in known.end().packages] == []
        """,
    )
    assert out == "theirs late\n"


SEMANTICS = """
import importlib, importlib.resources, importlib.util, inspect, io, pickle, sys, threading, traceback, warnings

def say(*what):
    print(*[re.sub(r"0x[0-9a-f]+", "0x", str(one)) for one in what])

import re
import whole.part
say(whole.part.__loader__, whole.part.__spec__, whole.part.__loader__ is whole.part.__spec__.loader)
say(vars(whole.part.__loader__), type(whole.part.__loader__).__mro__)
say(inspect.getsource(whole.part), inspect.getsourcefile(whole.part.Kept), whole.part.__cached__, whole.part.__file__)
say(importlib.resources.files("whole").joinpath("data.txt").read_text())
say(pickle.loads(pickle.dumps(whole.part.Kept())).__class__ is whole.part.Kept)
say(importlib.util.find_spec("never"), "never" in sys.modules)

import spread.one, spread.two
say(spread.__path__, spread.__spec__)

import _decimal, __hello__, zipped
say(_decimal.__spec__.loader.__class__, __hello__.__spec__, zipped.__loader__.__class__, zipped.value)

before = whole.part.count
again = importlib.reload(whole.part)
say(again is whole.part, whole.part.count - before, again.__loader__ is again.__spec__.loader)

import circular_a
say(circular_a.other.seen)

spec = importlib.util.find_spec("lazy")
spec.loader = importlib.util.LazyLoader(spec.loader)
lazy = importlib.util.module_from_spec(spec)
sys.modules["lazy"] = lazy
spec.loader.exec_module(lazy)
say("ran" in vars(sys), lazy.value, sys.ran)

for name in ("raises", "raises_import_error", "not_there", "bad_syntax"):
    for attempt in range(2):
        try:
            importlib.import_module(name) if attempt else __import__(name)
        except Exception as error:
            say(traceback.format_exc())
        say(name in sys.modules)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import deprecated
say([(str(one.message), one.filename, one.lineno) for one in caught])

results = []
def load():
    import slow
    results.append(slow.value)
threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(results, slow_count())
"""


def test_importing_is_as_it_is_without(job: Path) -> None:
    installed(job, "whole.part", "import sys\nclass Kept: pass\ncount = sys.count = getattr(sys, 'count', 0) + 1")
    (job / "site-packages/whole/data.txt").write_text("resource")
    installed(job, "never", "raise SystemExit('find_spec has run it')")
    for name in ("one", "two"):
        (job / "site-packages/spread").mkdir(exist_ok=True)
        (job / f"site-packages/spread/{name}.py").touch()
    installed(job, "circular_a", "import circular_b as other")
    installed(job, "circular_b", "import circular_a\nseen = hasattr(circular_a, 'other')")
    installed(job, "lazy", "import sys\nsys.ran = True\nvalue = 5")
    installed(job, "raises", "def inside():\n    return 1 / 0\n\ninside()")
    installed(job, "raises_import_error", "import whole\nraise ImportError('for a reason')")
    installed(job, "bad_syntax", "x = (")
    installed(job, "deprecated", "import warnings\nwarnings.warn('old', DeprecationWarning, stacklevel=2)")
    installed(job, "slow", "import builtins, sys\nsys.slow = getattr(sys, 'slow', 0) + 1\nvalue = sum(range(300_000))")
    with zipfile.ZipFile(job / "packed.zip", "w") as packed:
        packed.writestr("zipped.py", "value = 7")
    head = f"import sys; sys.path.append({str(job / 'packed.zip')!r})\ndef slow_count(): return sys.slow\n"
    switch = "import initopt; initopt.record_imports()\n"
    # The same number of lines, so that a line has the same number in all of them.
    plain, _ = run_script(job, "pass\n" + head + SEMANTICS)
    timed, _ = run_script(job, switch + head + SEMANTICS)
    watched, _ = run_script(job, switch + head + SEMANTICS, env={"INITOPT_IMPORTS": "used"})
    assert "ZeroDivisionError" in plain and "'old'" in plain and "train.py" in plain
    # Where `import_module` shows the import system's own frames, ours is one of them.
    frame = r'  File "<frozen importlib._bootstrap_external>", line \d+, in '
    own = re.compile(rf"{frame}exec_module\n(?={frame}exec_module)")
    assert own.sub("", timed) == plain
    assert 0 < len(own.findall(timed)) < plain.count("Traceback")
    # A watched import statement is a call of ours, which a traceback shows.
    assert re.sub(rf"{frame}__import__\n", "", own.sub("", watched)) == plain


def test_an_import_that_fails_counts_and_is_over(job: Path) -> None:
    installed(job, "raises", "import inner\ntotal = sum(range(300_000))\n1 / 0")
    installed(job, "inner")
    installed(job, "after")
    found = recorded(
        job,
        """
        try:
            import raises
        except ZeroDivisionError:
            import after
        """,
    )
    assert found["packages"]["raises"]["seconds"] > 0.001
    # It is not on the stack any more.
    assert found["packages"]["after"]["importer"] == ""
    assert found["packages"]["after"]["asked"] == "train.py:6"


def test_what_the_run_needed(job: Path) -> None:
    burn = "total = sum(range(1_500_000))\n"
    installed(job, "busy.core", burn + "import below\ndef run(): return 1")
    installed(job, "below", burn + "value = 3")
    installed(job, "idle", burn + "import only_idle, shared\nonly_idle.help()")
    installed(job, "only_idle", burn + "def help(): return 1")
    installed(job, "shared", burn + "value = 1")
    installed(job, "late_user", burn + "import shared\ndef run(): return shared.value")
    found = recorded(
        job,
        """
        import busy.core
        import idle
        import late_user
        busy.core.run()
        late_user.run()
        """,
        used=True,
    )
    needed = {name: one["needed"] for name, one in found["packages"].items()}
    assert needed["busy"] == needed["below"] == needed["late_user"] == "yes"
    # Imported by `late_user`, too, which found it there.
    assert needed["shared"] == "yes"
    # Its code ran, but for `idle` alone.
    assert needed["idle"] == needed["only_idle"] == "no"
    verdicts = {line["line"]: line["needed"] for line in found["lines"] if line["line"] < "train.py:6"}
    assert verdicts == {"train.py:3": "yes", "train.py:4": "yes", "train.py:5": "yes"}
    # `shared` came by this line and is needed: it stays.
    [line] = [line for line in found["lines"] if line["line"] == "train.py:4"]
    assert {name for name, _ in line["unneeded"]} == {"idle", "only_idle"}
    assert line["kept"] == ["shared"]
    assert all(line["unneeded"] == [] for line in found["lines"] if line["line"] in ("train.py:3", "train.py:5"))


def test_one_needed_package_does_not_hide_the_others_of_its_line(job: Path) -> None:
    burn = "total = sum(range(1_500_000))\n"
    installed(job, "idle", burn + "import below")
    installed(job, "below", burn)
    installed(job, "busy", burn + "def run(): return 1")
    found = recorded(job, "import idle, busy\nbusy.run()", used=True)
    [line] = [line for line in found["lines"] if line["line"] == "train.py:2"]
    assert (sorted(name for name, _ in line["unneeded"]), line["kept"]) == (["below", "idle"], ["busy"])
    assert line["needed"] == "yes"


def test_what_running_code_imports_without_a_statement_is_needed(job: Path) -> None:
    installed(job, "busy", "import importlib\nimportlib.import_module('plug')\ndef run(): return 1")
    installed(job, "plug", "total = sum(range(1_500_000))")
    found = recorded(job, "import busy\nbusy.run()", used=True)
    assert found["packages"]["plug"]["needed"] == "yes"


def test_what_was_imported_before_is_named(job: Path) -> None:
    installed(job, "early")
    out, _ = run_script(
        job,
        """
        import json
        from initopt.imports import recording
        import initopt
        initopt.record_imports()
        print("early" in recording().before)
        recording().end()
        import early
        initopt.record_imports()
        print([name for name in recording().before if name in ("early", "json", "initopt")])
        """,
    )
    assert out == "False\n['early']\n"


def test_a_line_that_nothing_needed(job: Path) -> None:
    installed(job, "idle", "total = sum(range(1_500_000))\nimport only_idle")
    installed(job, "only_idle", "total = sum(range(1_500_000))")
    found = recorded(job, "import idle\nimport json\njson.dumps([])", used=True)
    assert {line["line"]: line["needed"] for line in found["lines"]}["train.py:2"] == "no"


def test_without_watching_nothing_is_said_of_need(job: Path) -> None:
    installed(job, "idle")
    assert recorded(job, "import idle")["packages"]["idle"]["needed"] == ""


def test_another_profiler_is_left_alone(job: Path) -> None:
    out, _ = run_script(
        job,
        """
        import sys
        def theirs(*event): pass
        sys.setprofile(theirs)
        import initopt
        initopt.record_imports()
        from initopt.imports import recording
        print(sys.getprofile() is theirs, recording().watched)
        """,
        env={"INITOPT_IMPORTS": "used"},
    )
    assert out == "True False\n"


def test_the_switch_takes_one_word(job: Path) -> None:
    _, err = run_script(job, "import initopt; initopt.record_imports()", env={"INITOPT_IMPORTS": "yes"}, fails=True)
    assert "ValueError: INITOPT_IMPORTS is 'yes'" in err


TRAINER = """
import initopt
initopt.record_imports()
import heavy
with initopt.Recorder("job", mode="stock") as recorder:
    with initopt.step("model"):
        import model_parts
    with initopt.step("first_step"):
        heavy.run()
        FAILS
    import afterwards
"""


def test_they_are_in_the_record_until_the_first_step_has_ended(job: Path) -> None:
    installed(job, "heavy", "total = sum(range(1_000_000))\ndef run(): pass")
    installed(job, "model_parts", "total = sum(range(1_000_000))")
    installed(job, "afterwards")
    run_script(job, TRAINER.replace("FAILS", "pass"))
    run = Run.latest(job / ".initopt")
    names = [one.package for one in run.imported]
    assert {"heavy", "model_parts"} <= set(names)
    assert "afterwards" not in names
    spans = {span.name: span for span in run.spans if span.kind == "import"}
    assert (spans["import heavy"].step, spans["import model_parts"].step) == ("imports", "model")
    assert 0 < spans["import heavy"].start < spans["import heavy"].end <= spans["imports"].end
    assert {line.step for line in run.import_lines if line.line == "train.py:7"} == {"model"}
    run_script(job, TRAINER.replace("FAILS", "pass"), env={"INITOPT_IMPORTS": "used"})
    [label] = Run.latest(job / ".initopt").headers[0].labels
    assert "times mean nothing" in label


def test_they_are_in_the_record_of_a_start_up_that_failed(job: Path) -> None:
    installed(job, "heavy", "total = sum(range(1_000_000))\ndef run(): pass")
    installed(job, "model_parts")
    _, err = run_script(job, TRAINER.replace("FAILS", "1 / 0"), fails=True)
    assert re.search("ZeroDivisionError", err)
    assert "heavy" in [one.package for one in Run.latest(job / ".initopt").imported]


def test_what_a_forked_process_has_from_its_parent_is_not_its_own(job: Path) -> None:
    installed(job, "heavy")
    installed(job, "light")
    run_script(
        job,
        """
        import os
        import initopt
        initopt.record_imports()
        import heavy
        child = os.fork()
        if child == 0:
            import light
            with initopt.Recorder("job", mode="stock"), initopt.step("first_step"):
                pass
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )
    names = [one.package for one in Run.latest(job / ".initopt").imported]
    assert "light" in names and "heavy" not in names
