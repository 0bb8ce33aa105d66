"""Whether another process of this host is gone."""

from __future__ import annotations

import os
import subprocess
import sys

from initopt.process_id import born, is_gone, this_process


def test_this_process_is_there() -> None:
    assert is_gone(this_process()) is False


def test_what_runs_elsewhere_can_not_be_seen() -> None:
    assert is_gone({**this_process(), "host": "another"}) is None
    assert is_gone({**this_process(), "processes": "pid:[1]"}) is None


def test_a_reused_process_number_is_not_the_process() -> None:
    assert born(os.getpid()) == born(os.getpid()) != ""
    assert born(2**22 + 1) == ""


def test_a_dead_child_that_nobody_waited_for_is_gone() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, done.pid, os.WEXITED | os.WNOWAIT)
    assert born(done.pid) == "" and is_gone({**this_process(), "pid": done.pid})
    done.wait()
