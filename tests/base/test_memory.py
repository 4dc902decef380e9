"""What a process does with memory that it has freed."""

import resource

import pytest
import torch

from compress.base.memory import _library, keeping_freed

MIB = 2**20


def page_faults() -> int:
    """Those of taking and freeing 512 MiB in eight pieces."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16 * MIB)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(_library() is None, reason="the C library is not glibc")
def test_freed_memory_is_kept_inside_a_context_alone():
    before = page_faults()
    with keeping_freed():
        page_faults()
        kept = page_faults()
    assert kept < before / 4
    assert page_faults() > before / 4
