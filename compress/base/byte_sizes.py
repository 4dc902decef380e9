"""Sizes in bytes as people write them: 85MB, 1.5GiB, or a number."""

import re

from compress.base.errors import InputError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SIZE = re.compile(r"\s*(?:([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmg]i?b|b)|([0-9]{1,18}))\s*", re.IGNORECASE)


def parse_bytes(words: str, what: str, allowed: str = "12GB, 800MiB, or a number of bytes") -> int:
    """The bytes of a size like 12GB. Raises InputError for other words, and for zero. what: names it in the message."""
    match = SIZE.fullmatch(words)
    size = 0 if match is None else int(match[3] or float(match[1]) * UNITS[match[2].upper()])
    if not size:
        raise InputError(f"{what} {words!r}; allowed: {allowed}")
    return size
