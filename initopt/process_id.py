"""Which process it is, in a form that another process can test: is it gone?"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any


def this_process() -> dict[str, Any]:
    """Return host, process table, pid and birth of this process, as data for JSON."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "born": born(pid), "processes": _process_table()}


def is_gone(process: Mapping[str, Any]) -> bool | None:
    """Say whether a process is gone, given what `this_process` returned there; None if that can't be seen from here."""
    here = this_process()
    if process["host"] != here["host"] or process["processes"] != here["processes"]:
        return None
    return bool(born(process["pid"]) != process["born"])


def born(pid: int) -> str:
    """Return when a process started, so that a reused pid is not taken for it; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _process_table() -> str:
    # Containers can share a host name without seeing each other's processes.
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
