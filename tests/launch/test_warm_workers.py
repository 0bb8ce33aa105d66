"""What a rank has of its own, what is refused, and who ends when something dies."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
import torch

from initopt.launch import warm_workers
from initopt.launch.warm_workers import ForkedRank, LaunchError, WarmWorkers
from initopt.process_tree import descendants
from tests.launch.forking import LIMIT, Job, job, plain
from tests.multirank.launch import MARK, remaining


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Bears all processes of the test, and none may be left."""
    name = f"launch-{os.getpid()}-{random.random()}"
    monkeypatch.setenv(MARK, name)
    yield name
    left = remaining(name, 2.0)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def write(script: str, **modules: str) -> None:
    for name, text in {"script": script, **modules}.items():
        Path(f"{name}.py").write_text(textwrap.dedent(text))


def gone(*pids: int) -> bool:
    """Whether these processes end within the limit."""
    for pid in pids:
        with suppress(ProcessLookupError):
            file = os.pidfd_open(pid)
            ended = select.select([file], [], [], LIMIT)[0]
            os.close(file)
            if not ended:
                return False
    return True


def test_modules_are_imported_once() -> None:
    write("import os, seen\nprint(seen.PID == os.getppid())", seen="import os\nPID = os.getpid()")
    with job("script.py") as ranks:
        for number in range(3):
            ranks.rank()
            assert ranks.ended(number).out == "True\n"


def test_random_numbers_are_a_rank_s_own() -> None:
    write("import random, numpy\nprint(random.random(), numpy.random.rand(), numpy.random.randint(1 << 60))")
    assert not set(_words_of_two()[0]) & set(_words_of_two()[1])


def test_random_numbers_that_imports_draw_do_not_make_ranks_alike() -> None:
    write(
        "import draws, random, numpy\nprint(random.random(), numpy.random.rand())",
        draws="import random, numpy\n[random.random() for _ in range(1000)]\nnumpy.random.rand(1000)",
    )
    first, second = _words_of_two()
    assert not set(first) & set(second)


def test_a_seed_that_a_module_sets_holds_in_every_rank() -> None:
    write(
        "import seeds, random, numpy\nprint(random.random(), numpy.random.rand())",
        seeds="import random, numpy\nrandom.seed(7)\nnumpy.random.seed(7)",
    )
    own, numbers = random.Random(7), numpy.random.RandomState(7)
    expected = [str(own.random()), str(numbers.rand())]
    assert _words_of_two() == [expected, expected]


def test_torch_s_seed_holds_where_a_module_sets_it_and_is_a_rank_s_own_elsewhere() -> None:
    write("import torch\nprint(torch.rand(1).item())")
    first, second = _words_of_two()
    assert first != second
    write("import seeds, torch\nprint(torch.rand(1).item())", seeds="import torch\ntorch.manual_seed(7)")
    expected = [str(torch.rand(1, generator=torch.Generator().manual_seed(7)).item())]
    assert _words_of_two() == [expected, expected]


def test_a_state_that_a_module_sets_holds_in_every_rank() -> None:
    write(
        "import states, random, numpy\nprint(random.random(), numpy.random.rand())",
        states="import random, numpy\nrandom.setstate(random.Random(7).getstate())\n"
        "numpy.random.set_state(numpy.random.RandomState(7).get_state())",
    )
    expected = [str(random.Random(7).random()), str(numpy.random.RandomState(7).rand())]
    assert _words_of_two() == [expected, expected]


def test_seeding_without_a_seed_makes_no_ranks_alike() -> None:
    write(
        "import seeds, random, numpy\nprint(random.random(), numpy.random.rand())\n"
        "assert random.seed.__self__ is random._inst\nassert numpy.random.seed is numpy.random.mtrand.seed\n"
        "assert type(numpy.random.seed).__name__ != 'function'",
        seeds="import random, numpy\nrandom.seed(7)\nnumpy.random.seed(7)\nrandom.seed()\nnumpy.random.seed()\n"
        "random.random()\nnumpy.random.rand(1000)",
    )
    first, second = _words_of_two()
    assert len(first) == 2
    assert not set(first) & set(second)


