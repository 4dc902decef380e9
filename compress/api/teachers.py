"""The models that others learn from."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from compress.api.opened import fingerprint_of
from compress.checkpoint.read.content import content_of
from compress.checkpoint.read.pretrained import load_dense
from compress.checkpoint.read.source import Source, find_source
from compress.errors import InputError
from compress.model.layers import find_stacks
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn
from compress.run.residency import is_narrow, shard
from compress.runtime.load.dequantized import load_as_original
from compress.runtime.load.loading import load_source
from compress.system.comm import Comm
from compress.train.inputs.offline import TopKRows
from compress.train.losses.options import ORIGINAL


def fingerprints(passes: Sequence[Pass], trust_remote_code: bool, comm: Comm) -> dict[str, str]:
    """{teacher: fingerprint} of the directories and files that passes name as teachers. Raises InputError for what is
    no model. A collective."""
    asked = [stage.options for p in passes if (stage := p.stage(Learn)) is not None]
    files = {options.teacher for options in asked if options.offline}
    others = {options.teacher for options in asked if options.taught} - files - {ORIGINAL}
    found = {name: content_of(Path(name)) for name in sorted(files)}
    return found | {name: fingerprint_of(find_source(name, trust_remote_code), comm) for name in sorted(others)}


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
        return load_source(source, target=self.device, dequantize=self.fsdp)
