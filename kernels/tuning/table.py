"""The configurations that were measured to be fastest: a table of entries, looked up by device and sizes.

    {"format": 2, "about": "...", "entries": [
     {"op": "weight_only", "bits": 4, "group_size": 128, "zero": false, "dtype": "bfloat16",
      "device": "NVIDIA H200", "M": 16, "N": 4096, "K": 4096,
      "run": {"block_m": 16, "block_n": 128, "split_k": 4, "num_warps": 4, "num_stages": 3},
      "measured": {...}}]}

op         what multiplies planar words by tokens as they are or in int8, int8 rows by tokens in int8
zero       whether there are zero points: of the weight, of the activations for w8a8
dtype      of the activations that are multiplied, of the result for w8a8

device     the name of a GPU, or its compute capability ("9.0") for every GPU that has it and no entry of its own
M          a bucket: the smallest power of two that is at least the number of tokens
N, K       sizes; a product whose own sizes are not there takes the nearest entry of its class, which holds the sizes
           that round to the same powers of two
run        a `Shape`, or "dequantize"
measured   where the figure comes from; not read here

Two tables are read, once: `tuned.json` beside this file, and `user_table()`, which `tune` writes and which comes first.
A table that cannot be read is left out with a warning: a cache must not stop a forward pass.
"""

import json
import math
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

from compress.kernels.cache_folder import cache_directory
from compress.kernels.errors import InputError

FORMAT = 2
SHIPPED = Path(__file__).resolve().with_name("tuned.json")
DEQUANTIZE: Final = "dequantize"
OPS = ("weight_only", "int8_activation", "w8a8")
DTYPES = ("float16", "bfloat16", "float32")
SIZES = ("bits", "group_size", "M", "N", "K")
LARGEST_TILE = 256


@dataclass(frozen=True)
class Shape:
    """One compiled configuration: tokens, rows and programs per tile, warps, depth of the load pipeline."""

    block_m: int
    block_n: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def scales_sums(self, group_size: int, bits: int = 4) -> bool:
        """True where scaling the sums takes fewer instructions than scaling the weights.

        BLOCK_M multiply-adds per row and group against half a multiply per weight and the wait for each matrix
        instruction; read off the compiled loops. A group is at most one step of the loop.
        """
        least = 2 if bits == 4 and group_size >= 64 else 4
        return group_size != -1 and least * self.block_m <= min(group_size, 128)

    def constants(self) -> dict[str, int]:
        """Constants and options with which a kernel of Triton is compiled for this configuration."""
        tile = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "SPLIT_K": self.split_k}
        return {**tile, "num_warps": self.num_warps, "num_stages": self.num_stages}


Choice = Shape | Literal["dequantize"]


@dataclass(frozen=True)
class ProductKind:
    """The properties shared by products that can use one entry: one compiled kernel, apart from its configuration."""

    op: str
    bits: int
    group_size: int
    zero: bool
    dtype: str


Key = tuple[ProductKind, str, int]


@dataclass(frozen=True)
class TunedEntry:
    """The configuration that runs a product of these sizes on a device; M is a bucket."""

    kind: ProductKind
    device: str
    M: int
    N: int
    K: int
    run: Choice
    measured: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> Key:
        return self.kind, self.device, self.M

    def stored(self) -> dict[str, Any]:
        """The entry as JSON in the table."""
        given = asdict(self)
        return given.pop("kind") | given


