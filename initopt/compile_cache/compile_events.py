"""What torch's compiler does, seen while it does it: one `Compiled` for each turn, on the thread that took it.

torch sums up each turn of its compiler in a `CompilationMetrics` and appends that to a list which keeps the last 64.
That happens on the thread that compiled, when the turn is over, whatever became of it. So while somebody watches, the
list is one that also tells; afterwards it is a plain one again. The compiler itself is not touched, and this file
imports nothing of torch: where nothing else imports the compiler there is nothing to see.

Not seen: what is installed without a turn of the compiler (torch's `caching_precompile`), and what comes after it
(autotuning by Triton, recording CUDA graphs).
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from initopt.record import Cached, Compiled

Listener = Callable[[Compiled], None]

_HOME, _LIST = "torch._dynamo.utils", "_compilation_metrics"
_LONGEST = 200
"""Characters of a reason. Guards of symbolic shapes and messages with code in them are longer than anybody reads."""


@contextmanager
def watching(listener: Listener) -> Iterator[None]:
    """Call `listener` with each turn of torch's compiler, on the thread it was taken on, while the block runs.

    Its times are those of `time.perf_counter`; rank, lane and step are not filled in. If the compiler is not imported
    yet, watching begins when it is. A torch that keeps its numbers elsewhere is not watched. An error in here is said
    once, on the logger `initopt`, and nothing is seen from then on. A listener that is here twice is called once.
    """
    door = _Door(listener)
    sys.meta_path.insert(0, door)
    door.find_spec()
    try:
        yield
    finally:
        door.close()


def recompiled_since(moment: float) -> tuple[str, ...]:
    """What this process compiled anew since `moment` (unix time, seconds), each with the guard that had failed.

    One sentence for each function and guard: `Dense.forward (model.py:41): tensor 'x' size mismatch at index 0.
    expected 8, actual 16`. torch keeps what its compiler did the last 64 times; earlier is not known. Empty where the
    compiler was not used, and for a torch that keeps this elsewhere.
    """
    found: dict[str, None] = {}
    try:
        for metrics in list(getattr(sys.modules.get(_HOME), _LIST, ())):
            if metrics.recompile_reason and metrics.start_time_us >= 1e6 * moment:
                # One that is refused at once, as the code of its frame has too many cases already, has no name.
                name, place = _named(metrics) if metrics.co_name else (f"frame {metrics.compile_id}", "")
                found[f"{name}{f' ({place})' if place else ''}: {_guard(metrics.recompile_reason)}"] = None
    except AttributeError:  # a torch that is not known
        return ()
    return tuple(found)


class _Door:
    """Puts one listener to torch's list, now or as soon as there is one.

    It stands among the finders of imports for that and finds nothing. Importing the compiler, and its first use, import
    much more after the module with the list; so it gets its turn before anything is compiled, whichever thread imports.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._list: _Told | None = None

    def find_spec(self, *_: Any) -> None:
        """Look whether the list has come meanwhile. Called by the import system."""
        try:
            if self.opens():
                self._leave()
        except Exception as error:  # whoever imports has no part in this
            self._leave()
            _given_up(error)

    def opens(self) -> bool:
        """Whether the listener is at the list. False as long as the compiler is not imported, or half."""
        module = sys.modules.get(_HOME)
        if self._list is None and _known(module):
            held = getattr(module, _LIST)
            if not isinstance(held, _Told):
                held = _Told(held, module)
                setattr(module, _LIST, held)
            held.listeners.append(self._listener)
            self._list = held
        return self._list is not None

    def close(self) -> None:
        self._leave()
        told, self._list = self._list, None
        if told is None:
            return
        if self._listener in told.listeners:
            told.listeners.remove(self._listener)
        held: Any = getattr(told.module, _LIST, None)
        # Somebody may have put another list there, as `set_compilation_metrics_limit` does.
        if not told.listeners and held is told:
            setattr(told.module, _LIST, deque(told, told.maxlen))

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Told(deque[Any]):
    """torch's list of what its compiler did, which tells its listeners what is appended."""

    def __init__(self, before: deque[Any], module: Any) -> None:
        super().__init__(before, before.maxlen)
        self.module = module
        self.listeners: list[Listener] = []
        self._forwards: dict[str, tuple[str, str]] = {}
        self._bypassed = (0, 0)
        self._last_break: Any = None
        self._bypasses()
        self._breaks()

    def append(self, metrics: Any) -> None:
        super().append(metrics)
        listeners = tuple(dict.fromkeys(self.listeners))
        try:
            compiled = self._compiled(metrics) if listeners else None
            if compiled is not None:
                for listener in listeners:
                    listener(compiled)
        except Exception as error:
            self.listeners.clear()
            _given_up(error)

    def _compiled(self, metrics: Any) -> Compiled | None:
        # What kernels did when they first ran is summed up in here as well. It belongs to no turn of the compiler.
        if metrics.is_runtime:
            return None
        end = time.perf_counter()
        identity = metrics.compile_id or ""
        frame = identity.rpartition("/")[0]
        forward = metrics.is_forward is not False
        if metrics.co_name:
            self._forwards[frame] = _named(metrics)
        # A backward graph says only which frame it belongs to, and so does one that is refused at once.
        name, place = self._forwards.get(frame) or (f"frame {frame}", "")
        joint, graphs = self._bypasses()
        joints = metrics.aotautograd_local_cache_hit_count, metrics.aotautograd_local_cache_miss_count, joint
        lookups = metrics.inductor_fx_local_cache_hit_count, metrics.inductor_fx_local_cache_miss_count, graphs
        both = sum(lookups) > max(1, sum(joints))
        backend = _seconds(metrics.inductor_cumulative_compile_time_us)
        if forward:
            below = _seconds(metrics.aot_autograd_cumulative_compile_time_us)
            dynamo = max(0.0, _seconds(metrics.dynamo_cumulative_compile_time_us) - below)
        else:
            below, dynamo = _seconds(metrics.backward_cumulative_compile_time_us), 0.0
        breaks = self._breaks() if forward else {}
        restarts = {_line(reason) for reason in metrics.restart_reasons or ()}
        return Compiled(
            name=name,
            place=place,
            start=end - _seconds(metrics.end_time_us - metrics.start_time_us),
            end=end,
            compile_id=identity,
            direction=("both" if both else "forward") if forward else "backward",
            operations=metrics.graph_op_count or 0,
            dynamo=dynamo,
            aot_autograd=max(0.0, below - backend),
            backend=backend,
            code_gen=_seconds(metrics.inductor_code_gen_cumulative_compile_time_us),
            aot_autograd_cache=_cached(*joints),
            fx_graph_cache=_cached(*lookups),
            recompile_reason=_guard(metrics.recompile_reason or ""),
            breaks=tuple(f"{reason}{place}" for reason, place in breaks.items()),
            restarts=tuple(sorted(restarts - breaks.keys())),
            failure=_failure(metrics),
        )

    def _bypasses(self) -> tuple[int, int]:
        """How often each cache could not be used since the last time: torch counts that for the process only.

        Dynamo compiles one frame at a time, whatever the thread; only two late backward graphs could be mixed up.
        """
        counters = self.module.counters
        now = (
            int(counters.get("aot_autograd", {}).get("autograd_cache_bypass", 0)),
            int(counters.get("inductor", {}).get("fxgraph_cache_bypass", 0)),
        )
        before, self._bypassed = self._bypassed, now
        joint, graphs = (new - old if new >= old else new for new, old in zip(now, before, strict=True))
        return joint, graphs

    def _breaks(self) -> dict[str, str]:
        """The graph breaks since the last time, and where the code has them. torch clears its list in a reset."""
        found = {}
        reasons = self.module.graph_break_reasons
        for reason in reversed(reasons):
            if reason is self._last_break:
                break
            at = reason.user_stack[-1] if reason.user_stack else None
            found[_line(reason.reason)] = f" ({_place(at.filename, at.lineno)})" if at is not None and at.lineno else ""
        self._last_break = reasons[-1] if reasons else None
        return dict(reversed(found.items()))


