"""The model of a run: found first, which costs nothing, and opened once all else that was asked for makes sense."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from compress.base.collectives import Comm
from compress.base.device import find_device
from compress.base.errors import CompressError, InputError
from compress.checkpoint.byte_savings import bytes_before
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import load_dense, model_fingerprint, names_in, read_config
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.unplaced_tensors import (
    AHEAD,
    KeptTensor,
    beside,
    predicts_ahead,
    recomputed_names,
    tensor_count,
    without_heads,
)
from compress.checkpoint.write.quantization_config import differences
from compress.engine.plan.existing_zeros import recorded_sparsity
from compress.engine.plan.treatable_layers import check_untouched
from compress.engine.residency import Local, Residency, Sharded, is_narrow, shard
from compress.engine.restore import naming, undone
from compress.engine.shrink.edit_result import Restructured
from compress.inference.layers.embedding import QuantEmbedding
from compress.inference.layers.linear import QuantLinear
from compress.inference.load.dense_model import load_as_original
from compress.jobs.known_models import check_not_known
from compress.model.deferred import fill
from compress.model.experts import share_experts
from compress.model.finite_weights import DAMAGED, check_finite
from compress.model.layers import Stack
from compress.model.sharing import check_shardable
from compress.model.split_experts import split_experts
from compress.weights.masks import Earlier

CHANGED = ["its structure"]  # what a failure names as changed


@dataclass(frozen=True)
class FoundModel:
    """A model of which no weight has been read.

    given: the model in memory, None for one that lies at `source`.
    config: its configuration, None for a model in memory that has none.
    device: where blocks are worked on; None: where the model in memory is.
    """

    given: nn.Module | None
    source: Source | None
    config: Any
    device: torch.device | None


@dataclass(frozen=True)
class OpenedModel:
    """A model in memory, whole.

    device, dtype: where and in what its blocks are worked on; dtype None for that of each parameter.
    bytes: of its tensors as they were given.
    notes: what a person should know about how it was read.
    cut: what has been removed of it since.
    beside: {name in the files: tensor} of its checkpoint's tensors that it has no place for.
    """

    source: Source | None
    model: nn.Module
    device: torch.device
    dtype: torch.dtype | None
    bytes: int
    notes: Sequence[str] = ()
    cut: Restructured | None = None
    beside: Mapping[str, KeptTensor] = field(default_factory=dict)

    @property
    def kept(self) -> Mapping[str, KeptTensor]:
        """Those of `beside` that a run keeps: all, unless an edit has changed what they read."""
        return self.beside if self.cut is None else {}

    @property
    def headless(self) -> bool:
        """True where its configuration counts heads that predict several tokens, and none of them is written: an edit
        has changed what they read, or the model in memory has none."""
        config = getattr(self.model, "config", None)
        if not isinstance(config, PretrainedConfig):
            return False
        held = [name for name, _ in self.model.named_parameters()]
        lost = self.source is None or any(each.kind == AHEAD for each in self.beside.values())
        if not lost or predicts_ahead([*held, *self.kept], config):
            return False
        return bool(differences(config, without_heads(config)))

    def undo_on_failure(self, restore: bool) -> AbstractContextManager[None]:
        """Brings back what was edited of the model after a failure, or names its structure as changed."""
        if self.cut is None:
            return nullcontext()
        return undone(self.cut.undo) if restore else naming(CHANGED)

    def fingerprint(self, comm: Comm | None = None) -> str:
        """The fingerprint of the weights as they were given. A collective."""
        if self.source is None:
            return model_fingerprint(self.model)
        return fingerprint_of(self.source, comm or Comm())

    def check_unchanged(self) -> None:
        """Raises CheckpointError where files of the model have been changed since they were opened."""
        if self.source is not None:
            self.source.check_unchanged()

    def earlier(self, drop_zeros: bool) -> Earlier:
        """The pruning that the model comes with. Zeros of codes are none, unless a record says so."""
        known = {} if drop_zeros else recorded_sparsity(self.source)
        coded = self.source is not None and self.source.quantization is not None
        return Earlier(not drop_zeros and (bool(known) or not coded), known)


def fingerprint_of(source: Source, comm: Comm) -> str:
    """The fingerprint of a model's files, which the first rank reads for all. A collective."""
    digest, problem = "", None
    if comm.rank == 0:
        try:
            digest = source.fingerprint()
        except CompressError as error:
            problem = str(error)
    comm.fail_together(problem)
    return str(comm.gather_objects(digest)[0])


def find_model(model: object, device: str | torch.device | None, trust_remote_code: bool) -> FoundModel:
    """Find a model by its name, or take the one that is given. Raises InputError for what cannot be compressed."""
    if isinstance(model, nn.Module):
        check_untouched(model)
        wanted = None if device is None else find_device(device)
        return FoundModel(model, None, getattr(model, "config", None), wanted)
    if not isinstance(model, str | Path):
        raise InputError(f"model: {model!r} is no model; give a directory, a hub id, 'demo' or a torch.nn.Module")
    check_not_known(str(model))
    source = find_source(str(model), trust_remote_code)
    stored_in(source)  # refuses codes that cannot be read
    return FoundModel(None, source, read_config(source), find_device(device))


