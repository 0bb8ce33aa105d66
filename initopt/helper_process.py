"""A lane that is a process: pure-Python steps that would hold the interpreter lock of the trainer's own process.

The helper is forked at the beginning of a run, before this process has threads, so it knows the steps' functions as
they are, closures included. Values go in and come back pickled. Where threads already exist a fork is unsafe: the
helper is spawned then, and the steps' functions must be importable.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from initopt import process_tree
from initopt.failure import note

_PR_SET_PDEATHSIG = 1
_LOOK = 0.5
"""Seconds between two looks whether the helper is still there."""


class HelperProcess:
    """One helper process for the lane `lane`. `functions` are the functions of its steps, by step name."""

    def __init__(self, lane: str, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.lane = lane
        method = "fork" if _fork_is_safe() else "spawn"
        context: Any = multiprocessing.get_context(method)
        self._parent, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, dict(functions)), name=f"initopt-{lane}", daemon=True
        )
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"lane {lane!r} needs a helper process, and this process already has threads, so it can't be forked; "
                f"a spawned one must import its steps, but: {error}. Define them at the top level of a module, or call "
                "Startup.run before anything starts threads"
            ) from error
        child.close()

    def call(self, step: str, arguments: Mapping[str, Any]) -> Any:
        """Run `step` in the helper and return its value. Raises what it raised, RuntimeError if the helper died."""
        try:
            message = pickle.dumps((step, dict(arguments)))
        except Exception as error:
            note(
                error, f"the inputs of step {step!r} must be picklable, since it runs in a helper process ({self.lane})"
            )
            raise
        try:
            self._parent.send_bytes(message)
            # Its end of the pipe may live on, in a process that the step has started.
            while not self._parent.poll(_LOOK):
                if not self._process.is_alive() and not self._parent.poll():
                    raise EOFError
            done, value, trace = pickle.loads(self._parent.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            raise RuntimeError(
                f"the helper process of lane {self.lane!r} ended with exit code {self._process.exitcode} "
                f"in step {step!r}"
            ) from error
        if done:
            return value
        note(value, f"in the helper process of lane {self.lane!r}:\n{trace}")
        raise value

    def close(self) -> None:
        """End the helper and what it has started, whatever it is doing. A `call` under way raises RuntimeError."""
        started = list(process_tree.descendants(self._process.pid)) if self._process.pid is not None else []
        self._process.kill()
        process_tree.kill(started)
        self._process.join()
        self._parent.close()


def _serve(connection: Connection, functions: dict[str, Callable[..., Any]]) -> None:
    # Dies with the trainer's process, also in the middle of a step. Linux only; elsewhere it ends after the step.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if "torch" in sys.modules:
        # As in torch's own loader workers: a pool of the parent's does not exist here.
        sys.modules["torch"].set_num_threads(1)
    # Ctrl-C reaches the whole process group; the trainer says what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    while True:
        # A forked helper holds the trainer's end of the pipe too, so the pipe can't tell that the trainer is gone.
        if connection not in wait([connection, parent.sentinel]):
            return
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(message, functions))


def _answer(message: bytes, functions: Mapping[str, Callable[..., Any]]) -> bytes:
    try:
        step, arguments = pickle.loads(message)
        value = functions[step](**arguments)
    except BaseException as error:
        return _failed(error)
    try:
        return pickle.dumps((True, value, ""))
    except Exception as error:
        note(error, f"the value of step {step!r} must be picklable, since it runs in a helper process")
        return _failed(error)


def _failed(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps((False, error, trace))
        pickle.loads(answer)
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for text in getattr(error, "__notes__", []):
            note(plain, text)
        answer = pickle.dumps((False, plain, trace))
    return answer


def _fork_is_safe() -> bool:
    # Pools of native threads (OpenMP, BLAS) are idle between calls, and torch's own loader forks beside them; Python
    # threads may hold any lock, and neither gloo's threads nor CUDA survive a fork.
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    cuda = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
    return threading.active_count() == 1 and not joined and not cuda and hasattr(os, "fork")
