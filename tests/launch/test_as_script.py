"""A forked rank is what `python -u script.py` is: it ends, prints and looks the same."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.launch.forking import both

ENDINGS = {
    "end": "print('end', end='')",
    "code": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('what went wrong')",
    "exception": """
        def fail():
            raise ValueError("no such table")
        fail()
    """,
    "at once": "import os; os._exit(5)",
    "abort": "import os; os.abort()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "syntax": "x = = 1",
    "import": "import no_such_module",
    "exit handlers, threads and finalizers, in their order": """
        import atexit, sys, threading, time
        class Last:
            def __del__(self):
                print("finalizer")
        last = Last()
        atexit.register(print, "exit handler")
        main = threading.main_thread()
        def late():
            main.join()
            print("thread", sys.modules["__main__"].last is last)
        threading.Thread(target=late).start()
        print("end of the script")
    """,
    "exit handler of a failure": """
        import atexit
        atexit.register(print, "exit handler")
        raise OSError("disk")
    """,
    "what is left of a failure": """
        import atexit, sys
        atexit.register(lambda: print(repr(sys.last_value), sys.last_type, sys.last_traceback.tb_lineno))
        raise OSError("disk")
    """,
    "hook": """
        import sys
        def hook(kind, error, trace):
            print("hook", kind.__name__, trace.tb_frame.f_code.co_name)
        sys.excepthook = hook
        raise OSError("disk")
    """,
}


@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS)
def test_it_ends_the_same(tmp_path: Path, text: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))

    plain, rank = both(str(script))

    assert rank == plain


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    plain, rank = both(str(tmp_path / "script.py"))

    assert plain.code == 2
    assert rank == plain


def test_a_module_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain, rank = both("-m", "package.script")

    assert plain.code == 1
    assert rank == plain


def test_a_folder_with_a_main_module(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text("import sys, beside; print(sys.argv, beside.__name__)")
    (tmp_path / "program" / "beside.py").write_text("")

    plain, rank = both(str(tmp_path / "program"), "word")

    assert rank == plain
    assert rank.code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_a_signal_ends_it_as_ever(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(f"import os\nopen({str(tmp_path)!r} + '/up', 'w').close()\nwhile True: pass\n")

    def stop(pid: int) -> None:
        while not (tmp_path / "up").exists():
            os.sched_yield()
        (tmp_path / "up").unlink()
        os.kill(pid, number)

    plain, rank = both(str(tmp_path / "script.py"), act=stop)

    assert rank.code == plain.code == -number


STATE = """
import gc, json, os, resource, signal, sys, threading, warnings
import multiprocessing, multiprocessing.forkserver, multiprocessing.process, multiprocessing.resource_tracker
try:
    from .beside import HERE
except ImportError:
    from beside import HERE

def stream(file):
    parts = file.encoding, file.errors, file.line_buffering, file.write_through, type(file.buffer).__name__
    # Where the output goes differs in this test.
    return *parts, file.fileno(), os.readlink(f"/proc/self/fd/{file.fileno()}") if file is sys.stdin else ""

main = sys.modules["__main__"]
print(json.dumps({
    "words": [sys.argv, sys.orig_argv[1:], sys.executable, str(sys.flags)],
    "path": sys.path,
    "main": {name: str(value).partition(" object at ")[0] for name, value in vars(main).items() if name[:2] == "__"},
    "is main": [vars(main) is globals(), __name__],
    "environment": [dict(os.environ), type(os.environ).__name__],
    "place": [os.getcwd(), os.umask(0o22), os.nice(0), sorted(os.sched_getaffinity(0)), os.getsid(0) == os.getpid()],
    "signals": {int(number): str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()},
    "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "wake up": [signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL)],
    "files": len(os.listdir("/proc/self/fd")),
    "threads": [len(os.listdir("/proc/self/task")), threading.current_thread() is threading.main_thread()],
    "multiprocessing": [
        str(multiprocessing.current_process()), str(multiprocessing.parent_process()),
        multiprocessing.get_start_method(allow_none=True), multiprocessing.process.ORIGINAL_DIR,
        multiprocessing.resource_tracker._resource_tracker._fd, len(multiprocessing.current_process().authkey),
        multiprocessing.forkserver._forkserver._forkserver_address, list(multiprocessing.current_process()._identity),
    ],
    "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.getprofile(), sys.gettrace(), str(warnings.filters)],
    "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:6] == "RLIMIT"],
    "collector": [gc.isenabled(), gc.get_threshold()],
    "here": HERE,
}))
"""


@pytest.mark.parametrize("how", ["script", "module", "link"])
def test_it_looks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("package", "links"):
        (tmp_path / folder).mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "beside.py").write_text("HERE = 'beside the current folder'")
    seen = "[__file__, sys.argv, sys.path[0], getattr(sys.modules['__main__'], '__file__', None)]"
    (tmp_path / "package" / "beside.py").write_text(f"import os, sys\nHERE = {seen}\nos.environ['BESIDE'] = 'imported'")
    (tmp_path / "package" / "state.py").write_text(STATE)
    (tmp_path / "links" / "state.py").symlink_to(tmp_path / "package" / "state.py")
    words = {"script": ("./package/state.py",), "module": ("-m", "package.state"), "link": ("links/state.py",)}[how]

    plain, rank = both(*words, "--option", "--", "word")

    assert plain.code == 0, plain.err
    expected = _read(plain.out)
    # A warning that Python ignores, of a relative import in a script, is noted elsewhere.
    expected["main"].pop("__warningregistry__", None)
    assert _read(rank.out) == expected


def _read(text: str) -> Any:
    return json.loads(text)


def test_processes_of_the_rank_find_its_main_module(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import multiprocessing
            class Mine:
                pass
            def work(queue, value):
                queue.put((type(value).__name__, type(value).__module__, multiprocessing.current_process().name))
            if __name__ == "__main__":
                for method in ("fork", "spawn", "forkserver"):
                    context = multiprocessing.get_context(method)
                    queue = context.SimpleQueue()
                    process = context.Process(target=work, args=(queue, Mine()))
                    process.start()
                    print(method, queue.get())
                    process.join()
                    print(process.exitcode)
        """)
    )

    plain, rank = both(str(tmp_path / "script.py"))

    assert plain.code == 0, plain.err
    assert rank == plain


