"""Notes of the kernels that nobody asked for: a build that takes a while, a fallback that is slower.

They go to the logger `compress.kernels`, a build as information, a fallback as a warning, which Python prints on
standard error unless a program configures logging; the command line shows both as its own notes.
"""

import logging
from functools import cache

LOGGER = logging.getLogger("compress.kernels")


@cache
def note_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message the first time that this process has it to say."""
    LOGGER.log(level, "%s", message)
