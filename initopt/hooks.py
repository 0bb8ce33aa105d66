"""Which calls of torch.distributed are meetings of ranks, and how they are seen while they happen.

Every module-level name that is bound to such a function is bound to one that reports the call, and put back at the end.
Only the outermost call counts: what it calls itself is part of it. What a trainer starts from C++ (the gradient
all-reduce of DDP), inside a compiled region or on a `ProcessGroup` object is not seen, nor are messages between two
ranks, which are no meeting. This file does not know who listens (see `record`).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import FrameType, FunctionType, ModuleType
from typing import Any, Protocol

WORLD = "world"
"""The name of the default process group. Any other group has the name that torch gave it, equal on all its members."""

HIDDEN = SourceFileLoader.get_code.__code__.co_filename
"""The file that a function may say it is from so that the interpreter leaves its frame out of `stacklevel`, as those of
the import system, and so that no call site is in it."""

_PAYLOAD = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_gather": "tensor",
    "all_gather_coalesced": "input_tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_object": "",
    "all_gather_single": "input_tensor",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": "",
    "broadcast": "tensor",
    "broadcast_object_list": "",
    "gather": "tensor",
    "gather_object": "",
    "init_process_group": "",
    "monitored_barrier": "",
    "new_group": "",
    "reduce": "tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_single": "input",
    "reduce_scatter_tensor": "input",
    "scatter": "tensor",
    "scatter_object_list": "",
    "split_group": "",
    "_broadcast_coalesced": "tensors",
    "_sync_module_states": "",
    "_verify_param_shape_across_processes": "",
}
"""The meetings, each with the parameter that holds what this rank puts in. The ones without get the bytes of the calls
inside them, which is how objects (pickled on the way) and the parameters of DDP get theirs."""

_MAKES_GROUP = frozenset({"new_group", "split_group"})
_COMPILED_PARAMETERS = {"_broadcast_coalesced": ("process_group", "tensors", "buffer_size", "src")}


@dataclass(frozen=True, slots=True)
class Meeting:
    """One call, from its start to its end in seconds of `time.perf_counter`.

    `sequence` counts the calls of this process on the group; it is -1 where there was nobody to meet (a rank that is no
    member of a new group). `bytes` is what this rank put in. `cpu` is in seconds of the calling thread. `own` are the
    seconds that seeing it cost. With `async_op` the call only handed the work over. `error` is the type of what it
    raised.
    """

    op: str
    group: str
    sequence: int
    start: float
    end: float
    cpu: float
    bytes: int
    call_site: str
    async_op: bool
    error: str
    own: float


class Listener(Protocol):
    """Who wants to know. Called on the thread that made the call; must not raise but where it says so."""

    def met(self, meeting: Meeting) -> None:
        """A call has ended."""

    def begins(self, op: str, call_site: str) -> None:
        """A call is about to begin. The only one that may raise, which keeps the call from being made."""

    def group_seen(self, name: str, ranks: tuple[int, ...]) -> None:
        """The first call on a group: its name and its members' global ranks."""

    def group_made(self, group: Any, name: str, call_site: str) -> None:
        """A new group, of which this process is a member."""

    def spent(self, seconds: float) -> None:
        """What putting the hooks in and out took."""


@contextmanager
def watched(listener: Listener, calls: dict[str, int] | None = None) -> Iterator[None]:
    """Report every meeting of this process, on any thread, while the block runs. Imports torch.distributed.

    `calls` has the number of calls seen so far on each group: a later block goes on counting where an earlier one
    ended.
    """
    import torch.distributed as dist

    # It keeps torch's functions as keys, for the compiler: a first import while they are hooked would keep the hooks.
    import torch.distributed._functional_collectives
    import torch.distributed.utils
    import torch.nn.parallel.distributed as ddp
    from torch.distributed import distributed_c10d as c10d

    entered = time.thread_time()
    watch = _Watch(listener, c10d, {} if calls is None else calls)
    # A home may already hold somebody else's wrapper, so each distinct function is wrapped, not each name.
    seen: dict[int, Callable[..., Any]] = {}
    for home in (c10d, dist, torch.distributed.utils, ddp):
        for name in _PAYLOAD:
            function = vars(home).get(name)
            if callable(function) and id(function) not in seen:
                seen[id(function)] = watch.wrap(name, function)
    originals = {id(wrapper): wrapper.__wrapped__ for wrapper in seen.values()}  # type: ignore[attr-defined]
    _rebind(seen)
    listener.spent(time.thread_time() - entered)
    try:
        yield
    finally:
        entered = time.thread_time()
        watch.on = False
        _rebind(originals)
        listener.spent(time.thread_time() - entered)


def _rebind(replacements: Mapping[int, Callable[..., Any]]) -> None:
    """Bind every module's names of these functions (by `id`) to their replacements.

    All modules are gone through since `from torch.distributed import barrier` makes a name that no home knows of.
    """
    for names in namespaces():
        for name in names.keys() & _PAYLOAD.keys():
            if id(names[name]) in replacements:
                names[name] = replacements[id(names[name])]