CHANGES = """
import atexit, decimal, faulthandler, gc, locale, logging, os, resource, signal, sys, tempfile, warnings
atexit.register(print, "registered by the module")
decimal.getcontext().prec = 7
faulthandler.enable()
gc.set_threshold(900, 11, 12)
locale.setlocale(locale.LC_ALL, "C.UTF-8")
logging.basicConfig(level=logging.INFO, format="%(message)s of the module", stream=sys.stdout)
os.chdir("elsewhere")
os.environ["OMP_NUM_THREADS"] = "3"
os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] + ",of:module"
os.environ.pop("PLACE")
os.nice(1)
os.umask(0o27)
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
sys.argv.remove("--mine")
sys.excepthook = lambda *_: None
sys.path[1:1] = ["of the module"]
sys.path.insert(0, "first of the module")
sys.path.append("last of the module")
sys.setrecursionlimit(1234)
sys.setswitchinterval(0.5)
tempfile.tempdir = os.getcwd()
warnings.filterwarnings("ignore", message="of both")
warnings.filterwarnings("error", message="of the module")
warnings.simplefilter("always", append=True)
"""

CHANGED = """
import os, sys, warnings
warnings.filterwarnings("ignore", message="of the script")
warnings.filterwarnings("ignore", message="of both")
os.environ["PYTORCH_ALLOC_CONF"] = "of:script"
sys.path.insert(0, "of the script")
BEFORE = [os.getcwd(), os.path.abspath("x"), sys.argv[1], sys.path[0], os.environ["PLACE"]]
import changes
try:
    import not_there
except ImportError:
    sys.path.append("in place of it")
    import again
AFTER = [os.getcwd(), sys.argv[1], sys.path[0], os.environ["PYTORCH_ALLOC_CONF"]]
warnings.filterwarnings("ignore", message="of the script")
os.environ["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] + "0"
sys.path.insert(0, "of the script, later")
import builtins, decimal, faulthandler, gc, json, locale, logging, resource, signal, tempfile
print(json.dumps({
    "before and after": [BEFORE, AFTER],
    "environment": dict(os.environ),
    "paths": [os.getcwd(), sys.path, sys.argv, tempfile.gettempdir()],
    "filters": [list(map(str, one)) for one in warnings.filters],
    "process": [os.umask(0), os.nice(0), sorted(os.sched_getaffinity(0))],
    "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:6] == "RLIMIT"],
    "signals": {int(number): str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()},
    "mask": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "collector": [gc.get_threshold(), gc.isenabled(), gc.get_debug()],
    "interpreter": [str(sys.flags), sys.getrecursionlimit(), sys.getswitchinterval(), sys.dont_write_bytecode],
    "texts": [locale.setlocale(locale.LC_ALL), decimal.getcontext().prec, sys.getfilesystemencoding()],
    "hooks": [sys.excepthook is changes.sys.excepthook, faulthandler.is_enabled(), str(builtins.__import__)],
    "logging": [logging.root.level, [str(handler) for handler in logging.root.handlers]],
}))
logging.info("logged")
import atexit
atexit.register(print, "registered by the script")
"""


def test_what_modules_change_is_the_same_where_the_script_changes_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "", "PLACE": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "changes.py").write_text(CHANGES)
    (tmp_path / "again.py").write_text("import warnings\nwarnings.filterwarnings('ignore', message='of both')")
    (tmp_path / "script.py").write_text(CHANGED)

    plain, rank = both("script.py", "--mine", "--other")

    assert plain.code == 0, plain.err
    assert rank.out.splitlines()[1:] == plain.out.splitlines()[1:]
    assert _read(rank.out.splitlines()[0]) == _read(plain.out.splitlines()[0])
    assert len(plain.out.splitlines()) == 4
