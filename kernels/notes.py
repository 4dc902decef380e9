"""Notes of the kernels that nobody asked for: a build that takes a while, a fallback that is slower.

They go to the logger `compress.kernels` as warnings, which Python prints on standard error unless a program configures
logging; the command line shows them as its own notes.
"""

import logging
from functools import cache

LOGGER = logging.getLogger("compress.kernels")


@cache
def note_once(message: str) -> None:
    """Log a message the first time that this process has it to say."""
    LOGGER.warning("%s", message)
