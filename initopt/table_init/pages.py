"""Memory for large tables that is zero and untouched: its pages come when the fill first writes to them."""

from __future__ import annotations

import mmap

import torch


def untouched(numel: int, dtype: torch.dtype, *, huge_pages: bool = False) -> torch.Tensor:
    """Return `torch.zeros(numel, dtype=dtype)` of the CPU, private to this process, without having written to it.

    Its storage can't be resized. `huge_pages` asks the kernel for them, which may decline. Raises OSError where there
    is not so much memory.
    """
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
