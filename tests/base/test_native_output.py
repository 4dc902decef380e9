"""Lines that native code prints are kept out of standard output, and nothing else is."""

import subprocess
import sys

PROGRAM = """
import ctypes
from compress.base.native_output import drop_native_output
libc = ctypes.CDLL(None)
print("before")
libc.printf(b"native before\\n")
with drop_native_output():
    libc.printf(b"native inside\\n")
print("after")
"""


def test_what_native_code_prints_inside_is_dropped_and_the_rest_stays():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["after", "before", "native before"]