def _known(module: Any) -> bool:
    """Whether torch's module is there, whole, and has what is read of it."""
    if module is None or getattr(module.__spec__, "_initializing", False):
        return False
    there = isinstance(getattr(module, _LIST, None), deque)
    return there and hasattr(module, "counters") and hasattr(module, "graph_break_reasons")


def _given_up(error: Exception) -> None:
    logging.getLogger("initopt").warning(
        "the compiler is not watched any more, the job goes on: %s: %s", type(error).__name__, error
    )


def _cached(hits: int, misses: int, bypassed: int) -> Cached:
    if misses:
        return "miss"
    return "bypass" if bypassed else "hit" if hits else ""


def _seconds(microseconds: int | None) -> float:
    return (microseconds or 0) / 1e6


def _guard(reason: str) -> str:
    """torch's reason without the number of the code whose guard it was, and without where the guard is from."""
    return re.sub(r"^\d+/\d+: |\s{2,}#.*", "", _line(reason))


def _failure(metrics: Any) -> str:
    if not metrics.fail_type:
        return ""
    at = metrics.fail_user_frame_filename
    place = f" ({_place(at, metrics.fail_user_frame_lineno)})" if at else ""
    return f"{metrics.fail_type}: {_line(metrics.fail_reason or '')}{place}"


def _line(text: str) -> str:
    """The first line, and the second where the first ends in a colon."""
    first, second = [*text.strip().splitlines(), "", ""][:2]
    line = f"{first.strip()} {second.strip()}" if first.endswith(":") else first.strip()
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _named(metrics: Any) -> tuple[str, str]:
    """The function of a frame with its class, and its place. After a graph break it is the rest of the function."""
    name, file, line = metrics.co_name, metrics.co_filename, metrics.co_firstlineno
    # The numbers have the bare name. The code itself is among those that the compiler has seen (no public way).
    seen = getattr(getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None), "seen", ())
    for reference in reversed(seen):
        code = reference()
        if code is not None and (code.co_name, code.co_filename, code.co_firstlineno) == (name, file, line):
            name = getattr(code, "co_qualname", name)  # from Python 3.11 on
            break
    name = name.rpartition("<locals>.")[2]
    return re.sub(r"torch_dynamo_resume_in_(.+)_at_(\d+)$", r"\1 from line \2", name), _place(file, line)


def _place(path: str | None, line: int | None) -> str:
    """`file:line`, from the package on or from the working directory on: the rest says where, not what."""
    if not path:
        return ""
    _, packages, inside = path.rpartition(f"{os.sep}site-packages{os.sep}")
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the working directory was removed
        here = ""
    return f"{inside if packages else path.removeprefix(here)}:{line}"
