"""A start-up that fails on rank 1, in the way that the first argument names; each rank has a loader worker."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch
from torch import distributed
from torch.utils.data import DataLoader

from initopt import Startup

WAY, OVERLAP = sys.argv[1], sys.argv[2] == "overlap"
RANK = int(os.environ["RANK"])

start = Startup("failing", timeout=5.0 if WAY in ("hang", "hold") else 60.0)


@start.step(lane="io:data", uses=("rng", "fork"), early=True)
def loader() -> object:
    return iter(DataLoader(torch.arange(64), num_workers=1, batch_size=4))


@start.step
def features_known(loader: object) -> None:
    if f"early{RANK}" == WAY:
        raise ValueError("no features before the ranks have met")


@start.step(lane="comms")
def process_group(features_known: None) -> object:
    if WAY.startswith("early"):
        start.join(next(distributed.rendezvous("env://"))[0], RANK, 2)
    distributed.init_process_group("gloo")
    return distributed.group.WORLD


@start.step
def features(process_group: object) -> int:
    if RANK == 1:
        time.sleep(0.5)
        if WAY == "raise":
            raise ValueError("no such feature: 'colour'")
        if WAY == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if WAY == "hang":
            time.sleep(1_000)
        if WAY == "hold":
            # Called without letting go of the interpreter lock, and no signal ends the second one.
            mutex, lock = (ctypes.c_char * 64)(), ctypes.PyDLL(None).pthread_mutex_lock
            lock(mutex)
            lock(mutex)
    return 1


@start.step(lane="comms")
def shard(features: int, process_group: object) -> float:
    total = torch.tensor([1.0])
    distributed.all_reduce(total)
    return total.item()


if __name__ == "__main__":
    ready = start.run(overlap=OVERLAP)
    print("started", ready.shard, flush=True)
