"""Random changes to values, JSON, text and files, each decided by a generator of random numbers alone."""

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    16,
    255,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e-30,
    1e308,
    float("inf"),
    float("nan"),
)
WORDS = (
    *("", " ", "a", "None", "null", "true", "-1", "0", "1e999", "nan", "../x", "/", "/dev/null", "~", ".", "..", "*"),
    *(
        "\0",
        "\n",
        "\x1b[31mred",
        "é",
        "\ud83d",
        "٣",
        "字" * 40,
        "x" * 5000,
        "{}",
        "[]",
        "%s",
        "$HOME",
        "__class__",
        "a.b",
    ),
    *(
        "float32",
        "bfloat16",
        "int4",
        "w4a16",
        "w4a4",
        "q4_k_m",
        "gptq",
        "lm_head",
        "model.layers.0",
        "auto",
        "cpu",
        "cuda",
    ),
)
EMPTY: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": None}, [None, 1, "x"])
MANY = 3  # the most changes to one file


def value(chance: random.Random) -> Any:
    """A value that few programs expect."""
    return copy.deepcopy(chance.choice(chance.choice((NUMBERS, WORDS, EMPTY))))


def places(whole: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value of JSON."""
    found, left = [], [whole]
    while left:
        each = left.pop()
        keys = each if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        found += [(each, key) for key in keys]
        left += [each[key] for key in keys]
    return found


def changed(whole: Any, chance: random.Random) -> Any:
    """A copy of a value of JSON with one value replaced, removed, renamed, repeated or moved."""
    whole = copy.deepcopy(whole)
    found = places(whole)
    if not found or chance.random() < 0.02:
        return value(chance)
    inside, key = chance.choice(found)
    how = chance.randrange(6)
    if how == 0:
        del inside[key]
    elif how == 1 and isinstance(inside, dict):
        inside[str(value(chance))] = inside.pop(key)
    elif how == 2:
        other, at = chance.choice(found)
        inside[key] = copy.deepcopy(other[at])
    elif how == 3 and isinstance(inside[key], str):
        inside[key] = text(inside[key], chance)
    elif how == 4 and isinstance(inside[key], int | float) and not isinstance(inside[key], bool):
        inside[key] = chance.choice((inside[key] + 1, inside[key] - 1, inside[key] * 2, -inside[key], inside[key] / 2))
    else:
        inside[key] = value(chance)
    return whole


def text(given: str, chance: random.Random) -> str:
    """A text in which a piece is cut out, repeated, replaced or swapped."""
    if not given:
        return str(value(chance))
    start = chance.randrange(len(given))
    end = min(len(given), start + chance.choice((1, 1, 2, 8, 100)))
    piece = chance.choice(
        ("", given[start:end] * 2, str(value(chance)), given[start:end].swapcase(), given[start:end][::-1])
    )
    return given[:start] + piece + given[end:]


def data(given: bytes, chance: random.Random) -> bytes:
    """Bytes that are cut short, longer, or have a piece overwritten."""
    how = chance.randrange(5)
    start = chance.randrange(len(given) + 1)
    if how == 0:
        return given[:start]
    if how == 1:
        return given + chance.randbytes(chance.choice((1, 8, 1000)))
    piece = chance.choice((b"\0", b"\xff")) * 8 if how == 2 else chance.randbytes(chance.choice((1, 4, 64)))
    return given[:start] + piece + given[start + len(piece) :]


def in_json(path: Path, chance: random.Random) -> None:
    """Change values of a JSON file, or, one time in six, its text."""
    if chance.random() < 1 / 6:
        path.write_bytes(data(path.read_bytes(), chance))
        return
    whole = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(chance.randint(1, MANY)):
        whole = changed(whole, chance)
    path.write_text(json.dumps(whole), encoding="utf-8")


def in_lines(path: Path, chance: random.Random) -> None:
    """Change a text file."""
    given = path.read_text(encoding="utf-8")
    for _ in range(chance.randint(1, MANY)):
        given = text(given, chance)
    path.write_bytes(given.encode("utf-8", "surrogatepass"))


def in_bytes(path: Path, chance: random.Random) -> None:
    """Change the bytes of a file."""
    path.write_bytes(data(path.read_bytes(), chance))


def in_safetensors(path: Path, chance: random.Random) -> None:
    """Change the header of a safetensors file, or, one time in three, any of its bytes."""
    whole = path.read_bytes()
    if chance.random() < 1 / 3:
        path.write_bytes(data(whole, chance))
        return
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    for _ in range(chance.randint(1, MANY)):
        header = changed(header, chance)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + whole[8 + length :])


Change = Callable[[Path, random.Random], None]
