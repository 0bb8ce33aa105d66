"""The lanes `cuda:<n>`: a step runs with its device set, on a side stream, which is synchronised when the step ends.

Written against `torch.accelerator` and `torch.Stream`, so any accelerator that torch knows can stand behind it; the
tests put a stub there, since they run without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from initopt.plugins import hookimpl


@hookimpl
def initopt_lane_context(lane: str) -> AbstractContextManager[object] | None:
    """Return the context for `cuda:<n>`, None for other lanes."""
    kind, _, index = lane.partition(":")
    return side_stream(int(index)) if kind == "cuda" else None


@contextmanager
def side_stream(index: int) -> Iterator[None]:
    """Run a block on a stream of its own on device `index`, after the work that the device's current stream holds now.

    The current device and stream are kept per thread by torch, so a lane has to set both. The stream is synchronised
    at the end, so that a value handed to another lane is ready there. Device and stream are then what they were, since
    without overlap the step runs in the caller's own thread. Raises RuntimeError if there is no such device.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        raise RuntimeError(f"lane 'cuda:{index}' needs an accelerator, and torch sees none on this host")
    count = torch.accelerator.device_count()
    if index >= count:
        raise RuntimeError(f"lane 'cuda:{index}' names a device that this host lacks: torch sees {count}")
    device = torch.device(accelerator.type, index)
    device_before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    try:
        before = torch.accelerator.current_stream(device)
        side = torch.Stream(device=device)
        side.wait_stream(before)
        torch.accelerator.set_stream(side)
        try:
            yield
        finally:
            try:
                side.synchronize()
            finally:
                torch.accelerator.set_stream(before)
    finally:
        torch.accelerator.set_device_index(device_before)
