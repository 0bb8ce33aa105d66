"""torch's generator of a CUDA device, moved on by what a `uniform_` would have drawn.

It is a Philox counter: each launch of a fill moves its offset by a number that follows from the number of values and
from the device. The rule is torch's own (2.13), so on each device it is held against real fills before it is used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_THREADS = 256
_AT_ONCE = 4
"""Numbers that a thread makes of one step of its counter, and the steps that a launch reserves for them."""

_LARGEST = 1 << 31
"""Bytes from which on torch splits a fill into several launches."""


def offset_after(offset: int, numel: int, device: Any) -> int:
    """Return the offset after a fill of `numel` floats of 32 bits or less from `offset`.

    `device` has `multi_processor_count` and `max_threads_per_multi_processor`.
    """
    blocks: int = -(-numel // (_THREADS * _AT_ONCE))
    blocks = min(blocks, device.multi_processor_count * (device.max_threads_per_multi_processor // _THREADS))
    return offset + -(-numel // (_THREADS * blocks * _AT_ONCE)) * _AT_ONCE


def can_skip(tensor: torch.Tensor) -> bool:
    """Whether a `uniform_` of this tensor can be left out and the generator of its device moved on instead."""
    if tensor.device.type != "cuda" or not tensor.numel() or tensor.numel() * tensor.element_size() >= _LARGEST:
        return False
    return tensor.dtype in (torch.float16, torch.bfloat16, torch.float32) and _holds(tensor.device, tensor.dtype)


def skip(tensor: torch.Tensor) -> torch.Tensor:
    """Move the generator of the tensor's device on by a `uniform_` of it; returns the state that it had before."""
    generator = _generator(tensor.device)
    state: torch.Tensor = generator.get_state()
    about = torch.cuda.get_device_properties(tensor.device)
    generator.set_offset(offset_after(generator.get_offset(), tensor.numel(), about))
    return state


def fill_from(tensor: torch.Tensor, state: torch.Tensor, low: float, high: float) -> None:
    """Make the `uniform_` that was skipped, from the state before it; the generator stays where it is."""
    generator = _generator(tensor.device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        tensor.uniform_(low, high)
    finally:
        generator.set_state(now)


def _generator(device: torch.device) -> Any:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@functools.cache
def _holds(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the rule is that of this torch on this device: held against a few fills, after which all is as before."""
    generator, about = _generator(device), torch.cuda.get_device_properties(device)
    before = generator.get_state()
    try:
        for numel in (1, 1_000, 1_025, 1_000_003, 5_000_000):
            start = generator.get_offset()
            torch.empty(numel, dtype=dtype, device=device).uniform_()
            if generator.get_offset() != offset_after(start, numel, about):
                return False
    except (AttributeError, RuntimeError):
        return False
    finally:
        generator.set_state(before)
    return True