def namespaces() -> Iterator[dict[str, Any]]:
    """Where names of functions may stand: the modules, and what a spawned process has run as its main module.

    Of that multiprocessing keeps a copy among the modules; its functions look their names up in another one.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            yield names
    spawned = getattr(sys.modules.get("__mp_main__"), "__dict__", {})
    functions = [value for value in spawned.values() if isinstance(value, FunctionType)]
    yield from {id(one.__globals__): one.__globals__ for one in functions if one.__globals__ is not spawned}.values()


class _Watch:
    """What one `watched` block knows: the calls per group, and on each thread the call that is going on."""

    def __init__(self, listener: Listener, c10d: ModuleType, calls: dict[str, int]) -> None:
        self.on = True
        self._listener = listener
        self._c10d = c10d
        self._lock = threading.Lock()
        self._calls = calls
        self._thread = threading.local()
        self._sites = CallSites(os.path.dirname(c10d.__file__ or ""))

    def wrap(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, made to report its calls."""
        import torch

        places = _places(op, function)
        payload = _PAYLOAD[op]
        # The other flag, `is_compiling`, is set for all threads while one of them compiles.
        traced = torch.compiler.is_dynamo_compiling

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # While a compiler traces through here it has to find torch's own function, which it knows.
            if not self.on or traced():
                return function(*args, **kwargs)
            try:
                arguments = _Arguments(places, args, kwargs)
                outer: list[int] | None = getattr(self._thread, "bytes_inside", None)
                if outer is not None:
                    outer[0] += _bytes(arguments.get(payload))
                    return function(*args, **kwargs)
                return self._outermost(op, function, arguments)
            except BaseException as raised:
                drop_frame(raised)
                raise

        return call

    def _outermost(self, op: str, function: Callable[..., Any], arguments: _Arguments) -> Any:
        began = time.thread_time()
        given = arguments.get("group", "process_group")
        if given is self._c10d.GroupMember.NON_GROUP_MEMBER:
            return function(*arguments.args, **arguments.kwargs)
        call_site = self._sites.find(sys._getframe(2))
        self._listener.begins(op, call_site)
        makes_group = op in _MAKES_GROUP
        group = "" if makes_group else self._name(given)
        sequence = -1 if makes_group else self._next(group)
        payload = _PAYLOAD[op]
        inside = [0]
        error = ""
        result = None
        self._thread.bytes_inside = inside
        called = time.thread_time()
        start = time.perf_counter()
        try:
            result = function(*arguments.args, **arguments.kwargs)
            return result
        except BaseException as raised:
            error = type(raised).__name__
            drop_frame(raised)
            raise
        finally:
            end = time.perf_counter()
            returned = time.thread_time()
            self._thread.bytes_inside = None
            if makes_group and isinstance(result, self._c10d.ProcessGroup):
                group = self._name(result)
                sequence = self._next(group)
                self._listener.group_made(result, group, call_site)
            if sequence == 0 and not error:
                self._tell_group(group, result if makes_group else given)
            self._listener.met(
                Meeting(
                    op=op,
                    group=group,
                    sequence=sequence,
                    start=start,
                    end=end,
                    cpu=returned - called,
                    bytes=_bytes(arguments.get(payload)) if payload else inside[0],
                    call_site=call_site,
                    async_op=bool(arguments.get("async_op")),
                    error=error,
                    own=(called - began) + (time.thread_time() - returned),
                )
            )

    def _name(self, group: Any) -> str:
        if group is None or group is self._c10d.GroupMember.WORLD:
            return WORLD
        return str(getattr(group, "group_name", group))

    def _next(self, group: str) -> int:
        with self._lock:
            sequence = self._calls.get(group, 0)
            self._calls[group] = sequence + 1
            return sequence

    def _tell_group(self, name: str, group: Any) -> None:
        try:
            ranks = tuple(self._c10d.get_process_group_ranks(group))
        except (ValueError, KeyError, RuntimeError):  # destroyed by another thread meanwhile, or no torch group at all
            return
        self._listener.group_seen(name, ranks)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of a call, by parameter name."""

    places: Mapping[str, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def get(self, *names: str) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
            place = self.places.get(name)
            if place is not None and place < len(self.args):
                return self.args[place]
        return None


def _places(op: str, function: Callable[..., Any]) -> dict[str, int]:
    names: tuple[str, ...] = _COMPILED_PARAMETERS.get(op) or tuple(inspect.signature(function).parameters)
    return {name: place for place, name in enumerate(names)}


def _bytes(payload: Any) -> int:
    if payload is None:
        return 0
    tensors = payload if isinstance(payload, (list, tuple)) else (payload,)
    return sum(int(t.numel()) * int(t.element_size()) for t in tensors if hasattr(t, "element_size"))


def drop_frame(raised: BaseException) -> None:
    """Take the frame that has just caught `raised` out of its traceback. With a bare `raise` it doesn't come back."""
    trace = raised.__traceback__
    if trace is not None:
        raised.__traceback__ = trace.tb_next


class CallSites:
    """Finds `file:line` of the code that called into a folder `inside`, such as torch.distributed's."""

    def __init__(self, inside: str) -> None:
        self._inside = inside + os.sep
        try:
            self._here = os.getcwd() + os.sep
        except OSError:  # the working directory was removed
            self._here = ""
        self._names: dict[str, str] = {}

    def find(self, frame: FrameType | None) -> str:
        """`file:line` of the first frame from `frame` on that is outside."""
        while frame is not None:
            path = frame.f_code.co_filename
            if path not in (__file__, HIDDEN) and not path.startswith(self._inside):
                return f"{self._short(path)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _short(self, path: str) -> str:
        """From the package on, or from the working directory on: the rest says where, not what."""
        name = self._names.get(path)
        if name is None:
            _, packages, inside = path.rpartition(f"{os.sep}site-packages{os.sep}")
            name = inside if packages else path.removeprefix(self._here)
            self._names[path] = name
        return name