def open_model(found: FoundModel, dtype: torch.dtype | None, comm: Comm, defer: bool = False) -> OpenedModel:
    """Read the model, where it is not in memory; a compressed one as the values of its codes. dtype: to work in, None
    for the usual one. defer: weights of a compressed one may wait in its files (`model.deferred`). Raises InputError
    for a damaged model, and for one in memory that computes on codes."""
    notes: list[str] = []
    extra_tensors: Mapping[str, KeptTensor] = {}
    if found.source is not None:
        quantized = found.source.quantization is not None
        model = (
            load_as_original(found.source, notes, defer)
            if quantized
            else load_dense(found.source, None, notes, apart=True)
        )
        split_experts(model)
        notes += found.source.weights.remarks
        extra_tensors = beside(found.source)
        if made := recomputed_names(found.source):
            notes.append(
                f"not written: {tensor_count(len(made))} like {made[0]}, which {type(model).__name__} computes itself"
            )
    else:
        assert found.given is not None
        model = found.given
    _check_no_codes(model)
    check_finite(model, comm, partial(_why_not_finite, found.source, model))
    before = bytes_before(found.source, model)
    device = found.device or next((p.device for p in model.parameters()), torch.device("cpu"))
    return OpenedModel(
        found.source, model, device, compute_dtype(model, device, dtype), before, notes, beside=extra_tensors
    )


def _why_not_finite(source: Source | None, model: nn.Module, name: str) -> str:
    """The cause of a tensor that is not finite, and what to do: it may be so in the files, or in the dtype alone that
    the configuration asks for."""
    held = "" if source is None else names_in(source).on_disk(name)
    if source is None or source.quantization is not None or held not in source.weights:
        return DAMAGED
    stored = source.weights.tensor(held)
    if not bool(stored.isfinite().all()):
        return DAMAGED
    own = str(model.state_dict()[name].dtype).removeprefix("torch.")
    fits = str(stored.dtype).removeprefix("torch.")
    return (
        f"its files are finite, in {fits}, and the dtype {own} of config.json has no room for such numbers: write "
        f'"dtype": "{fits}" there'
    )


def residency_of(
    opened: OpenedModel,
    stacks: list[Stack],
    fsdp: bool | str,
    keep: bool,
    stores: Mapping[str, torch.dtype],
    by_rank: Comm | None = None,
) -> Residency:
    """The residency of the weights during the run; shards the model as `fsdp` says (`mesh_shape`), unless a shard is
    the whole model and nobody changes it. keep: whether the model itself is changed. stores: of parameters that have
    been widened, the dtype before. by_rank: those that share out experts."""
    model, device, dtype = opened.model, opened.device, opened.dtype
    if isinstance(model, FSDPModule):
        return Sharded(model, device, dtype)
    replicas, shards = mesh_shape(fsdp) if fsdp else (1, 1)
    if not fsdp or (shards == 1 and not keep):
        inside = set() if keep else {p for stack in stacks for _, block in stack.blocks for p in block.parameters()}
        fill(model.parameters(), without=inside)
        return Local(device, dtype, keep)
    check_shardable(model, [block for stack in stacks for block in stack.blocks])
    if by_rank is not None:
        share_experts(model, by_rank)
    shape = {"shard": shards} if replicas == 1 else {"replicate": replicas, "shard": shards}
    mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    return Sharded(shard(model, stacks, mesh), device, dtype, stores)


def widen_parameters(model: nn.Module) -> dict[str, torch.dtype]:
    """Give parameters of 16 bits 32, to be trained once they are sharded; {name: the dtype before}."""
    stores = {name: p.dtype for name, p in model.named_parameters() if is_narrow(p)}
    for name, p in model.named_parameters():
        if name in stores:
            p.data = p.data.float()
    return stores


def mesh_shape(fsdp: bool | str) -> tuple[int, int]:
    """(Replicas, shards of each) that a sharded run is asked for. Raises InputError for other words than these, where
    there are not as many ranks or no process group, or a torch that has none of this kind."""
    if not torch.distributed.is_initialized():
        raise InputError("a sharded run needs a process group; start it with torchrun")
    Sharded.require()
    ranks = torch.distributed.get_world_size()
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", f"1x{ranks}" if fsdp is True else str(fsdp))
    if found is None or int(found[1]) * int(found[2]) != ranks:
        raise InputError(
            f"fsdp {fsdp!r} on {ranks} ranks; give REPLICASxSHARDS with that product, or nothing: 1x{ranks}"
        )
    return int(found[1]), int(found[2])


def _check_no_codes(model: nn.Module) -> None:
    coded = next((n for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)), None)
    if coded is not None:
        raise InputError(f"{coded} computes on codes already; give the original model, or load it with dequantize=True")


def compute_dtype(model: nn.Module, device: torch.device, wanted: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which blocks are worked on; None for the dtype of each parameter."""
    if wanted is not None or device.type != "cpu":
        return wanted
    return None if any(p.dtype == torch.float64 for p in model.parameters()) else torch.float32
