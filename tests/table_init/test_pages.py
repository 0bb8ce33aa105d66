"""Memory that nobody has written to is zero, private and page by page."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from initopt.table_init.pages import untouched

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("huge_pages", [False, True])
def test_it_is_torch_zeros(dtype: torch.dtype, huge_pages: bool) -> None:
    memory = untouched(5_000, dtype, huge_pages=huge_pages)
    assert memory.dtype == dtype
    assert memory.is_contiguous()
    assert memory.data_ptr() % PAGE == 0
    assert torch.equal(memory, torch.zeros(5_000, dtype=dtype))
    memory.fill_(3)
    assert int(memory.sum()) == 15_000 or dtype in (torch.float16, torch.bfloat16)


def test_its_pages_come_when_they_are_written() -> None:
    pages = 2_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = untouched(pages * PAGE, torch.uint8)
    made = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[:: 2 * PAGE] = 1
    written = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert made - before < pages // 10
    assert written - made >= pages // 2


def test_a_forked_process_has_its_own() -> None:
    memory = untouched(10, torch.float32)
    pid = os.fork()
    if not pid:
        memory.fill_(1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert memory.sum() == 0


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(OSError, match="memory"):
        untouched(1 << 60, torch.uint8)
