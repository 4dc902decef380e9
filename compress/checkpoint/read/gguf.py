"""Reads a GGUF file as a checkpoint: its configuration, its tokenizer, and its tensors in the names of transformers.

    Q4_0, Q5_0, Q8_0, Q2_0    shown as packed codes in groups of 32 (Q2_0: 64), scales of float16
    Q2_K ... Q6_K, IQ4_XS     shown as super-blocks, the same bytes
    F32, F16, BF16            as they are
    others                    dequantized to float32 by gguf-py

Families, and where a tensor of transformers lies in the file, are those of the export (`checkpoint.gguf`). Embeddings
are looked up in packed codes alone: super-blocks are dequantized there.
"""

import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from compress.base.errors import CheckpointError, InputError, first_line
from compress.checkpoint.files import read_json
from compress.checkpoint.gguf.architectures import Architecture, rope_factors
from compress.checkpoint.gguf.blocks import Q2_0, Q4_0, Q5_0, Q8_0, Block
from compress.checkpoint.gguf.configuration import config_of, family_of
from compress.checkpoint.gguf.library import gguf, missing, read_file, reader
from compress.checkpoint.gguf.tensor_names import HEAD, WIDE, FilePlace, names_of, place_of
from compress.checkpoint.gguf.tokenizer_files import SPECIAL, write_tokenizer
from compress.checkpoint.read.content import stamp_of
from compress.checkpoint.read.views import View, ViewedFiles
from compress.checkpoint.read.weight_files import DTYPES, WeightFiles
from compress.kernels.layouts.k_quants import K_QUANTS
from compress.kernels.layouts.words import pack_rows, words_of
from compress.model.disk_names import disk_names
from compress.model.layers import is_linear, transposed_weights
from compress.model.split_experts import split_experts
from compress.weights.formats.codes import Packed
from compress.weights.formats.k_quants import PART, KQuant
from compress.weights.grid import Grid
from compress.weights.own_config import groups_of
from compress.weights.scheme import Scheme

FLOATS = {name: DTYPES[name] for name in ("F32", "F16", "BF16")}
BITS: Mapping[str, tuple[int, Block]] = {
    block.name: (bits, block) for bits, block in ((2, Q2_0), (4, Q4_0), (5, Q5_0), (8, Q8_0))
}
SUPER_BLOCKS = tuple(kind.upper() for kind in K_QUANTS)
SPLIT = "split.count"  # a key of files that hold a part of a model
HALF_STEP = 2**-23  # of numbers near 1, in float32: what shifting a norm may cost


