"""The directory that a run fills: block by block while it goes on, complete or not there.

While a run goes on, everything is in `OUT.partial`: a file per block and rank, and `progress.json`, which names the
blocks that are safely on disk. `finish` writes the index, the configuration and the record, renames the directory to
OUT and only then removes `progress.json`: whenever a run is killed, there is a complete OUT or a partial one to resume.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress.architecture import Layer, Table
from compress.cache import SIDES, CacheCodes, CacheScheme
from compress.checkpoint import (
    INDEX,
    RECORD,
    checksum,
    inputs_from,
    outputs_from,
    quantized_from,
    tensors_of,
    write_json,
)
from compress.comm import Comm
from compress.errors import CheckpointError, InputError
from compress.fold import Consumer, Fold
from compress.grid import Grid
from compress.manifest import read_progress
from compress.passes.base import Decision
from compress.record import Finished, LayerRecord, RangeRecord
from compress.rescale import Folded, FoldRecord
from compress.residency import Opened
from compress.scheme import PARTS, Scheme, scheme_of

PROGRESS = "progress.json"
KEPT = "finished blocks are kept: make room and run again with --resume"
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


class Writer:
    """The pipeline's sink. Every method is called on every rank; a failure on one is an error on all."""

    def __init__(self, output: Path, identity: str, comm: Comm, *, resume: bool, overwrite: bool) -> None:
        self.output = output.resolve() if output.is_symlink() else output
        self.comm, self.overwrite, self.identity = comm, overwrite, identity
        self.partial = self.output.with_name(self.output.name + ".partial")
        self.replaced = self.output.with_name(self.output.name + ".replaced")  # the old output, for a moment
        self.blocks: dict[str, dict[str, Any]] = {}
        problem = None
        if comm.rank == 0:
            try:
                self._prepare(resume)
            except InputError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot write to {self.partial}: {error.strerror}"
        problem = comm.gather_objects(problem)[0]
        if problem is not None:
            raise InputError(problem)
        if resume:
            self.blocks = self._progress()["blocks"]

    def _progress(self) -> dict[str, Any]:
        """What `progress.json` says. Raises CheckpointError where it is damaged."""
        path = self.partial / PROGRESS
        try:
            return read_progress(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; drop that run with --overwrite") from None

    def _refusal(self) -> str | None:
        """Why the finished checkpoint may not take the name of the output."""
        if not self.output.exists():
            return None
        if not self.overwrite:
            return f"{self.output} exists; choose another output or pass --overwrite"
        if not _ours(self.output):
            return f"{self.output} is not a checkpoint of this tool; it is not overwritten: choose another output"
        if self.replaced.exists() and not _ours(self.replaced):
            return f"{self.replaced} is in the way of replacing {self.output}; move it"
        return None

    def _prepare(self, resume: bool) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise InputError(refusal)
        progress = self.partial / PROGRESS
        if self.partial.exists() and any(self.partial.iterdir()):
            if not progress.exists():
                raise InputError(f"{self.partial} is in the way and no run left it; move it or choose another output")
            if resume:
                if self._progress()["identity"] != self.identity:
                    raise InputError(
                        f"{self.partial} is of another run (model, recipe, calibration data or version differ); "
                        "resume with what it was started with, or drop it with --overwrite"
                    )
            elif self.overwrite or not self._progress()["blocks"]:
                shutil.rmtree(self.partial)
            else:
                raise InputError(
                    f"{self.partial} holds an unfinished run; go on with --resume or drop it with --overwrite"
                )
        self.partial.mkdir(parents=True, exist_ok=True)
        if not progress.exists():
            write_json(progress, {"identity": self.identity, "blocks": {}})

    def abandon(self) -> None:
        """Remove what a run leaves that finished no block: there is nothing to go on with."""
        if self.comm.rank == 0 and not self.blocks:
            shutil.rmtree(self.partial, ignore_errors=True)

    def schemes(self) -> dict[str, Scheme]:
        """{layer: scheme} of the layers written as codes so far."""
        return {
            name: _scheme(where["scheme"])
            for entry in self.blocks.values()
            for name, where in entry["layers"].items()
            if where["scheme"] is not None
        }

    def dense_layers(self) -> list[str]:
        """Layers whose compressed values had to be written dense so far."""
        return [n for entry in self.blocks.values() for n, where in entry["layers"].items() if where["scheme"] is None]

    def finished(self, block: str) -> Finished | None:
        """What an earlier run wrote for a block; None where it did not."""
        entry = self.blocks.get(block)
        if entry is None:
            return None
        records = [LayerRecord(**{**r, "shape": tuple(r["shape"])}) for r in entry["records"]]
        decided: dict[str, Decision | Tensor] = {}
        for name, where in entry["layers"].items():
            path = self.partial / where["file"]
            with _readable(f"{path} of the unfinished run"), safe_open(path, framework="pt") as file:
                if where["scheme"] is None:
                    dense = file.get_tensor(f"{name}.weight")
                    decided[name] = dense.t() if dense.ndim == 2 else dense.flatten(1)
                    continue
                scheme = _scheme(where["scheme"])
                parts = {f"{name}.{part}" for part in PARTS} & set(file.keys())
                tensors = {key: file.get_tensor(key) for key in parts}
            inputs, outputs = inputs_from(name, tensors, scheme), outputs_from(name, tensors, scheme)
            decided[name] = Decision(quantized_from(name, tensors, scheme), {}, inputs, outputs)
        with _readable(f"the folds of the unfinished run in {self.partial}"):
            folded = self._read_folds(entry["folds"])
        described = [FoldRecord(**record) for record in entry["fold_records"]]
        ranges = [RangeRecord.restored(noted) for noted in entry["ranges"]]
        caches = {name: self._read_cache(name, where) for name, where in entry["caches"].items()}
        return Finished(decided, records, entry["left_alone"], folded, described, ranges, caches)

    def _read_cache(self, name: str, where: Mapping[str, Any]) -> CacheCodes:
        scheme = CacheScheme(**where["scheme"])
        if scheme.dynamic:
            return CacheCodes(scheme)
        path = self.partial / where["file"]
        with _readable(f"{path} of the unfinished run"), safe_open(path, framework="pt") as file:
            keys, values = (file.get_tensor(f"{name}.{side}_scale") for side in SIDES)
        return CacheCodes(scheme, (keys, values))

    def write(
        self,
        block: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        finished: Finished,
    ) -> None:
        """Write a finished block while it is open, each rank the tensors that fall to it, then note it as done."""
        prefix = f"{block}." if block else ""
        decided = {name: d for name, d in finished.decided.items() if isinstance(d, Decision)}
        packed = {name: d for name, d in decided.items() if layers[name].has_format}
        replaced = {id(layers[name].parameter) for name in packed}
        # Embeddings, which have an entry of their own, are inside a model that is one block.
        inside = [entry for name, entry in self.blocks.items() if name.startswith(prefix)]
        written = {key for entry in inside for keys in entry["files"].values() for key in keys}
        written |= {f"{name}.weight" for entry in inside for name in entry["layers"]}
        plain = {prefix + n: value for n, value in opened.stored() if prefix + n not in written}
        dense = {prefix + n for n, p in opened.block.named_parameters() if id(p) in replaced}
        costs = {name: float(d.weight.codes.numel()) for name, d in packed.items()}
        costs |= {name: float(t.numel()) for name, t in plain.items() if name not in dense}
        owner = self.comm.assign(costs)
        mine: dict[str, Tensor] = {}
        for name, decision in packed.items():
            if owner[name] == self.comm.rank:
                mine.update(self._tensors(layers[name], decision))
        for name, tensor in plain.items():
            if name not in dense and owner[name] == self.comm.rank:
                mine[name] = tensor
        if self.comm.rank == 0:
            for name, codes in finished.caches.items():
                scales = {} if codes.scales is None else dict(zip(SIDES, codes.scales, strict=True))
                mine |= {f"{name}.{side}_scale": scale for side, scale in scales.items()}
        for record in finished.records:
            record.figures["sha256"] = checksum(decided[record.name].weight.dequantize())
        name_of_block = self._name(f"block-{len(self.blocks):05d}")
        file = self._together(name_of_block, lambda: self._save(name_of_block, mine))
        schemes = {
            name: asdict(scheme_of(d.weight.grid, d.inputs, d.outputs, isinstance(layers[name], Table)))
            for name, d in packed.items()
        }
        layer_files = {
            name: {"file": file, "scheme": schemes.get(name)}
            for name, d in decided.items()
            if owner[name if name in packed else f"{name}.weight"] == self.comm.rank
        }
        files: dict[str, list[str]] = {}
        all_layers: dict[str, Any] = {}
        parts = self.comm.gather_objects((file, list(mine), layer_files))
        for part_file, keys, part_layers in parts:
            if keys:
                files[part_file] = keys
            all_layers |= part_layers
        first_file = parts[0][0]
        entry = {
            "files": files,
            "layers": all_layers,
            "records": [asdict(r) for r in finished.records],
            "ranges": [asdict(r) for r in finished.ranges],
            "left_alone": dict(finished.left_alone),
            "fold_records": [asdict(r) for r in finished.fold_records],
            "folds": self._save_folds(finished.folded),
            "caches": {n: {"file": first_file, "scheme": asdict(c.scheme)} for n, c in finished.caches.items()},
        }
        state = {"identity": self.identity, "blocks": {**self.blocks, block: entry}}
        self._together(PROGRESS, lambda: write_json(self.partial / PROGRESS, state) if self.comm.rank == 0 else None)
        self.blocks[block] = entry

    @staticmethod
    def _tensors(layer: Layer, decision: Decision) -> dict[str, Tensor]:
        """What a layer is stored as. Modules that share the weight of a table have, in `weight`, its codes, and need
        their scales beside them, which are small; packed codes are the table's alone."""
        table = isinstance(layer, Table)
        tensors = tensors_of(layer.name, decision.weight, decision.inputs, decision.outputs, table)
        if isinstance(layer, Table) and f"{layer.name}.weight" in tensors:
            small = {n.removeprefix(layer.name): t for n, t in tensors.items() if not n.endswith(".weight")}
            tensors |= {other + part: tensor.clone() for other in layer.shared for part, tensor in small.items()}
        return tensors

    def _save_folds(self, folded: Sequence[Folded]) -> dict[str, Any] | None:
        """Keep what a resumed run needs to fold again, until the run is finished; None where nothing was folded."""
        if not folded:
            return None
        name = f"folds-{len(self.blocks):05d}.safetensors"
        tensors, noted = {}, []
        for i, each in enumerate(folded):
            # Copies: two passes that use one fold share its maps, which safetensors refuses.
            tensors[f"{i}.scale"] = each.scale_C.clone().contiguous()
            maps = (c.channel_of_K.cpu().clone().contiguous() for c in each.fold.consumers)
            tensors |= {f"{i}.{j}": channel_of_K for j, channel_of_K in enumerate(maps)}
            fold = each.fold
            consumers = [c.name for c in fold.consumers]
            noted.append(
                {"producer": fold.producer, "kind": fold.kind, "channels": fold.channels, "consumers": consumers}
            )
        self._together(name, lambda: save_file(tensors, self.partial / name) if self.comm.rank == 0 else None)
        return {"file": name, "folds": noted}

    def _read_folds(self, entry: Mapping[str, Any] | None) -> list[Folded]:
        if entry is None:
            return []
        folded = []
        with safe_open(self.partial / entry["file"], framework="pt") as file:
            for i, noted in enumerate(entry["folds"]):
                consumers = tuple(Consumer(n, file.get_tensor(f"{i}.{j}")) for j, n in enumerate(noted["consumers"]))
                fold = Fold(noted["producer"], noted["kind"], noted["channels"], consumers)
                folded.append(Folded(fold, file.get_tensor(f"{i}.scale")))
        return folded

    def _together(self, what: str, work: Callable[[], Any]) -> Any:
        """Write `what` on this rank; a failure, here or on another rank, is an error on every rank."""
        result, problem = None, None
        try:
            result = work()
        except (OSError, SafetensorError) as error:
            problem = f"cannot write {self.partial / what}: {error}; {KEPT}"
        self.comm.fail_together(problem)
        return result

    def _name(self, stem: str) -> str:
        rank = "" if self.comm.world == 1 else f"-rank{self.comm.rank}"
        return f"model-{stem}{rank}.safetensors"

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        """Save this rank's tensors; returns the file's name ('' for none)."""
        if not tensors:
            return ""
        clean = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
        save_file(clean, self.partial / name, metadata={"format": "pt"})
        with (self.partial / name).open("rb") as file:
            os.fsync(file.fileno())
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
        name_of_rest = self._name("rest")
        file = self._together(name_of_rest, lambda: self._save(name_of_rest, mine))
        weight_map: dict[str, str] = {}
        for entry in self.blocks.values():
            weight_map |= {key: f for f, keys in entry["files"].items() for key in keys}
        for part, keys in self.comm.gather_objects((file, list(mine))):
            weight_map |= dict.fromkeys(keys, part)

        def complete() -> None:
            if self.comm.rank == 0:
                self._describe(weight_map, config, source, extra_files, record)
                self._take_name()

        self._together("", complete)

    def _describe(
        self,
        weight_map: dict[str, str],
        config: dict[str, Any] | None,
        source: Path | None,
        extra_files: Mapping[str, str],
        record: dict[str, Any],
    ) -> None:
        """Everything beside the weights."""
        files = set(weight_map.values())
        for leftover in self.partial.glob("*.safetensors"):
            if leftover.name not in files:
                leftover.unlink()
        total = sum((self.partial / file).stat().st_size for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self.partial / INDEX, index)
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
        for stray in self.partial.glob("*.writing"):
            stray.unlink()

    def _take_name(self) -> None:
        """Rename the partial directory to the output, which may have come into being while the run worked."""
        refusal = self._refusal()
        if refusal is not None:
            raise OSError(refusal)
        if self.output.exists():
            if self.replaced.exists():
                shutil.rmtree(self.replaced)
            self.output.rename(self.replaced)
        self.partial.rename(self.output)
        (self.output / PROGRESS).unlink()
        if self.replaced.exists() and _ours(self.replaced):
            shutil.rmtree(self.replaced, ignore_errors=True)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Within: what cannot be read is an error that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} cannot be read ({error}); drop that run with --overwrite") from None


def _scheme(noted: Mapping[str, Any]) -> Scheme:
    """A scheme from `progress.json`."""
    keys = ("weights", "inputs", "outputs")
    grids = {key: None if noted[key] is None else Grid(**noted[key]) for key in keys}
    return Scheme(**{**noted, **grids})


def _ours(directory: Path) -> bool:
    return directory.is_dir() and ((directory / RECORD).exists() or not any(directory.iterdir()))


class Discard:
    """The sink of a run that writes nothing."""

    def finished(self, block: str) -> Finished | None:
        """Nothing is."""
        return None

    def write(
        self,
        block: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        finished: Finished,
    ) -> None:
        """Nothing."""
