"""What a process does with memory that it has freed."""

import json
import subprocess
import sys

import pytest

from compress.base.memory import _library

# In a process of its own: a thread that once got no memory from the heap takes it elsewhere from then on.
KEPT = """
import json, resource, torch
from compress.base.memory import anonymous_bytes, keeping_freed

def faults_of_half_a_gigabyte():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults_of_half_a_gigabyte()
with keeping_freed():
    faults_of_half_a_gigabyte()
    inside = faults_of_half_a_gigabyte()
    held = anonymous_bytes()
print(json.dumps([before, inside, held - anonymous_bytes()]))
"""
PIECE = 2**26  # bytes of a tensor above


@pytest.mark.skipif(_library() is None, reason="the C library is not glibc")
def test_freed_memory_is_kept_inside_a_context_alone():
    done = subprocess.run([sys.executable, "-c", KEPT], check=True, capture_output=True, text=True)
    before, inside, given_back = json.loads(done.stdout)
    assert inside < before / 4
    assert given_back > 0.9 * PIECE
