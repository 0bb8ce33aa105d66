"""The cores that this process may run on, and which of them are its own."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_rank() -> int:
    """Return how many of them are this rank's, when the ranks of its host (LOCAL_WORLD_SIZE) may all run on them."""
    return max(1, cores() // (ranks_of_host() or 1))


def ranks_of_host() -> int:
    """Return the launcher's LOCAL_WORLD_SIZE; 0 where it set none, or no number."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 0


def near_this_thread(system: Path = Path("/sys/devices/system/node")) -> set[int]:
    """Return the CPUs of this process that share this thread's memory node; none where all do, or can't be asked.

    Memory belongs to the node of the thread that first writes to it.
    """
    try:
        nodes = [_cpus(node.read_text()) for node in system.glob("node[0-9]*/cpulist")]
        mine = os.sched_getaffinity(0)
        # The last but 13 of the fields after the name is where the thread last ran.
        here = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
    except (AttributeError, OSError, ValueError, IndexError):
        return set()
    near = next((cpus & mine for cpus in nodes if here in cpus), set())
    return near if near != mine else set()


def _cpus(text: str) -> set[int]:
    """The numbers of a list like `0-3,8`."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)}
