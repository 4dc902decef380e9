"""The weight files of a directory, each opened once: names, headers and values of their tensors."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.base.regular_files import special
from compress.base.schema import fits
from compress.checkpoint.files import INDEX, OWN_INDEX, OWN_WHOLE, WHOLE, read_json
from compress.checkpoint.read.configuration import Header, Index
from compress.checkpoint.read.content import Stamp, stamp_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


NAMING = "transformers_weights"  # a key of config.json
NAMEABLE = (".safetensors", ".safetensors.index.json")
SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")  # transformers' distributed checkpoints


class WeightFiles(Mapping[str, Path]):
    """{tensor: file} of complete weight files. Files stay open and mapped for the life of this object, and are opened
    once. Raises CheckpointError for a damaged file.

    headers: {tensor: (shape, safetensors' name of its dtype)}. stamps: of the files, as they were opened. remarks: what
    a person should know of how they are read.
    """

    remarks: Sequence[str] = ()

    def __init__(self, files: Iterable[Path]) -> None:
        self.headers: dict[str, Header] = {}
        self._holders: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self.stamps: dict[Path, Stamp] = {}
        for path in files:
            try:
                self.stamps[path] = stamp_of(path)
                file = self._open[path] = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    piece = file.get_slice(name)
                    self.headers[name] = (tuple(piece.get_shape()), piece.get_dtype())
                    self._holders[name] = path
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or incomplete ({error}); fetch it again") from None

    def __getitem__(self, name: str) -> Path:
        return self._holders[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def stored(self) -> Mapping[str, Header]:
        """`headers` of the tensors as the files hold them."""
        return self.headers

    def __deepcopy__(self, memo: Any) -> "WeightFiles":
        return self  # transformers copies configurations with everything they carry; open files cannot be copied

    @property
    def of_variant(self) -> bool:
        """True for weight files of our own variant (`files.VARIANT`)."""
        return all(path.name.startswith(OWN_WHOLE.removesuffix(".safetensors")) for path in self._open)

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return sorted(self._open)

    def expect(self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        """Raises CheckpointError for a tensor that is missing, or has not this shape and one of these dtypes."""
        if name not in self:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        found, dtype = self.headers[name]
        if found != tuple(shape) or DTYPES.get(dtype) not in dtypes:
            allowed = " or ".join(each for each, kind in DTYPES.items() if kind in dtypes)
            raise CheckpointError(f"{name} is {dtype} {list(found)}; its layer needs {allowed} {list(shape)}")

    def tensor(self, name: str) -> Tensor:
        """One tensor, mapped: its values are read on first access."""
        return self._open[self._holders[name]].get_tensor(name)

    def stored_tensor(self, name: str) -> Tensor:
        """One tensor as the files hold it."""
        return self.tensor(name)

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name."""
        return {name: self.tensor(name) for name in names}


def weight_files(path: Path, named: str | None = None) -> WeightFiles:
    """The weight files of a directory: those that its index names, or else all. Raises CheckpointError, which names a
    missing or damaged file or tensor, and for files that transformers would read instead. named: the index, or the one
    file, that config.json names (NAMING)."""
    weight_map: Mapping[str, str] = {}
    # The order of transformers. Names of the variant come last: `save_pretrained` writes plain names beside them.
    names = named or next((n for n in (INDEX, WHOLE, OWN_INDEX, OWN_WHOLE) if (path / n).exists()), None)
    if named is not None and (Path(named).name != named or not named.endswith(NAMEABLE) or not (path / named).exists()):
        raise CheckpointError(
            f"{path / 'config.json'} names the weights {named!r} ({NAMING}); it must be a {' or '.join(NAMEABLE)} file "
            "beside it"
        )
    if names is not None and (shard := next((p for p in sorted(path.iterdir()) if SHARD.match(p.name)), None)):
        raise CheckpointError(
            f"{shard} is a part of a model of torch.distributed, which transformers would read instead of {names}; "
            "move one of them away"
        )
    indexed = names is not None and names.endswith((INDEX, OWN_INDEX, NAMEABLE[1]))
    named_by = path / (names if indexed and names is not None else INDEX)
    if indexed:
        index = read_json(named_by)
        fits(index, Index, named_by)
        weight_map = index["weight_map"]
        if not weight_map:
            raise CheckpointError(f"{named_by} has an empty weight_map")
        for name, holder in weight_map.items():
            if Path(holder).is_absolute() or ".." in Path(holder).parts:
                raise CheckpointError(
                    f"{named_by} says that {name} is in {holder}, outside of the model; weights lie beside their index"
                )
        files = sorted({path / file for file in weight_map.values()})
    else:
        # The file that transformers reads; otherwise all files.
        files = sorted(path.glob("*.safetensors")) if names is None else [path / names]
    if not files:
        raise CheckpointError(f"{path} holds no .safetensors weights; convert the model with save_pretrained first")
    for file in files:
        kind = special(file)
        if kind is not None:
            named = f"{named_by} names {file.name}, which" if weight_map else f"{file}"
            raise CheckpointError(f"{named} is {kind}; weights are in regular files")
        if not file.exists():
            raise CheckpointError(f"{named_by} names {file.name}, which is missing; fetch the checkpoint again")
    opened = WeightFiles(files)
    for name, holder in weight_map.items():
        if name not in opened:
            raise CheckpointError(f"{named_by} names the tensor {name}, which {holder} does not hold")
    if not opened:
        raise CheckpointError(f"{files[0]} holds no tensor")
    return opened


def tensor_bytes(name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor in a file. Raises CheckpointError for a dtype that is not known."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} has the dtype {dtype}; known: {', '.join(DTYPES)}")
    return math.prod(shape) * DTYPES[dtype].itemsize
