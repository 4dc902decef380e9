"""Checkpoints on disk: compressed-tensors layout, written block by block, complete or not there.

N outputs, K inputs, G groups, n bits. Keys are the layer's path plus

    weight_packed      int32 [N, ceil(K n / 32)]    codes as a bit stream (`compress.kernels.pack`)
    weight_scale       model dtype [N, G]
    weight_zero_point  int32 [ceil(N n / 32), G]    asymmetric only, packed along N
    weight_shape       int64 [2]                    (N, K)

Every other tensor keeps its name. While a run goes on, everything is in `OUT.partial`: files per block and rank, and
`progress.json`, which names the blocks that are safely on disk. `finish` writes the index and the configuration and
renames the directory; until then nothing is called OUT. A run that is killed leaves `OUT.partial` to resume from.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress.architecture import Layer
from compress.comm import Comm
from compress.errors import CheckpointError, CompressError, InputError
from compress.grid import Grid, Quantized
from compress.kernels.pack import pack_rows, unpack_rows, words_of
from compress.pipeline import LayerRecord
from compress.residency import Opened

RECORD = "compress.json"
PROGRESS = "progress.json"
INDEX = "model.safetensors.index.json"
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
# What a person expects to find beside the weights. Everything else of the source (other weight formats) stays there.
COMPANIONS = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)


def tensors_of(layer: str, quantized: Quantized) -> dict[str, Tensor]:
    """The tensors that stand for one compressed layer."""
    bits = quantized.grid.bits
    scale = quantized.scale.expand(quantized.codes.shape[0], -1) if quantized.scale.shape[0] == 1 else quantized.scale
    tensors = {
        f"{layer}.weight_packed": pack_rows(quantized.codes, bits),
        f"{layer}.weight_scale": scale,
        f"{layer}.weight_shape": torch.tensor(quantized.codes.shape),
    }
    if quantized.zero_point is not None:
        zero_point = quantized.zero_point.expand(scale.shape)
        tensors[f"{layer}.weight_zero_point"] = pack_rows(zero_point.t().contiguous(), bits).t()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def quantized_from(layer: str, tensors: Mapping[str, Tensor], grid: Grid) -> Quantized:
    """Inverse of `tensors_of`. Raises CheckpointError that names the tensor that is missing or of the wrong shape."""

    def get(part: str, dtype: torch.dtype | None) -> Tensor:
        name = f"{layer}.{part}"
        if name not in tensors:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        if dtype is not None and tensors[name].dtype != dtype:
            raise CheckpointError(f"{name} is {tensors[name].dtype}; it must be {dtype}")
        return tensors[name]

    def expect(part: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{layer}.{part} has shape {tuple(tensor.shape)}; its layer needs {shape}")

    shape = get("weight_shape", None)
    if tuple(shape.shape) != (2,):
        raise CheckpointError(f"{layer}.weight_shape has shape {tuple(shape.shape)}; it must hold two numbers")
    rows, columns = (int(n) for n in shape)
    if grid.group_size is not None and columns % grid.group_size:
        raise CheckpointError(f"{layer}.weight_shape says {columns} inputs; groups of {grid.group_size} do not fit")
    groups = 1 if grid.group_size is None else columns // grid.group_size
    packed, scale = get("weight_packed", torch.int32), get("weight_scale", None)
    expect("weight_packed", packed, (rows, words_of(columns, grid.bits)))
    expect("weight_scale", scale, (rows, groups))
    if not scale.is_floating_point() or not bool(torch.isfinite(scale).all()):
        raise CheckpointError(f"{layer}.weight_scale holds values that are not finite numbers")
    zero_point = None
    if not grid.symmetric:
        packed_zero = get("weight_zero_point", torch.int32)
        expect("weight_zero_point", packed_zero, (words_of(rows, grid.bits), groups))
        zero_point = unpack_rows(packed_zero.t().contiguous(), grid.bits, rows).t().contiguous()
    return Quantized(unpack_rows(packed, grid.bits, columns), scale, zero_point, grid)


def scheme_of(grid: Grid) -> dict[str, Any]:
    """A weight grid in the words of compressed-tensors' `quantization_config`."""
    group = grid.granularity == "group"
    scheme = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.symmetric,
        "dynamic": False,
        "strategy": "group" if group else "channel",
    }
    return {**scheme, "group_size": grid.group_size} if group else scheme


def grid_of(scheme: Mapping[str, Any], what: str) -> Grid:
    """The grid that reads codes of a `quantization_config` scheme. Raises CheckpointError for one we cannot read."""
    known = {"num_bits", "type", "symmetric", "dynamic", "strategy", "group_size"}
    odd = sorted(
        k for k, v in scheme.items() if k not in known and v not in (None, False, {}, "minmax", "memoryless_minmax")
    )
    if odd or scheme.get("type", "int") != "int" or scheme.get("dynamic") or not scheme.get("num_bits"):
        raise CheckpointError(
            f"{what}: weights {dict(scheme)} cannot be read; readable: integer, static, 2 to 8 bits, "
            "per channel or group"
        )
    strategy = scheme.get("strategy") or ("group" if scheme.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise CheckpointError(f"{what}: weight strategy {strategy!r} cannot be read; readable: group, channel")
    bits, symmetric = scheme["num_bits"], scheme.get("symmetric", True)
    if strategy == "channel":
        return Grid(bits=bits, symmetric=symmetric)
    return Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=scheme.get("group_size"))


