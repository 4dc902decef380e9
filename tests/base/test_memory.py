"""What a process does with memory that it has freed."""

import json
import subprocess
import sys

import pytest

from compress.base.memory import _library

# In a process of its own: a thread that once got no memory from the heap takes it elsewhere from then on.
FAULTS = """
import json, resource, torch
from compress.base.memory import keeping_freed

def of_half_a_gigabyte():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = of_half_a_gigabyte()
with keeping_freed():
    of_half_a_gigabyte()
    kept = of_half_a_gigabyte()
print(json.dumps([before, kept, of_half_a_gigabyte()]))
"""


@pytest.mark.skipif(_library() is None, reason="the C library is not glibc")
def test_freed_memory_is_kept_inside_a_context_alone():
    done = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    before, kept, after = json.loads(done.stdout)
    assert kept < before / 4
    assert after > before / 4
