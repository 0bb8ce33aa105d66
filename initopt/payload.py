"""What a rank puts into a meeting: how many bytes, and a checksum by which ranks can be compared.

Two ranks whose checksums are equal hold the same bytes, in tensors of the same type and shape. Of a large payload only
samples are read, and its checksum says so. Nothing is copied, and nothing is read from a device: that would wait for
it. This file does not import torch.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

WHOLE = 1 << 20
"""Bytes. A payload of at most this size is read whole: about a millisecond."""

UNKNOWN = "unknown"
"""The checksum of what can't be read where it is: on a device, without memory of its own, or in an odd layout."""

SAMPLED = "~"
"""What the checksum of a payload begins with that was read in samples only: equal ones make equality likely."""

_SAMPLE = 1 << 15
_MOST_TENSORS = 4096


def tensors_in(payload: Any) -> list[Any]:
    """The tensors of an argument that is a tensor, a sequence of them, or something else."""
    found = payload if isinstance(payload, (list, tuple)) else (payload,)
    return [one for one in found if hasattr(one, "element_size")]


def bytes_in(payload: Any) -> int:
    """The bytes of the tensors in an argument."""
    return sum(int(tensor.numel()) * int(tensor.element_size()) for tensor in tensors_in(payload))


class Checksum:
    """The checksum of a payload that may come in parts. `text` is empty as long as there was none."""

    def __init__(self, *, values: bool = True) -> None:
        """Without `values` only types and shapes count."""
        self._hash = hashlib.sha256()
        self._values = values
        self._sampled = False
        self._parts = 0
        self._readable = True

    def add(self, payload: Any, first: int | None = None) -> None:
        """Take in the tensors of an argument, of the only one no more than its `first` elements."""
        tensors = tensors_in(payload)
        if not self._readable or not tensors:
            return
        self._parts += 1
        whole = bytes_in(tensors) <= WHOLE
        if len(tensors) > _MOST_TENSORS:
            self._sampled, tensors = True, tensors[:_MOST_TENSORS]
        room = WHOLE // len(tensors)
        try:
            for tensor in tensors:
                self._add(tensor if first is None else tensor[:first], None if whole else room)
        except Exception:  # a subclass that does not do what it should: no concern of the job's
            self._readable = False

    @property
    def text(self) -> str:
        """16 hexadecimal digits, SAMPLED before them if not all was read; UNKNOWN; or empty."""
        if not self._parts:
            return ""
        if not self._readable:
            return UNKNOWN
        return (SAMPLED if self._sampled else "") + self._hash.hexdigest()[:16]

    def _add(self, tensor: Any, room: int | None) -> None:
        self._hash.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if not self._values:
            return
        plain = type(tensor).__name__ in ("Tensor", "Parameter") and tensor.device.type == "cpu"
        size = int(tensor.numel()) * int(tensor.element_size())
        if not plain or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            self._readable = False
        elif size:
            start = tensor.data_ptr()
            if room is None or size <= room:
                self._hash.update((ctypes.c_char * size).from_address(start))
                return
            self._sampled = True
            each = min(_SAMPLE, room)
            count = max(1, room // each)
            for i in range(count):
                place = (size - each) * i // max(1, count - 1)
                self._hash.update((ctypes.c_char * each).from_address(start + place))
