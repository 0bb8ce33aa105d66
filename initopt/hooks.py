"""Which calls of torch.distributed are meetings of ranks, and how they are seen while they happen.

Every module-level name that is bound to such a function is bound to one that reports the call, and put back at the end.
Only the outermost call counts: what it calls itself is part of it. What a trainer starts from C++ (the gradient
all-reduce of DDP), inside a compiled region, on a `ProcessGroup` object or by methods of a store is not seen, nor are
messages between two ranks, which are no meeting. This file does not know who listens (see `record`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from types import FrameType, FunctionType, ModuleType
from typing import Any, Literal, Protocol

from initopt.own_cost import Spent
from initopt.payload import Checksum, bytes_in, tensors_in

WORLD = "world"
"""The name of the default process group. Any other group has the name that torch gave it, equal on all its members."""

STORE = "store"
"""The name of a group that meets in a store begins with this; the prefix of its keys follows."""

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
    "destroy_process_group": "",
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
    "_all_gather_base": "input_tensor",
    "_broadcast_coalesced": "tensors",
    "_coalescing_manager": "",
    "_new_group_with_tag": "",
    "_reduce_scatter_base": "input",
    "_sync_module_states": "",
    "_verify_param_shape_across_processes": "tensors",
    "_verify_params_across_processes": "params",
}
"""The meetings, each with the parameter that holds what this rank puts in. The ones without get the bytes of the calls
inside them, which is how objects (pickled on the way) and the parameters of DDP get theirs."""

_FUNCTIONAL = {
    "all_gather_into_tensor_coalesced": "self",
    "all_gather_single": "self",
    "all_gather_single_autograd": "self",
    "all_gather_single_coalesced": "self",
    "all_gather_tensor": "self",
    "all_gather_tensor_autograd": "self",
    "all_reduce": "self",
    "all_reduce_coalesced": "self",
    "all_to_all_single": "self",
    "all_to_all_single_autograd": "self",
    "broadcast": "self",
    "reduce_scatter_single": "self",
    "reduce_scatter_single_autograd": "self",
    "reduce_scatter_single_coalesced": "inputs",
    "reduce_scatter_tensor": "self",
    "reduce_scatter_tensor_autograd": "self",
    "reduce_scatter_tensor_coalesced": "inputs",
}
"""The functional collectives, which only hand the work over and return a tensor that waits for it."""

_IN_STORE = {"barrier": "", "get_all": "", "synchronize": ""}
"""Meetings through a store alone. They are named `store.barrier` and so on."""

BARRIERS = frozenset({"barrier", "monitored_barrier", "store.barrier"})
LEFT_TOGETHER = BARRIERS | {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
}
"""The meetings that no rank leaves before the last one came, and that end on all of them at nearly the same moment."""

_NAMES = _PAYLOAD.keys() | _FUNCTIONAL.keys() | _IN_STORE.keys()
_MAKES_GROUP = frozenset({"new_group", "split_group", "_new_group_with_tag"})
_SHAPES_ONLY = frozenset({"_verify_param_shape_across_processes", "_verify_params_across_processes"})
_OBJECTS_IN = frozenset({"all_gather_object", "gather_object"})
_OBJECTS_OUT = frozenset({"broadcast_object_list"})
_ROOTS = ("src", "dst", "broadcast_src")
_COMPILED_PARAMETERS = {
    "_broadcast_coalesced": ("process_group", "tensors", "buffer_size", "src"),
    "_verify_params_across_processes": ("process_group", "params", "logger"),
}
_CALLERS = 4
"""So many functions that led to a call are kept."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One call, from its start to its end in seconds of `time.perf_counter`.

    `sequence` counts the calls of this process on the group; it is -1 where there was nobody to meet (a rank that is no
    member of a new group). `bytes` is what this rank put in. `cpu` is in seconds of the calling thread. `own` are the
    seconds that seeing it cost. With `async_op` the call only handed the work over. `error` is the type of what it
    raised.

    `digest` is a checksum (see `payload`) of what this rank put in, before the call; of objects that one rank gives to
    the others, of what was given; of DDP's check of shapes, of these. `root` is the global rank that gives or takes,
    -1 where all do alike. Who makes a group asks for `ranks`, by a call that every rank of the job must make alike,
    with `options` (backend first); the ranks are empty where members alone make it. `callers` are the functions that
    led to the call, the nearest first, as `file:line name`.
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
    digest: str = ""
    root: int = -1
    ranks: tuple[int, ...] = ()
    options: str = ""
    callers: tuple[str, ...] = ()