@pytest.mark.parametrize("seeded", [False, True])
def test_what_is_imported_before_the_first_line_of_ours(folder: Path, seeded: bool) -> None:
    (folder / "sitecustomize.py").write_text(
        "import torch, numpy\n" + ("torch.manual_seed(7)\nnumpy.random.seed(7)\n" if seeded else "")
    )
    write("import torch, numpy\nprint(torch.rand(1).item(), numpy.random.rand())")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        first, second = _words_of_two()
    assert len(first) == 2
    if seeded:
        assert first == second
    else:
        assert not set(first) & set(second)


def _words_of_two() -> list[list[str]]:
    with job("script.py") as ranks:
        ranks.rank()
        ranks.rank()
        return [ranks.ended(number).out.split() for number in (0, 1)]


def test_what_a_module_changes_in_the_environment_holds_and_a_rank_has_its_own() -> None:
    write(
        "import sets, os\nprint(os.environ['RANK'], os.environ['SET'], 'GONE' in os.environ, os.environ['OWN'])",
        sets="import os\nos.environ['SET'] = 'by the module'\nos.environ.pop('GONE', None)",
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GONE", "1")
        patched.setenv("OWN", "before")
        with job("script.py") as ranks:
            ranks.rank({"OWN": "of the rank"})
            assert ranks.ended().out == "0 by the module False of the rank\n"


def test_a_module_that_changes_folder_or_path_or_arguments(folder: Path) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "deep.py").write_text("")
    write(
        """
        import sys
        sys.path.insert(0, "lib")
        import moves
        import deep
        print(sys.argv, sys.path.count("lib"), "added" in sys.path, __file__)
        """,
        moves="import os, sys\nos.chdir('/')\nsys.path.append('added')\nsys.argv.remove('--mine')",
    )
    with job("script.py", "--mine", "word") as ranks:
        ranks.rank()
        assert ranks.ended().out == f"['script.py', 'word'] 1 True {folder}/script.py\n"


LEFT = {
    "thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, name='watch', daemon=True).start()",
        r"`import odd` (script.py, line 2) started 1 thread (watch), which ranks that are forked after it would lack",
    ),
    "timer": ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 100)", "set a timer, which"),
    "file lock": ("import fcntl\nheld = open('lock', 'w')\nfcntl.flock(held, fcntl.LOCK_EX)", "/lock, which"),
    "process": (
        "import subprocess\nhelper = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "import atexit\natexit.register(helper.communicate)",
        "started 1 process and left open a pipe, ",
    ),
    "process that is forked": (
        "import multiprocessing, signal\nhelper = multiprocessing.get_context('fork').Process(target=signal.pause)\n"
        "helper.daemon = True\nhelper.start()",
        "started 1 process and left open a pipe, ",
    ),
    "exec": (
        "import os, sys\nif not os.environ.get('AGAIN'):\n    os.environ['AGAIN'] = '1'\n"
        "    os.execl(sys.executable, *sys.orig_argv)",
        "`import odd` (script.py, line 2) calls os.execv, so each rank imports that and the rest itself",
    ),
    "exit of a process that was forked": (
        "import os\nif pid := os.fork():\n    os.waitpid(pid, 0)\nelse:\n    os._exit(7)",
        "",
    ),
    "end of a process that was forked": (
        "import os\nif os.fork():\n    os.wait()\nelse:\n    raise SystemExit",
        "",
    ),
}


@pytest.mark.parametrize(("text", "reason"), LEFT.values(), ids=LEFT)
def test_a_module_that_leaves_something_behind_is_left_to_the_ranks(
    text: str, reason: str, mark: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write(
        "import early\nimport odd\nimport late, os\nprint(early.PID == os.getppid(), odd.PID == os.getpid())",
        early="import os\nPID = os.getpid()",
        odd=f"{text}\nimport os\nPID = os.getpid()",
        late="",
    )
    with job("script.py") as ranks:
        ranks.rank()
        ended = ranks.ended()
    said = capfd.readouterr().err
    if "exec" in text:
        # It has become another process, which imports all by itself.
        assert ended.out == "False True\n"
    elif reason:
        assert ended.out == "True True\n"
    else:
        assert ended.out == "True False\n"
    assert reason in said
    if "which" in reason:
        assert "To import all others once: --preload early,late" in said
    assert ("imported once, for all ranks: early (" in said) == bool(reason)


def test_what_an_import_has_started_ends_though_the_agent_is_slow(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(pid: int) -> list[int]:
        time.sleep(0.3)
        return list(descendants(pid))

    monkeypatch.setattr(warm_workers, "descendants", slow)
    write("import odd", odd=LEFT["process that is forked"][0])
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().code == 0


ENDS = {
    "_exit": ("import os\nos._exit(4)", 4, "calls os._exit"),
    "exit": ("import sys\nsys.exit(4)", 4, "raised SystemExit: 4 before there was a rank"),
    "abort": ("import os\nos.abort()", -signal.SIGABRT, "was ended by SIGABRT"),
    "kill": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "was ended by SIGKILL"),
    "alarm": (
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 1e-6)\nsignal.pause()",
        -signal.SIGALRM,
        "was ended by SIGALRM",
    ),
    "native exit": ("import ctypes\nctypes.CDLL(None)._exit(4)", 4, "ended with exit code 4"),
    "exit of a thread": (
        "import os, threading\nthreading.Thread(target=os._exit, args=(4,)).start()\nthreading.Event().wait()",
        4,
        "calls os._exit",
    ),
    "exec of something else": ("import os\nos.execlp('sh', 'sh', '-c', 'exit 4')", 4, "calls os.execv"),
}


