"""The models that others learn from."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.checkpoint.read.content import content_of
from compress.checkpoint.read.pretrained import load_dense, read_config, tokens_of
from compress.checkpoint.read.source import Source, find_source
from compress.engine.residency import is_narrow, shard
from compress.inference.load.conversions import on
from compress.inference.load.dense_model import load_as_original
from compress.inference.load.loading import load_source
from compress.jobs.calibration_data import RunData, training_options
from compress.jobs.model_source import FoundModel, fingerprint_of
from compress.model.layers import find_stacks
from compress.model.vocabulary import check_common, common_tokens
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn
from compress.train.inputs.teacher_predictions import TopKRows, check_offline
from compress.train.losses.options import ORIGINAL


def fingerprints(passes: Sequence[Pass], trust_remote_code: bool, comm: Comm) -> dict[str, str]:
    """{teacher: fingerprint} of the directories and files that passes name as teachers. Raises InputError for what is
    no model. A collective."""
    asked = [stage.options for p in passes if (stage := p.stage(Learn)) is not None]
    files = {options.teacher for options in asked if options.offline}
    others = {options.teacher for options in asked if options.taught} - files - {ORIGINAL}
    found = {name: content_of(Path(name)) for name in sorted(files)}
    return found | {name: fingerprint_of(find_source(name, trust_remote_code), comm) for name in sorted(others)}


def check_tokens(passes: Sequence[Pass], found: FoundModel, data: RunData, trust_remote_code: bool) -> list[str]:
    """Remarks on teachers whose vocabulary is padded to another length than the student's. Raises InputError for other
    vocabularies, and for training data with token ids that only one of both models has."""
    size, notes = getattr(found.config, "vocab_size", None), []
    ids = None if data.rows is None else data.rows.tensors.get("input_ids")
    if not isinstance(size, int) or ids is None:
        return []
    for said in data.cached.values():
        check_offline(said, size)
    taught = {o.teacher: "logits" in o.weights for o in training_options(passes) if o.taught and not o.offline}
    for name, by_logits in sorted(taught.items()):
        if name == ORIGINAL:
            continue
        source = find_source(name, trust_remote_code)
        other = getattr(read_config(source), "vocab_size", None)
        if not isinstance(other, int) or other == size:
            continue
        check_common(ids, "training data", min(size, other))
        if not by_logits:
            continue
        vocabularies = {"the student": tokens_of(found.source), f"teacher {name!r}": tokens_of(source)}
        sizes = dict(zip(vocabularies, (size, other), strict=True))
        known = {model: each for model, each in vocabularies.items() if each is not None}
        shared = common_tokens(sizes, known, "training by logits")
        notes.append(
            f"teacher {name!r} has {other} tokens, the student {size}: it is taught the {shared} of both alone"
        )
    return notes


@dataclass(frozen=True)
class Teachers:
    """Makes teachers.

    source: where the student was read, None for one in memory.
    student: None where there is none, only a teacher at `source`.
    device: where work is done.
    fsdp: teachers are sharded over the ranks, as they are beside a student that is.
    cached: what files hold of teachers, by their names.
    """

    source: Source | None
    student: nn.Module | None
    device: torch.device
    fsdp: bool
    trust_remote_code: bool
    cached: Mapping[str, TopKRows] = field(default_factory=dict)

    def named(self, name: str) -> nn.Module | TopKRows:
        """A teacher, as `model` gives it, or what a file of that name holds of one."""
        return self.cached[name] if name in self.cached else self.model(name)

    def model(self, name: str) -> nn.Module:
        """The original model, before anything is done to it, or that of a directory, which may be compressed; frozen,
        on the device, sharded where the student is."""
        model = self._read(name)
        if self.device.type == "cpu" and any(is_narrow(p) for p in model.parameters()):
            model = model.float()  # what products of 16 bits cost on a CPU
        model.requires_grad_(False).eval()
        if isinstance(self.student, FSDPModule) or self.fsdp:
            mesh = init_device_mesh(self.device.type, (torch.distributed.get_world_size(),))
            return shard(model, find_stacks(model), mesh)
        return model.to(self.device)

    def _read(self, name: str) -> nn.Module:
        if name == ORIGINAL and self.source is None:
            if isinstance(self.student, FSDPModule):
                raise InputError(
                    "a sharded model in memory cannot be copied to be its own teacher; give teacher a directory"
                )
            assert self.student is not None
            return copy.deepcopy(self.student)
        source = self.source
        if name != ORIGINAL or source is None:
            source = find_source(name, self.trust_remote_code)
        if source.quantization is None:
            return load_dense(source)
        if name == ORIGINAL:  # what the student began with
            return load_as_original(source, [])
        return load_source(source, options=on(self.device), dequantize=self.fsdp)