class GGUFFiles(WeightFiles):
    """The tensors of one file, mapped, by their names there: floats, or blocks as bytes (`U8`). metadata: {key: value}.
    kinds: {tensor: its type in ggml}. types: of a key's value, and of its elements. Raises CheckpointError for a file
    that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.stamps = path, {path: stamp_of(path)}
        try:
            file = read_file(path)
            self.metadata = {name: field.contents() for name, field in file.fields.items()}
            self.types = {name: field.types for name, field in file.fields.items()}
            held = {each.name: each for each in file.tensors}
            self.kinds = {name: each.tensor_type.name for name, each in held.items()}
            self._tensors = {name: _mapped(each) for name, each in held.items()}
        except Exception as error:  # noqa: BLE001 - gguf-py raises whatever a damaged file leads it to
            raise CheckpointError(
                f"{path} cannot be read by {reader()} ({first_line(error)}); fetch it again"
            ) from None
        self._holders, self._open = dict.fromkeys(self._tensors, path), {path: None}
        names = {dtype: name for name, dtype in FLOATS.items()}
        self.headers = {n: (tuple(t.shape), names.get(t.dtype, "U8")) for n, t in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def dequantized(self, name: str) -> Tensor:
        """The values of a tensor, float32."""
        held, kind = self._tensors[name], self.kinds[name]
        if kind in FLOATS:
            return held.float()
        if kind == Q2_0.name:  # gguf-py 0.19.0 has no reader of it
            codes, scale = Q2_0.codes(held)
            return codes * scale.float().repeat_interleave(Q2_0.size, -1) + 0.0  # no zero has a sign
        return torch.from_numpy(gguf().quants.dequantize(held.numpy(), gguf().GGMLQuantizationType[kind]))


def _mapped(tensor: Any) -> Tensor:
    kind = tensor.tensor_type.name
    found = torch.from_numpy(tensor.data)
    return found.view(torch.bfloat16) if kind == "BF16" else found


def open_gguf(path: Path) -> tuple[Path, WeightFiles, dict[str, Any]]:
    """(A folder with configuration and tokenizer, which is removed with the files; the file's tensors under the names
    of transformers; the configuration, which says how they are quantized). Raises CheckpointError for a damaged file,
    InputError for a family, a tokenizer or a type of blocks that cannot be read."""
    if (line := missing()) is not None:
        raise InputError(line)
    files = GGUFFiles(path)
    try:
        return _opened(files)
    except (InputError, CheckpointError) as error:
        raise type(error)(f"{path} {error}") from None


def _opened(files: GGUFFiles) -> tuple[Path, WeightFiles, dict[str, Any]]:
    name = str(files.metadata.get("general.architecture"))
    if int(files.metadata.get(SPLIT) or 0) > 1:
        raise InputError("holds a part of a model; join the parts first: llama-gguf-split --merge FIRST JOINED")
    own = {key.removeprefix(f"{name}."): value for key, value in files.metadata.items() if key.startswith(f"{name}.")}
    kind, family = family_of(name, own)
    tensors = {each: files.tensor(each) for each in files}
    config = config_of(kind, family, own, tensors)
    config.architectures = [kind]
    for key, entry in SPECIAL.items():
        if entry != "unk_token":  # of which no configuration speaks
            setattr(config, f"{entry}_id", files.metadata.get(f"tokenizer.ggml.{key}_token_id"))
    placed = _Placed(files, family, config)
    views, schemes, remarks = placed.views()
    config.dtype = placed.dtype(schemes)
    folder = Path(tempfile.mkdtemp(prefix="compress-gguf-"))
    weakref.finalize(files, shutil.rmtree, folder, ignore_errors=True)
    folder = folder / files.path.stem  # exports take their name from it
    folder.mkdir()
    config.save_pretrained(folder)
    words = {
        key.removeprefix("tokenizer."): value for key, value in files.metadata.items() if key.startswith("tokenizer.")
    }
    write_tokenizer(folder, words, config.max_position_embeddings)
    found: dict[str, Any] = read_json(folder / "config.json")
    if schemes:
        found["quantization_config"] = groups_of(schemes)
    seen = ViewedFiles(files, files.headers, views)
    seen.remarks = remarks
    return folder, seen, found


@dataclass(frozen=True)
class _Placed:
    """The tensors of a model and their places in a file."""

    files: GGUFFiles
    family: Architecture
    config: Any

    def views(self) -> tuple[dict[str, View], dict[str, Scheme], list[str]]:
        """({tensor: view}, {layer: scheme} of those whose codes are kept, a remark on those that are dequantized).
        Raises CheckpointError for tensors that do not fit the model."""
        model = _on_meta(self.config)
        modules, transposed = dict(model.named_modules()), transposed_weights(model)
        on_disk, names = disk_names(model).on_disk, names_of(self.family, self.config)
        views: dict[str, View] = {}
        schemes: dict[str, Scheme] = {}
        dense: Counter[str] = Counter()
        used = set(rope_factors(self.config))
        for own, p in model.state_dict().items():
            tensor = on_disk(own)
            if tensor == HEAD and self.config.tie_word_embeddings:
                continue
            place = place_of(tensor, self.family, self.config, names)
            if place is None or place.name not in self.files:
                raise CheckpointError(f"lacks the tensor {tensor if place is None else place.name}")
            used.add(place.name)
            shape = (*reversed(p.shape),) if own in transposed else tuple(p.shape)
            self._check(place, shape)
            layer, _, last = own.rpartition(".")
            scheme = self._scheme(place.name, modules[layer]) if last == "weight" else None
            if scheme is not None:
                layer = tensor.removesuffix(".weight")
                schemes[layer] = scheme
                views |= {f"{layer}.{part}": view for part, view in self._parts(place, scheme, shape).items()}
                continue
            kind = self.files.kinds[place.name]
            dense.update([kind] if kind not in FLOATS else [])
            dtype = kind if kind in FLOATS else "F32"
            make = partial(self._values, place, own in transposed)
            views[tensor] = View((tuple(p.shape), dtype), (place.name,), make)
        if strangers := sorted(set(self.files) - used):
            raise CheckpointError(f"holds {strangers[0]}, which a {type(model).__name__} has no place for")
        said = ", ".join(f"{count} of {kind}" for kind, count in sorted(dense.items()))
        remark = f"dequantized, as no layer computes on these codes: tensors {said} of {self.files.path.name}"
        return views, schemes, [remark] if dense else []

    def _check(self, place: FilePlace, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless a tensor of the file has the shape of the model's."""
        held, kind = self.files.headers[place.name][0], self.files.kinds[place.name]
        wanted = shape if place.expert is None else (held[0], *shape)
        if place.expert is not None and place.expert >= held[0]:
            raise CheckpointError(f"holds {held[0]} experts in {place.name}; its keys say more")
        if kind not in FLOATS:
            size, bytes_ = gguf().GGML_QUANT_SIZES[gguf().GGMLQuantizationType[kind]]
            held = (*held[:-1], held[-1] // bytes_ * size)
        if held != wanted:
            raise CheckpointError(f"holds {place.name} of the shape {list(held)}; its keys say {list(wanted)}")

    def _scheme(self, name: str, module: nn.Module) -> Scheme | None:
        """The scheme in which a layer's blocks are shown; None for floats, and for blocks that are dequantized."""
        kind, embedding = self.files.kinds[name], isinstance(module, nn.Embedding)
        if kind in BITS and (embedding or is_linear(module)):
            bits, block = BITS[kind]
            return Scheme(terms=(Packed(grid=Grid(bits=bits, granularity="group", group_size=block.size)),))
        return Scheme(terms=(KQuant(type=kind.lower()),)) if kind in SUPER_BLOCKS and is_linear(module) else None

    def _parts(self, place: FilePlace, scheme: Scheme, shape: tuple[int, ...]) -> dict[str, View]:
        """The views of a layer on codes."""
        rows, columns = shape
        kind, of = self.files.kinds[place.name], (place.name,)
        size = View(((2,), "I64"), of, lambda _: torch.tensor((rows, columns)))
        if kind not in BITS:
            blocks = View((scheme.parts(rows, columns)[PART].shape, "U8"), of, partial(self._in_order, place))
            return {PART: blocks, "weight_shape": size}
        bits, block = BITS[kind]

        def codes(held: Tensor) -> Tensor:
            return pack_rows(block.codes(self._in_order(place, held))[0], bits)

        def scales(held: Tensor) -> Tensor:
            return block.codes(self._in_order(place, held))[1]

        return {
            "weight_packed": View(((rows, words_of(columns, bits)), "I32"), of, codes),
            "weight_scale": View(((rows, columns // block.size), "F16"), of, scales),
            "weight_shape": size,
        }

    def _values(self, place: FilePlace, transposed: bool, held: Tensor) -> Tensor:
        """A tensor of floats, or one that is dequantized."""
        held = held if self.files.kinds[place.name] in FLOATS else self.files.dequantized(place.name)
        found = self._in_order(place, held)
        found = found - place.shift if place.shift else found
        return found.t().contiguous() if transposed else found

    def _in_order(self, place: FilePlace, held: Tensor) -> Tensor:
        """The rows of a tensor, or of one expert in it, in the order of transformers."""
        held = held if place.expert is None else held[place.expert]
        rows = place.rows(len(held))
        return held if rows is None else held[rows.argsort()]

    def dtype(self, schemes: Mapping[str, Scheme]) -> torch.dtype:
        """The dtype of the model: that of its matrices of floats, where these have one of 16 bits and nothing else
        loses digits in it; float32 otherwise."""
        kinds = {n: k for n, k in self.files.kinds.items() if self.files.tensor(n).ndim > 1 and not n.endswith(WIDE)}
        floats = {kind for kind in kinds.values() if kind in FLOATS}
        kept = (*BITS, *SUPER_BLOCKS)
        if len(floats) != 1 or floats == {"F32"} or any(kind not in (*floats, *kept) for kind in kinds.values()):
            return torch.float32
        dtype = FLOATS[floats.pop()]
        for name, kind in self.files.kinds.items():
            if kind == "F32" and not name.startswith("rope_"):
                shift = 1.0 if self.family.shifted and name.endswith("norm.weight") else 0.0
                held = self.files.tensor(name) - shift
                if not torch.allclose(held, held.to(dtype).float(), rtol=0, atol=HALF_STEP * shift):
                    return torch.float32
        return dtype


def _on_meta(config: Any) -> nn.Module:
    """The model of a configuration on the meta device, with its experts apart."""
    kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model: nn.Module = kind._from_config(config)
    split_experts(model)
    return model
