"""What a process has started, and the end of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from initopt.process_tree import descendants, kill

CHILD = """
import subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(grandchild.pid, flush=True)
grandchild.wait()
"""


def test_all_descendants_are_found_and_have_ended_when_they_are_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert list(descendants(child.pid)) == [grandchild]
        kill([child.pid, grandchild])
        # At once: nobody waits any more.
        assert os.waitpid(child.pid, os.WNOHANG)[0] == child.pid
        assert not _runs(grandchild)
        child.returncode = -9


def test_those_that_are_gone_are_passed_over() -> None:
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        kill([child.pid])
    assert time.monotonic() - began < 10


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