class Listener(Protocol):
    """Who wants to know. Called on the thread that made the call; must not raise but where it says so."""

    def met(self, meeting: Meeting) -> None:
        """A call has ended. May raise instead of what a call has failed with."""

    def begins(self, op: str, call_site: str) -> None:
        """A call is about to begin. May raise, which keeps the call from being made."""

    def enters(self, meeting: Meeting) -> None:
        """A call begins: all that is known of it before it ends, `end` being its start. May raise as `begins` may."""

    def around(self, meeting: Meeting, group: Any) -> AbstractContextManager[None]:
        """What the call is made in, within its time. `group` is the one it was given. May raise as `begins` may."""

    def reads_payloads(self) -> bool:
        """Whether what is put in shall be read for a checksum."""

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
    import torch.distributed._functional_collectives as functional
    import torch.distributed.elastic.utils.store as in_store
    import torch.distributed.utils
    import torch.nn.parallel.distributed as ddp
    from torch.distributed import distributed_c10d as c10d

    with Spent() as spent:
        watch = _Watch(listener, c10d, functional, {} if calls is None else calls)
        # A home may already hold somebody else's wrapper, so each distinct function is wrapped, not each name.
        seen: dict[int, Callable[..., Any]] = {}
        homes: list[tuple[ModuleType, Mapping[str, str], _Kind]] = [
            (home, _PAYLOAD, "call") for home in (c10d, dist, torch.distributed.utils, ddp)
        ]
        for home, payloads, kind in [*homes, (functional, _FUNCTIONAL, "functional"), (in_store, _IN_STORE, "store")]:
            for name, payload in payloads.items():
                function = vars(home).get(name)
                if callable(function) and id(function) not in seen:
                    seen[id(function)] = watch.wrap(name, function, payload, kind)
        originals = {id(wrapper): wrapper.__wrapped__ for wrapper in seen.values()}  # type: ignore[attr-defined]
        _rebind(seen)
    listener.spent(spent.seconds)
    try:
        yield
    finally:
        with Spent() as spent:
            watch.on = False
            _rebind(originals)
        listener.spent(spent.seconds)


def _rebind(replacements: Mapping[int, Callable[..., Any]]) -> None:
    """Bind every module's names of these functions (by `id`) to their replacements.

    All modules are gone through since `from torch.distributed import barrier` makes a name that no home knows of.
    """
    for names in namespaces():
        for name in names.keys() & _NAMES:
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


_Kind = Literal["call", "functional", "store"]


class _Inside:
    """What is learned from the calls inside one that takes no tensors itself."""

    def __init__(self, op: str, reads: bool) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self.digest = Checksum()
        self._before = reads and (op in _OBJECTS_IN or op == "_sync_module_states")
        self._after = reads and op in _OBJECTS_OUT
        self._objects = op in _OBJECTS_IN
        self._size: int | None = None

    def before(self, payload: Any) -> None:
        """A call inside begins, with this tensor or these."""
        began = time.thread_time()
        self.bytes += bytes_in(payload)
        if self._before:
            self.digest.add(payload, self._size)
            if self._objects and self._size is None:
                # First come the lengths of the pickles, then these, with noise up to the longest of them.
                (length,) = tensors_in(payload) or (None,)
                if length is not None and length.device.type == "cpu" and length.numel() == 1:
                    self._size = int(length)
        self.seconds += time.thread_time() - began

    def after(self, payload: Any) -> None:
        """A call inside has ended."""
        if self._after:
            began = time.thread_time()
            self.digest.add(payload)
            self.seconds += time.thread_time() - began


class _Watch:
    """What one `watched` block knows: the calls per group, and on each thread the call that is going on."""

    def __init__(self, listener: Listener, c10d: ModuleType, functional: ModuleType, calls: dict[str, int]) -> None:
        self.on = True
        self._listener = listener
        self._c10d = c10d
        self._functional = functional
        self._lock = threading.Lock()
        self._calls = calls
        self._thread = threading.local()
        torch_distributed = os.path.dirname(c10d.__file__ or "")
        # A module's constructor and its calls lead through torch.nn: who made it is of interest.
        self._sites = CallSites(torch_distributed, os.path.join(os.path.dirname(torch_distributed), "nn"))

    def wrap(self, op: str, function: Callable[..., Any], payload: str, kind: _Kind) -> Callable[..., Any]:
        """The function, made to report its calls."""
        import torch

        # The other flag, `is_compiling`, is set for all threads while one of them compiles.
        traced = torch.compiler.is_dynamo_compiling
        places = _places(op, function)
        manager = op == "_coalescing_manager"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # While a compiler traces through here it has to find torch's own function, which it knows.
            if not self.on or traced():
                return function(*args, **kwargs)
            try:
                arguments = _Arguments(places, args, kwargs)
                outer: _Inside | None = getattr(self._thread, "inside", None)
                if outer is None:
                    if not manager:
                        return self._outermost(op, function, arguments, payload, kind)
                    # Messages between two ranks are put together by it as well.
                    if sys._getframe(1).f_code.co_name != "batch_isend_irecv":
                        return self._coalesced(function, arguments)
                    return function(*args, **kwargs)
                tensors = arguments.get(payload) if payload else None
                outer.before(tensors)
                result = function(*args, **kwargs)
                outer.after(tensors)
                return result
            except BaseException as raised:
                drop_frame(raised)
                raise

        return call

    @contextmanager
    def _coalesced(self, function: Callable[..., Any], arguments: _Arguments) -> Iterator[Any]:
        """The meetings of a block that torch makes one of, which happens at its end."""
        # `contextmanager` calls this from its own frame, at the `with` statement.
        with ExitStack() as block:

            def end(*args: Any, **kwargs: Any) -> None:
                block.close()

            inside = self._thread.inside = _Inside("_coalescing_manager", False)
            try:
                yield block.enter_context(function(*arguments.args, **arguments.kwargs))
            except BaseException:
                self._thread.inside = None
                raise
            self._thread.inside = None
            self._outermost("_coalescing_manager", end, arguments, "", "call", inside)

    def _outermost(
        self,
        op: str,
        function: Callable[..., Any],
        arguments: _Arguments,
        payload: str,
        kind: _Kind,
        inside: _Inside | None = None,
    ) -> Any:
        began = time.thread_time()
        given = arguments.get("group", "process_group")
        if given is self._c10d.GroupMember.NON_GROUP_MEMBER:
            return function(*arguments.args, **arguments.kwargs)
        call_site, callers = self._sites.find(sys._getframe(2))
        ends_group = op == "destroy_process_group"
        if not ends_group:
            self._listener.begins(op, call_site)
        makes_group = op in _MAKES_GROUP
        ranks: tuple[int, ...] = ()
        options = ""
        if op == "init_process_group":
            options = _options(arguments)
        if makes_group:
            group, ranks, options = "", *self._asked(op, arguments)
        elif kind == "store":
            op, group = f"{STORE}.{op}", f"{STORE} {arguments.get('key_prefix', 'prefix')}"
        else:
            group = self._name(given, kind)
        sequence = -1 if makes_group or ends_group else self._next(group)
        reads = self._listener.reads_payloads()
        tensors = arguments.get(payload) if payload else None
        if inside is None:
            inside = _Inside(op, reads)
        digest = Checksum(values=op not in _SHAPES_ONLY)
        if reads and payload:
            digest.add(tensors)
        start = time.perf_counter()
        meeting = Meeting(
            op=op,
            group=group,
            sequence=sequence,
            start=start,
            end=start,
            cpu=0.0,
            bytes=bytes_in(tensors) if payload and op not in _SHAPES_ONLY else inside.bytes,
            call_site=call_site,
            async_op=kind == "functional" or bool(arguments.get("async_op", "async_ops")),
            error="",
            own=0.0,
            digest=digest.text,
            root=self._root(given, arguments),
            ranks=ranks,
            options=options,
            callers=callers,
        )
        if not ends_group:
            self._listener.enters(meeting)
        error = ""
        result = None
        self._thread.inside = inside
        called = time.thread_time()
        start = time.perf_counter()
        try:
            with self._listener.around(meeting, given):
                result = function(*arguments.args, **arguments.kwargs)
            return result
        except BaseException as raised:
            error = type(raised).__name__
            drop_frame(raised)
            raise
        finally:
            end = time.perf_counter()
            returned = time.thread_time()
            self._thread.inside = None
            if makes_group and isinstance(result, self._c10d.ProcessGroup):
                group = self._name(result)
                sequence = self._next(group)
                self._listener.group_made(result, group, call_site)
            if sequence == 0 and not error:
                self._tell_group(group, result if makes_group else given, kind, arguments)
            spent = inside.seconds
            self._listener.met(
                replace(
                    meeting,
                    group=group,
                    sequence=sequence,
                    start=start,
                    end=end,
                    cpu=max(0.0, returned - called - spent),
                    bytes=meeting.bytes if payload else inside.bytes,
                    error=error,
                    digest=meeting.digest or inside.digest.text,
                    own=(called - began) + spent + (time.thread_time() - returned),
                )
            )

    def _name(self, group: Any, kind: _Kind = "call") -> str:
        if kind == "functional" and not isinstance(group, self._c10d.ProcessGroup):
            try:
                # There is no public way to learn which group a mesh or a name stands for.
                group = self._c10d._resolve_process_group(self._functional._resolve_group_name(group, ""))
            except (AttributeError, TypeError, ValueError, RuntimeError, AssertionError):
                return str(group)
        if group is None or group is self._c10d.GroupMember.WORLD:
            return WORLD
        return str(getattr(group, "group_name", group))

    def _asked(self, op: str, arguments: _Arguments) -> tuple[tuple[int, ...], str]:
        """The ranks that a new group shall have, if all ranks of the job have to say so, and what else is asked for."""
        options = _options(arguments)
        ranks = arguments.get("ranks")
        if arguments.get("use_local_synchronization") or op == "split_group":
            return (), options
        try:
            if ranks is None:
                ranks = range(self._c10d.get_world_size())
            found = tuple(int(rank) for rank in ranks)
        except (TypeError, ValueError, RuntimeError):  # torch says what is wrong
            return (), options
        return found if arguments.get("sort_ranks") is False else tuple(sorted(found)), options

    def _root(self, group: Any, arguments: _Arguments) -> int:
        within = arguments.get("group_src", "group_dst")
        root = arguments.get(*_ROOTS) if within is None else within
        if not isinstance(root, int):
            # torch takes rank 0 where a call that has a root names none.
            return -1 if arguments.places.keys().isdisjoint(_ROOTS) else 0
        # DDP's own calls count within their group, as do those that say so.
        if within is None and arguments.get("process_group") is None:
            return root
        try:
            return int(self._c10d.get_global_rank(group or self._c10d.GroupMember.WORLD, root))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return root

    def _next(self, group: str) -> int:
        with self._lock:
            sequence = self._calls.get(group, 0)
            self._calls[group] = sequence + 1
            return sequence

    def _tell_group(self, name: str, group: Any, kind: _Kind, arguments: _Arguments) -> None:
        try:
            if kind == "store":
                ranks = tuple(range(int(arguments.get("world_size"))))
            else:
                if kind == "functional":
                    group = None if name == WORLD else self._c10d._resolve_process_group(name)
                ranks = tuple(self._c10d.get_process_group_ranks(group))
        except (TypeError, ValueError, KeyError, RuntimeError):  # destroyed meanwhile, or no torch group at all
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


