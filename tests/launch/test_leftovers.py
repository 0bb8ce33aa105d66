"""Each kind of thing that a fork would lack or share is noticed, and named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

KINDS = {
    "import os": "",
    "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.0)": "",
    "signal.setitimer(signal.ITIMER_REAL, 100)": "set a timer",
    "signal.setitimer(signal.ITIMER_REAL, 0)": "",
    "signal.alarm(100)": "set a timer",
    "signal.alarm(0)": "",
    "signal.setitimer(signal.ITIMER_PROF, 100, 1)": "set a timer",
    "signal.setitimer(signal.ITIMER_PROF, 0)": "",
    "signal.setitimer(signal.ITIMER_VIRTUAL, 100)": "set a timer",
    "signal.setitimer(signal.ITIMER_VIRTUAL, 0)": "",
    "import ctypes\nctypes.CDLL('librt.so.1').timer_create(0, None, ctypes.byref(ctypes.c_void_p()))": "set a timer",
    "signal.signal(signal.SIGTERM, lambda *_: None)": "",
    "import faulthandler\nfaulthandler.enable()\nfaulthandler.register(signal.SIGUSR1)": "",
    "faulthandler.register(signal.SIGHUP)": "handles SIGHUP in native code",
    "import socket\nline = socket.socket()": "left open a socket",
    "held = open(__file__)": r"left open .*/kinds\.py",
    "ends = os.openpty()": r"left open /dev/p\S*, /dev/p\S*",
    "import select\npoll = select.epoll()": "left open eventpoll",
    "null = open(os.devnull)": "",
    "import mmap\nshared = mmap.mmap(-1, 4096)": r"made 1 block of memory .*",
    "import subprocess\nhelper = subprocess.Popen(['sleep', '100'])": "started 1 process",
    "helper.kill()\nhelper.wait()": "",
    "ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.CDLL(None).pause, None)": (
        r"started 1 thread \(in native code\)"
    ),
    "faulthandler.dump_traceback_later(100)": r"started 1 thread \(in native code\)",
    "import threading\nthreading.Thread(target=signal.pause, name='watch', daemon=True).start()": (
        r"started 1 thread \(watch\)"
    ),
}


def test_each_kind_is_named(tmp_path: Path) -> None:
    script = tmp_path / "kinds.py"
    script.write_text(
        "from initopt.launch.leftovers import Traces\n"
        f"for text in {list(KINDS)!r}:\n"
        "    before = Traces.now()\n    exec(text, globals())\n"
        "    print(*Traces.now().since(before), sep=' and ')\n"
    )

    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30)

    assert ended.returncode == 0, ended.stderr
    for line, (text, expected) in zip(ended.stdout.splitlines(), KINDS.items(), strict=True):
        assert re.fullmatch(expected, line), text
