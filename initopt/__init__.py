"""initopt: the start-up of a TorchRec trainer as a graph of steps: recorded, checked, overlapped, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from initopt.record import Recorder as Recorder
    from initopt.record import step as step
    from initopt.runs import Run as Run

_HOME = {"Recorder": "record", "Run": "runs", "step": "record"}

__all__ = ["Recorder", "Run", "step"]


def __getattr__(name: str) -> Any:
    # A worker that imports initopt for one of its names doesn't pay for the others.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # asked for once only: `step` may stand in a loop
    return value


def __dir__() -> list[str]:
    return __all__