def _options(arguments: _Arguments) -> str:
    """The backend that a group is made with, then what else was asked for."""
    more = ((name, arguments.get(name)) for name in ("timeout", "pg_options", "backend_options", "device_id"))
    asked = [f"{name}={value}" for name, value in more if value is not None]
    return ", ".join([str(arguments.get("backend") or "default"), *asked])


def _places(op: str, function: Callable[..., Any]) -> dict[str, int]:
    names: tuple[str, ...] = _COMPILED_PARAMETERS.get(op) or tuple(inspect.signature(function).parameters)
    return {name: place for place, name in enumerate(names)}


def drop_frame(raised: BaseException) -> None:
    """Take the frame that has just caught `raised` out of its traceback. With a bare `raise` it doesn't come back.

    On Python 3.10 it does: there the interpreter raises with the traceback that it had when it was caught.
    """
    trace = raised.__traceback__
    if trace is not None:
        raised.__traceback__ = trace.tb_next


def drop_own_frames(raised: BaseException, folder: str) -> None:
    """Take the frames of code in `folder` out of the traceback, unless it was that code which raised."""
    traces = []
    trace = raised.__traceback__
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    kept = [one for one in traces if not one.tb_frame.f_code.co_filename.startswith(folder + os.sep)]
    if not kept or kept[-1] is not traces[-1]:
        return
    for one, following in zip(kept, [*kept[1:], None], strict=True):
        one.tb_next = following
    raised.__traceback__ = kept[0]


