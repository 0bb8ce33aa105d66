"""The stock trainer, whose last rank is killed in its first attempt, after its last step.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 benchmarks/trainers/killed_once.py

It says when on stderr, in unix time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # a script's own folder is on the path, the repository is not

from benchmarks.trainers import dlrm_stock

if __name__ == "__main__":
    dlrm_stock.main()
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print(f"killed at {time.time():.3f}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