def bucket(M: int) -> int:
    """The smallest power of two that is at least M."""
    return 1 << (M - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's function of this name takes 12 us outside of kernels."""
    return -(-a // b)


def size_class(n: int) -> int:
    """The exponent of the power of two nearest to n, by ratio."""
    return round(math.log2(n))


def user_table() -> Path:
    """The file that `tune` writes, in the cache directory of the user."""
    return cache_directory() / "tuned.json"


def parse(text: str, source: Path) -> list[TunedEntry]:
    """Entries of a table. Raises InputError, naming the entry, for anything that could not run."""

    def refuse(problem: str) -> InputError:
        return InputError(f"{source}: {problem}; delete the file or write it again with tune")

    try:
        content = json.loads(text)
    except json.JSONDecodeError as reason:
        raise refuse(f"not JSON ({reason})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise refuse(f"not a table of format {FORMAT}")
    found = content.get("entries")
    if not isinstance(found, list):
        raise refuse("no list of entries")
    entries = []
    for i, entry in enumerate(found):
        problem = _problem(entry)
        if problem:
            raise refuse(f"entry {i}: {problem}")
        run = entry["run"] if entry["run"] == DEQUANTIZE else Shape(**entry["run"])
        kind = ProductKind(**{f.name: entry[f.name] for f in fields(ProductKind)})
        sizes = (entry["device"], entry["M"], entry["N"], entry["K"])
        entries.append(TunedEntry(kind, *sizes, run, entry.get("measured", {})))
    return entries


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _problem(given: object) -> str | None:
    """The reason why a JSON value is not a valid entry; None where it is."""
    if not isinstance(given, dict):
        return f"{given!r} is not an object"
    if given.get("op") not in OPS:
        return f"op {given.get('op')!r}; allowed: {', '.join(OPS)}"
    if not isinstance(given.get("device"), str):
        return f"device {given.get('device')!r} is not a name"
    if not isinstance(given.get("zero"), bool):
        return f"zero {given.get('zero')!r}; allowed: true, false"
    if given.get("dtype") not in DTYPES:
        return f"dtype {given.get('dtype')!r}; allowed: {', '.join(DTYPES)}"
    for name in SIZES:
        value = given.get(name)
        if not _whole(value) or (value < 1 and not (name == "group_size" and value == -1)):
            return f"{name} {value!r} is not a size"
    if given["M"] != bucket(given["M"]):
        return f"M {given['M']} is not a power of two"
    run = given.get("run")
    if run == DEQUANTIZE:
        return None if given["op"] == "weight_only" else f"{given['op']} cannot dequantize"
    names = {f.name for f in fields(Shape)}
    if not isinstance(run, dict) or not {"block_m", "block_n"} <= run.keys() <= names:
        return f"run {run!r}; allowed: {DEQUANTIZE!r} or an object with {', '.join(sorted(names))}"
    for name, value in run.items():
        power = _whole(value) and 0 < value <= LARGEST_TILE and value == bucket(value)
        if not (power or (name == "num_stages" and _whole(value) and 0 < value < LARGEST_TILE)):
            return f"{name} {value!r}; allowed: a power of two to {LARGEST_TILE}"
        if name.startswith("block") and value < 16:  # the least that a matrix instruction takes
            return f"{name} {value!r}; at least 16 is needed"
    return None


def read(path: Path) -> list[TunedEntry]:
    """Entries of the table in a file; none where there is no file. Raises InputError."""
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as reason:
        raise InputError(f"{path} cannot be read: {reason}") from None


def write(path: Path, entries: Iterable[TunedEntry], about: str) -> None:
    """Add entries to the table in a file, replacing those of the same device and sizes. Raises InputError where the
    file holds something other than a table."""
    merged = {(e.key, e.N, e.K): e for e in [*read(path), *entries]}
    content = {"format": FORMAT, "about": about, "entries": [e.stored() for e in merged.values()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    Path(file.name).replace(path)
    forget()


@cache
def _tables() -> tuple[dict[Key, list[TunedEntry]], ...]:
    """The user's table and the shipped one, by key."""
    tables = []
    for path in (user_table(), SHIPPED):
        table = defaultdict(list)
        try:
            for entry in read(path):
                table[entry.key].append(entry)
        except InputError as reason:
            warnings.warn(f"tuned configurations left out: {reason}", stacklevel=2)
        tables.append(dict(table))
    return tuple(tables)


@cache
def _nearest(kind: ProductKind, devices: tuple[str, ...], M: int, N: int, K: int) -> Choice | None:
    found = [table.get((kind, name, M), []) for name in devices for table in _tables()]
    for entries in found:
        for entry in entries:
            if (entry.N, entry.K) == (N, K):
                return entry.run
    for entries in found:
        alike = [e for e in entries if (size_class(e.N), size_class(e.K)) == (size_class(N), size_class(K))]
        if alike:
            return min(alike, key=lambda e: abs(math.log(e.N / N)) + abs(math.log(e.K / K))).run
    return None


def lookup(kind: ProductKind, devices: tuple[str, ...], M: int, N: int, K: int) -> Choice | None:
    """The fastest measured configuration for a product of M tokens, N outputs and K inputs. devices: names of one
    device, the most specific first. None where no similar product was measured."""
    if not any(_tables()) or not min(M, N, K):
        return None
    return _nearest(kind, devices, bucket(M), N, K)


def forget() -> None:
    """Drop the tables from memory; the next look-up reads them again."""
    _tables.cache_clear()
    _nearest.cache_clear()