@pytest.mark.parametrize(("text", "code", "reason"), ENDS.values(), ids=ENDS)
def test_a_module_that_ends_the_process_ends_that_of_a_rank(
    text: str, code: int, reason: str, mark: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write("import early, ends\nprint('ran')", early="", ends=text)
    with job("script.py") as ranks:
        ranks.workers.wait()
        ranks.rank()
        ended = ranks.ended()
    assert (ended.code, ended.out) == (code, "")
    assert f"`import ends` (script.py, line 1) {reason}, so each rank imports that" in capfd.readouterr().err


def test_what_leaves_at_import_is_as_ever_in_a_rank() -> None:
    write(
        "import kept, os\nprint(os.execv is kept.posix.execv, type(os._exit).__name__, type(os.execve).__name__)\n"
        "kept.leave(6)",
        kept="import posix\nfrom os import _exit as leave",
    )
    with job("script.py") as ranks:
        ranks.rank()
        ended = ranks.ended()
    assert (ended.code, ended.out) == (6, "True builtin_function_or_method builtin_function_or_method\n")


@pytest.mark.parametrize("handler", ["lambda *_: os.waitpid(-1, os.WNOHANG)", "signal.SIG_IGN"])
def test_a_module_that_waits_for_all_processes_takes_no_exit_code(handler: str, mark: str) -> None:
    write(
        "import reaps, signal\nprint(signal.getsignal(signal.SIGCHLD) is reaps.handler)\nraise SystemExit(3)",
        reaps=f"import os, signal\nhandler = {handler}\nsignal.signal(signal.SIGCHLD, handler)",
    )
    with job("script.py") as ranks:
        ranks.rank()
        ranks.rank()
        assert [(ranks.ended(number).code, ranks.ended(number).out) for number in (0, 1)] == [(3, "True\n")] * 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LEFT["thread"][0], r"--preload: `import odd` started 1 .*share. Without it: --preload early,late"),
        ("import os\nos.environ.get('RANK')", "odd uses RANK .* rank has. Without it: --preload early,late"),
        ("import os\nos._exit(0)", "--preload: `import odd` calls os._exit"),
        ("raise OSError('disk')", "--preload: `import odd` raised OSError: disk before"),
    ],
)
def test_what_was_asked_for_is_imported_or_refused(text: str, reason: str, mark: str) -> None:
    write("import early\nimport odd, late", early="", odd=text, late="")
    with job("script.py", preload="early,odd,late") as ranks, pytest.raises(LaunchError, match=reason):
        ranks.workers.wait()
    with job("script.py", preload="early,late") as ranks:
        ranks.workers.wait()


