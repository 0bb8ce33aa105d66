"""The fills that a block of code asks torch for, collected before they are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from initopt.rng import draws
from initopt.table_init import philox
from initopt.table_init.fills import ALIGNED, Fill, overlap, splits

_ASKS = frozenset(
    (
        *("__get__", "_set_grad_enabled", "dim", "element_size", "empty_like", "is_contiguous", "is_floating_point"),
        *("ndimension", "nelement", "new_empty", "new_tensor", "numel", "requires_grad_", "size", "storage_offset"),
        "stride",
    )
)
"""Functions that tell of a tensor, give another name to it, or set a mode; they leave values and generators alone."""

_WRITES_ALL = frozenset(("fill_", "normal_", "uniform_", "zero_"))


class Fills(Protocol):
    """What is done with fills and with the memory that they are of."""

    def settle(self, fills: Sequence[Fill], *, wanted: bool) -> None:
        """Take fills that follow each other. With `wanted` something may look at the values next."""

    def skip(self, tensor: torch.Tensor, low: float, high: float) -> bool:
        """Take a `uniform_` of a tensor of an accelerator and move its generator on, or return False."""

    def overwritten(self, tensor: torch.Tensor) -> None:
        """See that all of a tensor is about to be written."""

    def touched(self, tensor: torch.Tensor) -> None:
        """See that something else is about to be done with a tensor."""


class Watch(TorchFunctionMode):
    """Hands the fills of a block from torch's default generators to `fills`.

    Those of the CPU are handed over together, before anything else can see a result. With `at_once` each is handed
    over alone: the code between them is not known and may look at the generator.
    """

    def __init__(self, fills: Fills, *, at_once: bool = False) -> None:
        super().__init__()
        self._to, self._at_once = fills, at_once
        self._fills: list[Fill] = []

    def __exit__(self, kind: Any, *about: Any) -> None:
        super().__exit__(kind, *about)  # type: ignore[no-untyped-call]
        if kind is None:
            self._settle(wanted=False)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _COMPOSED:
            tensor = args[0] if args else kwargs["tensor"]
            shown = _Shown(tensor, self)
            function(*((shown, *args[1:]) if args else ()), **(kwargs if args else {**kwargs, "tensor": shown}))
            return tensor
        numbers = _numbers(function, args, kwargs)
        # A rank holds an empty tensor for a table that is elsewhere.
        if numbers is not None and (not args[0].numel() or self._takes(function.__name__, args[0], numbers)):
            return args[0]
        name = getattr(function, "__name__", "")
        tensors = [value for value in _flat((*args, *kwargs.values())) if _is_plain(value)]
        if name not in _ASKS or any(overlap(tensor, fill.values) for tensor in tensors for fill in self._fills):
            self._settle(wanted=True)
            for tensor in tensors:
                if name in _WRITES_ALL and tensor is args[0] and tensor.is_contiguous():
                    self._to.overwritten(tensor)
                else:
                    self._to.touched(tensor)
        return function(*args, **kwargs)

    def _takes(self, method: str, tensor: torch.Tensor, numbers: tuple[float, float]) -> bool:
        # What torch refuses it shall refuse by itself.
        refused = tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
        if refused or not _is_plain(tensor) or not tensor.is_contiguous():
            return False
        if tensor.device.type != "cpu":
            return method == "uniform_" and philox.can_skip(tensor) and self._to.skip(tensor.detach(), *numbers)
        if tensor.numel() < ALIGNED or not splits(method, tensor.dtype):
            return False
        self._to.overwritten(tensor)
        self._fills.append(Fill(tensor.detach().view(-1), method, numbers))
        if self._at_once:
            self._settle(wanted=True)
        return True

    def _settle(self, *, wanted: bool) -> None:
        fills, self._fills = self._fills, []
        if fills:
            self._to.settle(fills, wanted=wanted)


class _Shown:
    """A tensor for a function of `torch.nn.init` that hands itself over to the mode before it does anything.

    There it runs without the mode, so what it does to the tensor is shown to the mode here.
    """

    def __init__(self, tensor: torch.Tensor, watch: Watch) -> None:
        self._tensor, self._watch = tensor, watch

    def __getattr__(self, name: str) -> Any:
        if name == "__torch_function__":
            raise AttributeError(name)
        found = getattr(self._tensor, name)
        if not callable(found):
            return found
        method = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: self._watch.__torch_function__(method, (), (self._tensor, *args), kwargs)


_COMPOSED = (nn.init.constant_, nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_)

_METHODS = {torch.Tensor.uniform_: ("from", "to"), torch.Tensor.normal_: ("mean", "std")}


def _numbers(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, float] | None:
    """The two numbers of a fill from a default generator; None for all other calls, and for what torch refuses."""
    names = _METHODS.get(function)
    if names is None or not draws(function, args, kwargs):
        return None
    first, second = (
        args[place] if place < len(args) else kwargs.get(name, default)
        for place, name, default in zip((1, 2), names, (0.0, 1.0), strict=True)
    )
    if not isinstance(first, (int, float)) or not isinstance(second, (int, float)):
        return None
    valid = first <= second if names[0] == "from" else second >= 0
    return (float(first), float(second)) if valid else None


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own, and does not stand for another tensor or for none."""
    own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return own and tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided
