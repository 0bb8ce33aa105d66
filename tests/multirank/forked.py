"""Ranks forked from this process once it has imported torchrec, so that a job of them costs no imports.

Only for jobs whose start-up behaviour at import time does not matter; the others are started by `launch`.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.multirank.launch import free_port


def fork_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in one forked process per rank and return what each rank returned.

    AssertionError, with what the ranks wrote, if one fails or the job is not done after `timeout` seconds; then all
    their processes are killed. Rank 0, which serves the job's store, ends last unless it fails, as an agent would.
    """
    import torchrec  # noqa: F401  once, for all ranks of all jobs

    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="initopt-ranks-") as name:
        folder = Path(name)
        pids = [_fork(folder, rank, shared, function, args, kwargs) for rank in range(ranks)]
        try:
            done = _wait(pids, folder, time.monotonic() + timeout)
        finally:
            for pid in pids:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        if not done or not all((folder / f"value{rank}").exists() for rank in range(ranks)):
            texts = [f"--- rank {rank}\n{(folder / f'out{rank}').read_text(errors='replace')}" for rank in range(ranks)]
            state = "a rank failed" if done else f"not done after {timeout:g} s"
            raise AssertionError("\n".join([state, *texts]))
        return [pickle.loads((folder / f"value{rank}").read_bytes()) for rank in range(ranks)]


def _fork(
    folder: Path,
    rank: int,
    env: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        # pytest's own time limit uses this signal, and so does initopt.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        import torch

        # OpenMP's threads are not in a forked process, which would wait for them.
        torch.set_num_threads(1)
        out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        # Errors in tests, but a rank stands for a user's process.
        warnings.resetwarnings()
        os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
        import torch

        torch.set_num_threads(1)
        compiler = sys.modules.get("torch._inductor.async_compile")
        if compiler is not None:
            # torch 2.13 forgets it at a fork: the threads of a pool that this process had are not here, and what they
            # are given to compile would never be done.
            compiler.AsyncCompile.pool.cache_clear()
        value = pickle.dumps(function(*args, **kwargs))
        (folder / f"value{rank}.new").write_bytes(value)
        (folder / f"value{rank}.new").rename(folder / f"value{rank}")
        while rank == 0 and not (folder / "last").exists():
            time.sleep(0.01)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], folder: Path, deadline: float) -> bool:
    left = set(pids)
    while left and time.monotonic() < deadline:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.remove(pid)
        if left == {pids[0]}:
            (folder / "last").touch()
        time.sleep(0.01)
    return not left