def caller_level(*libraries: str) -> int:
    """The `stacklevel` with which the calling function's warning names the line that called into these packages.

    They are named as in `sys.modules`; initopt is one of them anyway, as is what enters its blocks.
    """
    mine = (__name__.partition(".")[0], *libraries)
    level, frame = 1, sys._getframe(1)
    while (outer := frame.f_back) is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in mine and name != contextlib.__name__:
            break
        # These are not counted.
        level += outer.f_code.co_filename != HIDDEN
        frame = outer
    return level


class CallSites:
    """Finds `file:line` of the code that called into folders `inside`, and the functions that led there."""

    def __init__(self, *inside: str) -> None:
        self._inside = tuple(folder + os.sep for folder in inside)
        try:
            self._here = os.getcwd() + os.sep
        except OSError:  # the working directory was removed
            self._here = ""
        self._names: dict[str, str | None] = {}

    def find(self, frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
        """`file:line` of the first frame from `frame` on that is outside, and that frame and its callers."""
        callers: list[str] = []
        while frame is not None and len(callers) < _CALLERS:
            code = frame.f_code
            name = self._short(code.co_filename)
            if name is not None:
                callers.append(f"{name}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        return (callers[0].rpartition(" ")[0] if callers else ""), tuple(callers)

    def _short(self, path: str) -> str | None:
        """From the package on, or from the working directory on: the rest says where, not what. None inside torch."""
        if path not in self._names:
            _, packages, inside = path.rpartition(f"{os.sep}site-packages{os.sep}")
            name: str | None = inside if packages else path.removeprefix(self._here)
            if path in (__file__, HIDDEN, contextlib.__file__) or path.startswith(self._inside):
                name = None
            self._names[path] = name
        return self._names[path]