def fingerprint(parts: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON description."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def checksum(tensor: Tensor) -> str:
    """SHA-256 of a tensor's values."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file in one step."""
    scratch = path.with_name(path.name + ".writing")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises CheckpointError in one line for anything that is not one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


class Writer:
    """The pipeline's sink: a directory that fills block by block and appears when it is complete."""

    def __init__(self, output: Path, identity: str, comm: Comm, *, resume: bool, overwrite: bool) -> None:
        self.output, self.comm, self.overwrite = output, comm, overwrite
        self.partial = output.with_name(output.name + ".partial")
        self.replaced = output.with_name(output.name + ".replaced")  # the old output, for a moment
        self.identity = identity
        self.blocks: dict[str, dict[str, Any]] = {}
        problem = None
        if comm.rank == 0:
            try:
                self._prepare(resume)
            except InputError as error:
                problem = str(error)
        problem = comm.gather_objects(problem)[0]
        if problem is not None:
            raise InputError(problem)
        progress = self.partial / PROGRESS
        if resume and progress.exists():
            self.blocks = read_json(progress)["blocks"]

    def abandon(self) -> None:
        """Remove what a run leaves that finished no block: there is nothing to go on with."""
        if self.comm.rank == 0 and not self.blocks:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _prepare(self, resume: bool) -> None:
        if self.output.exists() and not self.overwrite:
            raise InputError(f"{self.output} exists; choose another output or pass --overwrite")
        if self.output.exists() and not self._ours(self.output):
            raise InputError(
                f"{self.output} is not a checkpoint of this tool; it is not overwritten: choose another output"
            )
        if self.output.exists() and self.replaced.exists() and not self._ours(self.replaced):
            raise InputError(f"{self.replaced} is in the way of replacing {self.output}; move it")
        progress = self.partial / PROGRESS
        if self.partial.exists() and any(self.partial.iterdir()):
            if not progress.exists():
                raise InputError(f"{self.partial} is in the way and no run left it; move it or choose another output")
            if not resume and not self.overwrite:
                raise InputError(
                    f"{self.partial} holds an unfinished run; go on with --resume or drop it with --overwrite"
                )
            if not resume:
                shutil.rmtree(self.partial)
            elif read_json(progress)["identity"] != self.identity:
                raise InputError(
                    f"{self.partial} is of another run (model, recipe, calibration data or version differ); "
                    "resume with what it was started with, or drop it with --overwrite"
                )
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            if not progress.exists():
                write_json(progress, {"identity": self.identity, "blocks": {}})
        except OSError as error:
            raise InputError(f"cannot write to {self.partial}: {error.strerror}") from None

    @staticmethod
    def _ours(directory: Path) -> bool:
        return directory.is_dir() and ((directory / RECORD).exists() or not any(directory.iterdir()))

    def packed_grids(self) -> dict[str, Grid]:
        """{layer: grid} of the layers written as packed codes so far."""
        return {
            name: Grid(**where["grid"])
            for entry in self.blocks.values()
            for name, where in entry["layers"].items()
            if where["grid"] is not None
        }

    def dense_layers(self) -> list[str]:
        """Layers whose compressed values had to be written dense so far."""
        return [n for entry in self.blocks.values() for n, where in entry["layers"].items() if where["grid"] is None]

    def finished(self, block: str) -> tuple[dict[str, Quantized | Tensor], list[LayerRecord]] | None:
        entry = self.blocks.get(block)
        if entry is None:
            return None
        records = [LayerRecord(**{**r, "shape": tuple(r["shape"])}) for r in entry["records"]]
        decided: dict[str, Quantized | Tensor] = {}
        for name, where in entry["layers"].items():
            try:
                with safe_open(self.partial / where["file"], framework="pt") as file:
                    if where["grid"] is None:
                        decided[name] = file.get_tensor(f"{name}.weight").t()
                        continue
                    parts = {f"{name}.{part}" for part in PARTS} & set(file.keys())
                    tensors = {key: file.get_tensor(key) for key in parts}
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{self.partial / where['file']} of the unfinished run cannot be read ({error}); drop that run "
                    "with --overwrite"
                ) from None
            decided[name] = quantized_from(name, tensors, Grid(**where["grid"]))
        return decided, records

    def write(
        self,
        block: str,
        opened: Opened,
        decided: Mapping[str, Quantized],
        layers: Mapping[str, Layer],
        records: list[LayerRecord],
    ) -> None:
        prefix = f"{block}." if block else ""
        packed = {name: q for name, q in decided.items() if not layers[name].transposed}
        replaced = {id(layers[name].parameter) for name in packed}
        plain = {prefix + name: value for name, value in opened.stored()}
        dense = {prefix + n for n, p in opened.block.named_parameters() if id(p) in replaced}
        costs = {name: float(q.codes.numel()) for name, q in packed.items()}
        costs |= {name: float(t.numel()) for name, t in plain.items() if name not in dense}
        owner = self.comm.assign(costs)
        mine: dict[str, Tensor] = {}
        for name, quantized in packed.items():
            if owner[name] == self.comm.rank:
                mine.update(tensors_of(name, quantized))
        for name, tensor in plain.items():
            if name not in dense and owner[name] == self.comm.rank:
                mine[name] = tensor
        index = len(self.blocks)
        for record in records:
            record.figures["sha256"] = checksum(decided[record.name].dequantize())
        file = self._save(f"block-{index:05d}", mine)
        layer_files = {
            name: {"file": file, "grid": asdict(quantized.grid) if name in packed else None}
            for name, quantized in decided.items()
            if owner[name if name in packed else f"{name}.weight"] == self.comm.rank
        }
        files: dict[str, list[str]] = {}
        all_layers: dict[str, Any] = {}
        for part_file, keys, part_layers in self.comm.gather_objects((file, list(mine), layer_files)):
            if keys:
                files[part_file] = keys
            all_layers |= part_layers
        self.blocks[block] = {"files": files, "layers": all_layers, "records": [asdict(r) for r in records]}
        if self.comm.rank == 0:
            try:
                write_json(self.partial / PROGRESS, {"identity": self.identity, "blocks": self.blocks})
            except OSError as error:
                raise CompressError(
                    f"cannot write {self.partial / PROGRESS}: {error.strerror}; finished blocks are kept: "
                    "free some space and run again with --resume"
                ) from None
        self.comm.barrier()

    def _save(self, stem: str, tensors: Mapping[str, Tensor]) -> str:
        """Save this rank's tensors; returns the file's name ('' for none)."""
        if not tensors:
            return ""
        name = f"model-{stem}.safetensors" if self.comm.world == 1 else f"model-{stem}-rank{self.comm.rank}.safetensors"
        clean = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
        try:
            save_file(clean, self.partial / name, metadata={"format": "pt"})
            with (self.partial / name).open("rb") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise CompressError(
                f"cannot write {self.partial / name}: {error}; finished blocks are kept: free some space "
                "and run again with --resume"
            ) from None
        return name

    def finish(
        self,
        rest: Iterator[tuple[str, Tensor]],
        config: dict[str, Any] | None,
        source: Path | None,
        extra_files: Mapping[str, str],
        record: dict[str, Any],
    ) -> None:
        """Write what lies outside the blocks, the index, the configuration and the record; then name the directory.

        `rest` yields (name, tensor) in the same order on every rank (sharded tensors are gathered as it goes).
        """
        mine: dict[str, Tensor] = {}
        load = [0] * self.comm.world
        for name, tensor in rest:
            owner = load.index(min(load))
            load[owner] += tensor.numel()
            if owner == self.comm.rank:
                mine[name] = tensor
        file = self._save("rest", mine)
        weight_map: dict[str, str] = {}
        for entry in self.blocks.values():
            weight_map |= {key: f for f, keys in entry["files"].items() for key in keys}
        for part, keys in self.comm.gather_objects((file, list(mine))):
            weight_map |= dict.fromkeys(keys, part)
        if self.comm.rank == 0:
            try:
                self._complete(weight_map, config, source, extra_files, record)
            except OSError as error:
                raise CompressError(f"cannot complete {self.partial}: {error}; run again with --resume") from None
        self.comm.barrier()

    def _complete(
        self,
        weight_map: dict[str, str],
        config: dict[str, Any] | None,
        source: Path | None,
        extra_files: Mapping[str, str],
        record: dict[str, Any],
    ) -> None:
        total = 0
        for file in sorted(set(weight_map.values())):
            total += (self.partial / file).stat().st_size
        for leftover in self.partial.glob("model-*.safetensors"):
            if leftover.name not in set(weight_map.values()):
                leftover.unlink()
        write_json(
            self.partial / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        )
        if config is not None:
            write_json(self.partial / "config.json", config)
        if source is not None:
            for pattern in COMPANIONS:
                for path in sorted(source.glob(pattern)):
                    if path.is_file():
                        shutil.copyfile(path, self.partial / path.name)
        for name, text in extra_files.items():
            (self.partial / name).write_text(text, encoding="utf-8")
        write_json(self.partial / RECORD, record)
        (self.partial / PROGRESS).unlink()
        for stray in self.partial.glob("*.writing"):
            stray.unlink()
        if self.output.exists():
            if self.replaced.exists():
                shutil.rmtree(self.replaced)
            self.output.rename(self.replaced)
            self.partial.rename(self.output)
            shutil.rmtree(self.replaced)
        else:
            self.partial.rename(self.output)


class Discard:
    """The sink of a run that writes nothing."""

    def finished(self, block: str) -> None:
        return None

    def write(
        self,
        block: str,
        opened: Opened,
        decided: Mapping[str, Quantized],
        layers: Mapping[str, Layer],
        records: list[LayerRecord],
    ) -> None:
        return