def test_imports_are_recorded_by_the_ranks() -> None:
    write(
        """
        import initopt
        initopt.record_imports()
        import seen
        import os
        from initopt.imports import recording
        print(seen.PID == os.getppid(), seen.WATCHED, recording() is not None)
        """,
        seen="import os\nfrom initopt.imports import recording\nPID, WATCHED = os.getpid(), recording() is not None",
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "True False True\n"


SETTINGS = """
import os, sys
import odd
sys.path.insert(0, "pk")
os.environ["MINE"] = "of the script"
ROOT = odd.ROOT
print("begin")
try:
    import missing
except ImportError:
    pass
import envmod
print(envmod.MINE, envmod.PID == os.getppid(), sys.path.count("pk"))
sys.path.insert(0, "pk2")
import latemod
"""


def test_what_definitions_do_is_done_before_later_imports(capfd: pytest.CaptureFixture[str]) -> None:
    write(
        """
        import dataclasses, early, os, typing
        @dataclasses.dataclass
        class Config:
            place: str = "here"
        Kind = typing.TypeVar("Kind")
        try:
            import missing
        except ImportError:
            missing = None
        import shared
        def setting(function):
            os.environ["MODE"] = "of the decorator"
            return function
        @setting
        def main(): pass
        class Place:
            os.environ["PLACE"] = "of the class"
        import asks
        print(*asks.FOUND, asks.PID == os.getpid(), shared.PID == os.getppid(), Config())
        """,
        early="",
        shared="import os\nPID = os.getpid()",
        asks="import os\nFOUND = os.environ['MODE'], os.environ['PLACE']\nPID = os.getpid()",
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "of the decorator of the class True True Config(place='here')\n"
    said = capfd.readouterr().err
    assert "script.py runs line 16 before it imports asks" in said
    assert "imported once, for all ranks: early, shared (" in said


def test_what_is_suggested_to_preload_has_the_script_s_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for place, name in (("pk", "envmod"), ("pk2", "latemod")):
        (folder / place).mkdir()
        (folder / place / f"{name}.py").write_text("import os\nMINE, PID = os.environ['MINE'], os.getpid()")
    write(SETTINGS, odd="ROOT = ''")
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "begin\nof the script False 1\n"
    said = capfd.readouterr().err
    assert "--preload odd,envmod. Line 14 seems to set" in said
    assert "before it imports latemod" in said
    for preload in ("odd,envmod", "envmod"):
        with job("script.py", preload=preload) as ranks:
            ranks.rank()
            assert ranks.ended().out == "begin\nof the script True 1\n"
    assert "imported once, for all ranks: envmod (" in capfd.readouterr().err


def test_a_setting_that_needs_what_is_left_out_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    write("import os, odd\nos.environ['MINE'] = odd.NAME\nprint('begin')\nimport last", odd="NAME = '1'", last="")
    with job("script.py", preload="last") as ranks:
        ranks.rank()
        assert ranks.ended().out == "begin\n"
    assert "(script.py, line 2) does not hold for it, as it raised NameError" in capfd.readouterr().err


def test_a_package_of_the_program_is_not_imported_unless_it_is_named(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text(LEFT["thread"][0])
    (folder / "pkg" / "train.py").write_text("print('ran')")
    write("", first="")
    with job("-m", "pkg.train", preload="first") as ranks:
        ranks.rank()
        assert ranks.ended().out == "ran\n"
    with job("-m", "pkg.train", preload="first,pkg") as ranks, pytest.raises(LaunchError, match=r"--preload first$"):
        ranks.rank()


def test_threads_that_a_library_ends_at_a_fork_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # OpenBLAS then starts one when numpy is imported
    write("import numpy\nprint((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum())")
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "27000000.0\n"


@pytest.mark.parametrize("text", ["import deep", "C = {k.lower(): v for k, v in os.environ.items()}"])
def test_a_module_that_asks_for_a_rank_s_variables_is_left_to_the_ranks(
    text: str, mark: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write(
        "import asks, os\nprint(asks.PID == os.getpid(), os.environ['RANK'])",
        asks=f"import os\n{text}\nPID = os.getpid()",
        deep="import os\nC = os.environ.get('RANK')",
    )
    with job("script.py") as ranks:
        ranks.workers.wait()
        ranks.rank()
        ranks.rank()
        assert [ranks.ended(number).out for number in (0, 1)] == ["True 0\n", "True 1\n"]
    said = capfd.readouterr().err
    what = "deep uses RANK from" if "deep" in text else "asks uses all variables (RANK among them) from"
    assert f"`import asks` (script.py, line 1): {what} the environment while it is imported, which only a rank" in said


def test_a_variable_that_nobody_knew_to_be_a_rank_s_is_refused(mark: str) -> None:
    write("import asks", asks="import os\nC = os.environ.get('OWN')")
    with job("script.py") as ranks, pytest.raises(LaunchError, match=r"asks uses OWN from .*: leave it out with --pre"):
        ranks.rank({"OWN": "1"})


def test_modules_that_look_for_their_own_names_among_all_are_imported_once() -> None:
    write(
        "import networkx, tqdm, early, os\nprint(early.PID == os.getppid(), type(os.environ).__name__)",
        early="import ctypes.util, os\nctypes.util.find_library('c')\nPID = os.getpid()",
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "True _Environ\n"


def test_the_script_s_own_changes_of_the_environment_are_made_once() -> None:
    write(
        """
        import os
        os.environ.pop("FOO")
        MODE = os.environ["MODE"]
        os.environ["MODE"] = "imported"
        os.environ["FLAGS"] = os.environ["FLAGS"] + " --b"
        os.environ.setdefault("RANK", "9")
        import seen
        print(MODE, os.environ["MODE"], os.environ["FLAGS"], "FOO" in os.environ, os.environ["RANK"])
        print(*seen.FOUND, seen.PID == os.getppid(), os.environ["SEEN"])
        """,
        seen="""
        import os
        FOUND = os.environ["MODE"], os.environ["FLAGS"], "FOO" in os.environ
        PID = os.getpid()
        os.environ["SEEN"] = "1"
        """,
    )
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"FOO": "1", "MODE": "train", "FLAGS": "--a"}.items():
            patched.setenv(name, value)
        with job("script.py") as ranks:
            ranks.rank()
            ended = ranks.ended()
    assert ended.out == "train imported --a --b False 0\nimported --a --b False True 1\n", ended.err


def test_a_module_that_changes_what_the_script_has_set_does_so_in_each_rank() -> None:
    write(
        "import os\nos.environ['MODE'] = 'a'\nimport changes\nprint(os.environ['MODE'], changes.PID == os.getppid())",
        changes="import os\nos.environ['MODE'] = os.environ['MODE'] + 'b'\nPID = os.getpid()",
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "ab True\n"


TAKES = ("LEVEL = early.LEVEL", "import os\nos.environ['LEVEL'] = early.LEVEL", "sys.path.append(early.LEVEL)")


@pytest.mark.parametrize("text", TAKES)
def test_what_a_statement_takes_before_another_module_changes_it(
    text: str, mark: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write(
        f"import sys, early\n{text}\nimport changes, os\n"
        "print(globals().get('LEVEL'), os.environ.get('LEVEL'), sys.path[-1], early.PID == os.getppid())",
        early="import os\nLEVEL, PID = '1', os.getpid()",
        changes="import early\nearly.LEVEL = '2'",
    )
    expected = plain(["script.py"]).out.replace("False", "True")
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == expected
    said = capfd.readouterr().err
    assert ": what it takes is changed by a module that is imported later, so each rank imports that" in said
    assert "--preload" not in said


MAINS = {
    "import": "import __main__\nDEBUG = getattr(__main__, 'DEBUG', None)",
    "sys": "import sys\nDEBUG = vars(sys.modules['__main__']).get('DEBUG')",
    "from": "from __main__ import DEBUG",
    "set": "import __main__\n__main__.SET = DEBUG = True",
}


@pytest.mark.parametrize("text", MAINS.values(), ids=MAINS)
def test_a_module_that_uses_main_is_left_to_the_ranks(text: str) -> None:
    write(
        "import early\nDEBUG = True\nimport uses, os, sys\n"
        "print(early.PID == os.getppid(), uses.DEBUG, type(sys.modules['__main__']).__name__)",
        early="import os, __main__\nPID, FILE = os.getpid(), __main__.__file__",
        uses=text,
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "True True module\n"


def test_a_module_that_looks_in_main_for_what_no_script_has_there_is_imported_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """pkg_resources does, which many packages import, and the import statement itself."""
    looks = (
        "import os\nPID = os.getpid()\ntry:\n    from __main__ import __requires__ as FOUND\nexcept Exception:\n    "
    )
    write("import looks, os\nprint(looks.PID == os.getppid(), looks.FOUND)", looks=f"{looks}FOUND = None")
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "True None\n"
    assert "__main__" not in capfd.readouterr().err
    write("__requires__ = 'this'\nimport looks, os\nprint(looks.PID == os.getppid(), looks.FOUND)")
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "False this\n"
    assert "looks looks for __requires__ in __main__" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["def hook(): pass", "class hook: pass", "async def hook(): pass"])
def test_a_module_that_looks_in_main_for_what_a_script_defines_is_left_to_the_ranks(text: str) -> None:
    write(
        f"{text}\nimport looks, os\nprint(looks.PID == os.getpid(), looks.FOUND)",
        looks="import os, __main__\nPID = os.getpid()\nFOUND = hasattr(__main__, 'hook')",
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "True True\n"


def test_a_rank_s_signals_are_those_of_a_process_that_the_agent_starts() -> None:
    write(
        "import handles\nimport signal\n"
        "print(*(getattr(h, '__name__', h) for h in map(signal.getsignal, sorted(signal.valid_signals()))))",
        handles="import signal\ndef handler(*_): pass\nsignal.signal(signal.SIGUSR2, handler)",
    )
    # Ignored when the process that imports starts, as under `nohup`, and then not, as torchelastic does; and one stays.
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with job("script.py") as ranks:
            ranks.workers.wait()
            signal.signal(signal.SIGINT, lambda *_: None)
            signal.signal(signal.SIGHUP, lambda *_: None)
            ranks.rank()
            rank = ranks.ended().out
            plain = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True).stdout
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert "default_int_handler" in plain
    assert rank == plain


def test_what_is_refused_works_when_it_is_left_out() -> None:
    write(
        "import odd\nprint(odd.thread.is_alive())",
        odd=LEFT["thread"][0]
        .replace("threading.Thread", "thread = threading.Thread", 1)
        .replace(".start()", "\nthread.start()"),
    )
    with job("script.py", preload="numpy") as ranks:
        ranks.rank()
        assert ranks.ended().out == "True\n"


def test_a_module_that_breaks_without_a_rank_is_left_to_the_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    write(
        "import early\nimport breaks\nprint(early.PID == os.getppid(), breaks.PLACE)".replace(
            "import early", "import os, early", 1
        ),
        early="import os\nPID = os.getpid()",
        breaks="import early, os\nearly.BROKEN = True\nPLACE = os.environ['RANK']",
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().out == "True 0\n"
    assert (
        "`import breaks` (script.py, line 2) raised KeyError: 'RANK' before there was a rank" in capfd.readouterr().err
    )


def test_a_wrong_name_in_preload_is_an_error() -> None:
    write("print('ran')")
    with job("script.py", preload="numpi") as ranks, pytest.raises(LaunchError, match="No module named 'numpi'"):
        ranks.rank()


def test_a_rank_that_is_killed_leaves_the_others_alone_and_another_can_be_forked() -> None:
    write("import sys\nsys.stdin.read() if False else None\nprint('up')\nimport signal\nsignal.pause()")
    with job("script.py") as ranks:
        first, second = ranks.rank(), ranks.rank()
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait(LIMIT) == -signal.SIGKILL
        assert second.poll() is None
        third = ranks.rank()
        os.killpg(third.pid, signal.SIGTERM)
        assert third.wait(LIMIT) == -signal.SIGTERM
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0)


def test_a_rank_that_is_killed_while_it_is_forked(mark: str) -> None:
    # Python runs this in the new process before anything of ours.
    write(
        "import dies",
        dies="import os, signal\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGKILL))",
    )
    with job("script.py") as ranks:
        ranks.rank()
        assert ranks.ended().code == -signal.SIGKILL


@pytest.mark.parametrize("where", ["before", "after_in_child"])
def test_a_fork_that_hangs(mark: str, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    write("import hangs", hangs=f"import os, signal\nos.register_at_fork({where}=signal.pause)")
    with job("script.py") as ranks:
        ranks.workers.wait()
        # It hangs for ever: how long is waited only decides when that is said.
        monkeypatch.setattr(warm_workers, "_PATIENCE", 1.0)
        for _ in range(2):
            with pytest.raises(LaunchError, match="which forks the ranks, did not within 1 s"):
                ranks.rank()
            monkeypatch.setattr(warm_workers, "_PATIENCE", 1e9)


def test_a_process_that_ends_at_each_fork_is_given_up(mark: str) -> None:
    write(
        "import ends",
        ends="import os\nopen('times', 'a').write('1')\nos.register_at_fork(before=lambda: os._exit(3))",
    )
    with job("script.py") as ranks:
        ranks.workers.wait()
        for _ in range(2):
            with pytest.raises(LaunchError, match="which forks the ranks, ended with exit code 3"):
                ranks.rank()
        assert Path("times").read_text() == "11"


def test_ranks_end_with_the_process_that_forked_them_and_the_next_comes_from_a_new_one(
    mark: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write("import os, signal\nprint(os.getppid())\nsignal.pause() if os.environ['RANK'] == '0' else None")
    with job("script.py") as ranks:
        first = ranks.rank()
        parent = _parent_of(first.pid)
        os.kill(parent, signal.SIGKILL)
        assert first.wait(LIMIT) == -signal.SIGKILL
        ranks.rank()
        assert ranks.ended(1).code == 0
    assert f"the process that forked the ranks is gone, so its rank {first.pid} is ended" in capfd.readouterr().err


def test_no_rank_is_left_where_the_next_cannot_be_forked(mark: str) -> None:
    write("import signal\nsignal.pause()")
    with job("script.py") as ranks:
        first = ranks.rank()
        os.kill(_parent_of(first.pid), signal.SIGKILL)
        ranks.workers.end()
        assert first.returncode == -signal.SIGKILL
        assert gone(first.pid)


def test_an_orphan_ends_that_holds_its_own_line() -> None:
    """As a rank does from its fork until it has said that it started."""
    mine, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        rank = ForkedRank(["sleep"], process.pid, mine)
        assert rank.poll() is None
        assert rank.poll(orphan=True) == -signal.SIGKILL
        assert process.wait() == -signal.SIGKILL


def test_ranks_that_run_end_with_the_launch(mark: str) -> None:
    write("import signal\nsignal.pause()")
    with job("script.py") as ranks:
        pids = [ranks.rank().pid, ranks.rank().pid]
        ranks.workers.end()
        assert gone(*pids)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_nobody_outlives_an_agent_that_is_killed(mark: str, folder: Path) -> None:
    write("import signal\nsignal.pause()")
    agent = """
        import os, sys
        from initopt.launch.warm_workers import WarmWorkers
        workers = WarmWorkers((sys.executable, "-u", "script.py"))
        workers.begin(os.environ)
        print(*[workers.fork(os.environ, 1, 2).pid for _ in range(2)], workers._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(agent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert process.wait(LIMIT) == -signal.SIGKILL
    assert len(pids) == 3
    assert gone(*pids)


def test_nobody_outlives_an_agent_that_is_killed_during_imports(mark: str, folder: Path) -> None:
    write(
        "import first\nimport second",
        first="""
        import os
        parent = os.getppid()
        open("up", "w").close()
        while os.getppid() == parent:
            os.sched_yield()
        """,
        second="import signal\nsignal.pause()",
    )
    agent = """
        import os, sys
        from initopt.launch.warm_workers import WarmWorkers
        workers = WarmWorkers((sys.executable, "-u", "script.py"))
        workers.begin(os.environ)
        print(workers._process.pid, flush=True)
        while not os.path.exists("up"):
            os.sched_yield()
        os.kill(os.getpid(), 9)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(agent)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=LIMIT,
    )
    assert process.returncode == -signal.SIGKILL
    assert gone(int(process.stdout))


def test_what_is_sent_to_the_whole_job_does_not_end_the_process_that_forks() -> None:
    write("print('ran')")
    with job("script.py") as ranks:
        parent = _parent_of(ranks.rank().pid)
        ranks.ended()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(parent, number)
        ranks.rank()
        assert ranks.ended(1).out == "ran\n"


def test_a_loader_that_forks_after_modules_were_imported_for_all(mark: str) -> None:
    # As in a fork while another thread imports: here nobody else has the import lock.
    write(
        """
        import slow
        import multiprocessing
        def read(queue):
            import slow
            queue.put(slow.X)
        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()
            readers = [context.Process(target=read, args=(queue,)) for _ in range(2)]
            for reader in readers:
                reader.start()
            print([queue.get() for _ in readers])
            for reader in readers:
                reader.join()
        """,
        slow="X = 1",
    )
    with job("script.py") as ranks:
        ranks.rank()
        ranks.rank()
        assert [ranks.ended(number).out for number in (0, 1)] == ["[1, 1]\n"] * 2


def test_threads_at_import_are_those_of_the_rank() -> None:
    write(
        "import threads_of\nprint(threads_of.COUNT)",
        threads_of="import ctypes, os\nCOUNT = os.getenv('OMP_NUM_THREADS')",
    )
    workers = WarmWorkers((sys.executable, "-u", "script.py"))
    made = Job(workers)
    try:
        workers.begin({**os.environ, "OMP_NUM_THREADS": "1"})
        made.rank({"OMP_NUM_THREADS": "4"})
        assert made.ended().out == "4\n"
    finally:
        workers.end()
        made.folder.cleanup()
