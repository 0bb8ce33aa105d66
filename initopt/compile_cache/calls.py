"""How the parts of a model are called: an example given, or what a real step was seen to pass, kept for the next start.

What is seen is seen from outside the compiled code: the observer stands where the module hands its call to that code,
so no hook is there for a guard to fail on, and it passes everything on untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from initopt.compile_cache.schema import Entries, Items, Reader, Schema, SchemaError, fields, of

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMAT = 1
"""Version of the data of `Recorded`. It changes when a key is renamed or changes its meaning."""

_KIND = "recorded calls"
_MOST_CALLS = 8
"""Different calls of one part that are kept."""
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Modes:
    """What compiled code is for, besides its inputs: gradients, training, autocast (device type -> dtype, by name)."""

    grad: bool
    training: bool
    autocast: tuple[tuple[str, str], ...] = ()

    @classmethod
    def now(cls, part: nn.Module) -> Modes:
        """Return the modes of the calling thread, and whether `part` is in training mode."""
        import torch

        casts = [
            kind for kind in _AUTOCAST if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
        names = [str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in casts]
        return cls(torch.is_grad_enabled(), part.training, tuple(zip(casts, names, strict=True)))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread in these modes; the part's own is left as it is."""
        import torch

        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
            yield


@dataclass(frozen=True)
class Call:
    """An example of how a part is called: tensors of the right metadata, whose values don't matter.

    Pass as keywords what the model passes as keywords. Without `modes` those of the thread that warms up hold.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    modes: Modes | None = None


@dataclass(frozen=True)
class Seen:
    """A call of a part as it was seen: what was passed, described, and the modes."""

    args: Schema
    kwargs: Schema
    modes: Modes

    def make(self, device: torch.device) -> Call:
        """Return an example of such a call on the device."""
        return Call(self.args.make(device), self.kwargs.make(device), self.modes)


@dataclass(frozen=True)
class Recorded:
    """What a start-up keeps for the next one: the first batch, if it could be described, and the calls of each part.

    The batch is described as its loader gave it. A part's calls are all different, in the order of the first of each.
    """

    batch: Schema | None
    calls: Mapping[str, tuple[Seen, ...]]

    @classmethod
    def of(cls, batch: Any, calls: Mapping[str, tuple[Seen, ...]]) -> Recorded:
        """Return what to keep of a batch, as its loader gave it, and of what `recording` saw."""
        try:
            return cls(of(batch), dict(calls))
        except SchemaError:
            return cls(None, dict(calls))

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        calls = {name: [_seen_to_data(seen) for seen in all_seen] for name, all_seen in self.calls.items()}
        batch = None if self.batch is None else self.batch.to_data()
        return {"initopt": _KIND, "format": FORMAT, "batch": batch, "calls": calls}

    @classmethod
    def from_data(cls, data: Any) -> Recorded:
        """Read what `to_data` returned. Raises SchemaError for anything else, naming the place in it."""
        reader = Reader()
        try:
            about = fields(data, "initopt", "format", "batch", "calls")
            if about["initopt"] != _KIND or about["format"] != FORMAT:
                raise ValueError(f"these are no {_KIND} of format {FORMAT}")
            if not isinstance(about["calls"], dict):
                raise ValueError("the calls are not given by part")
        except ValueError as error:
            raise SchemaError("", str(error)) from None
        batch = None if about["batch"] is None else reader.schema(about["batch"], "batch")
        return cls(batch, {name: _all_seen(reader, name, calls) for name, calls in about["calls"].items()})


@contextmanager
def recording(parts: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Seen, ...]]]:
    """Look at how the parts, which compile in place, are called inside the block: by part, each different call once.

    What is returned fills while the block runs. Results, guards and compiled code are those of a run without it, and
    nothing of it is left after the block. A call that can't be described is left out, as is a part inside of another
    one, whose code is the other one's, and a part that doesn't compile.
    """
    seen: dict[str, tuple[Seen, ...]] = {}
    with ExitStack() as observers:
        for name, part in outermost(parts).items():
            observers.enter_context(_observed(name, part, seen))
        yield seen


def noted(seen: dict[str, tuple[Seen, ...]], name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
    """Add a call of a part to what was seen, if it can be described and is a new one."""
    # This is a step of the training, which must not fail for it.
    with contextlib.suppress(Exception):
        call = Seen(of(tuple(args)), of(dict(kwargs)), Modes.now(part))
        earlier = seen.get(name, ())
        if call not in earlier and len(earlier) < _MOST_CALLS:
            seen[name] = (*earlier, call)


def outermost(parts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the parts that are inside of no other part."""
    inside = {id(module) for part in parts.values() for module in part.modules() if module is not part}
    return {name: part for name, part in parts.items() if id(part) not in inside}


@contextmanager
def _observed(name: str, part: nn.Module, seen: dict[str, tuple[Seen, ...]]) -> Iterator[None]:
    # Where `part.compile()` puts the code that a call goes to. It has no public name; a torch without it has no calls
    # to see here.
    compiled = getattr(part, "_compiled_call_impl", None)
    if compiled is None:
        yield
        return

    def observer(*args: Any, **kwargs: Any) -> Any:
        noted(seen, name, part, args, kwargs)
        return compiled(*args, **kwargs)

    part._compiled_call_impl = observer
    try:
        yield
    finally:
        # Unless it was compiled again meanwhile.
        if part._compiled_call_impl is observer:
            part._compiled_call_impl = compiled


def _seen_to_data(seen: Seen) -> dict[str, Any]:
    modes = {**vars(seen.modes), "autocast": [list(pair) for pair in seen.modes.autocast]}
    return {"args": seen.args.to_data(), "kwargs": seen.kwargs.to_data(), "modes": modes}


def _all_seen(reader: Reader, name: str, data: Any) -> tuple[Seen, ...]:
    if not isinstance(data, list) or len(data) > _MOST_CALLS:
        raise SchemaError(name, f"it is no list of at most {_MOST_CALLS} calls")
    return tuple(_seen(reader, f"{name}[{index}]", call) for index, call in enumerate(data))


def _seen(reader: Reader, place: str, data: Any) -> Seen:
    try:
        about = fields(data, "args", "kwargs", "modes")
        modes = _modes(fields(about["modes"], "grad", "training", "autocast"))
    except ValueError as error:
        raise SchemaError(place, str(error)) from None
    args, kwargs = reader.schema(about["args"], f"{place}.args"), reader.schema(about["kwargs"], f"{place}.kwargs")
    if not isinstance(args, Items) or args.kind != "tuple" or not isinstance(kwargs, Entries) or kwargs.path:
        raise SchemaError(place, "its arguments are no tuple and dict")
    return Seen(args, kwargs, modes)


def _modes(data: Mapping[str, Any]) -> Modes:
    casts = data["autocast"]
    if type(data["grad"]) is not bool or type(data["training"]) is not bool:
        raise ValueError("its modes are true or false")
    if not isinstance(casts, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and pair[0] in _AUTOCAST and pair[1] in ("bfloat16", "float16")
        for pair in casts
    ):
        raise ValueError("autocast is a list of pairs of a device and a dtype")
    return Modes(data["grad"], data["training"], tuple((kind, dtype) for kind, dtype in casts))
