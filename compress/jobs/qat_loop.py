"""Quantization-aware training in a loop of one's own: two calls, one before it and one behind it.

    prepared = compress.prepare_qat(model, compress.GPTQ(scheme="w4a16"), calibration=token_ids)
    optimizer = torch.optim.AdamW(prepared.groups(learning_rate=1e-5))
    ...                                      # prepared.model, trained by whatever trains it
    prepared.convert(output="out")           # the codes that a forward now would compute with

What lies between them is `engine.learn.training`'s: the passes decide, layers round by a swap of their class, and what
training makes of them is what a walk begins with that writes it, block by block.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from compress.base.collectives import Comm
from compress.base.errors import InputError, one_of
from compress.base.lost_ranks import watching
from compress.base.progress import Reporter, Silent
from compress.checkpoint.write.directory import Directory, claim
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.writer import InMemory
from compress.engine.block_loop import decide
from compress.engine.learn.trainable import check_forms
from compress.engine.learn.trained_decisions import TrainedCaches, begin, trained_decisions
from compress.engine.learn.training import uncompiled
from compress.engine.plan.format_limits import check_storable
from compress.engine.plan.treatable_layers import adapter_in
from compress.engine.residency import Local, Residency, Sharded
from compress.engine.restore import hooks_and_buffers, undone, values
from compress.jobs.job import Job, Result
from compress.jobs.prepare import prepare, sink_of
from compress.jobs.request import Calibration, Request
from compress.model.calls import evaluating
from compress.model.layers import Layer
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn
from compress.train.inputs.fsdp_shards import reshard
from compress.train.loop.optimizer import Learned, average_gradients, parameter_groups
from compress.train.rounding.quantizers import Scales
from compress.train.rounding.swapped_layers import (
    attach,
    detach,
    freeze_with_weights,
    parameters_in,
    quantizers_of,
    scales_in,
    swap,
    tied_to,
    was_called,
    weight_scales,
    weights_outside,
)

OWN_LOOP = "the layers were trained in a loop of their owner's (prepare_qat)"


@dataclass
class Prepared:
    """A model that rounds while it is trained. model: the one that was given, or read.

    layers: those that round. stores: by name, the dtypes of parameters before they were made wide enough to be trained.
    training: identities of the parameters that were to be trained when the model was prepared.
    """

    job: Job
    decided: InMemory
    layers: list[Layer]
    stores: dict[str, torch.dtype]
    caches: TrainedCaches
    narrow: Callable[[], None]
    unhook: Callable[[], None]
    training: frozenset[int] = frozenset()
    converted: bool = False

    @property
    def model(self) -> nn.Module:
        """The model to train: the same module, under the same names, with the quantizers' parameters beside its own."""
        return self.job.run.model

    def groups(
        self, learning_rate: float = 1e-4, scale_rate: float = 1e-3, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer that divides by the size of gradients, as AdamW does: matrices with decay;
        norms and biases without; scales without, at their own rate, since they are learned as factors (0.001 is a
        thousandth of a scale a step). Ask for them when the model is sharded, if it will be."""
        self._check_open()
        quantizers = quantizers_of(self.layers)
        weights = weights_outside(self.model, parameters_in(quantizers))
        learned = Learned(weights, scales_in(quantizers))
        return parameter_groups(learned, learning_rate, scale_rate, weight_decay)

    @torch.inference_mode(False)
    def fit_scales(self) -> None:
        """Fit the scales of weights to what these are now, after something else than training has changed them (an
        adapter was merged): codes reach no further than their scales. Scales that were learned are forgotten."""
        self._check_open()
        for layer, quantizer in weight_scales(self.layers):
            quantizer.fit(layer.weight)

    @torch.inference_mode(False)
    def convert(
        self,
        output: str | Path | None = None,
        *,
        overwrite: bool = False,
        verify: bool | None = None,
        store: str | None = None,
        reporter: Reporter | None = None,
    ) -> Result:
        """Make the model what `quantize` would return, with the codes that a forward now would compute with, and write
        it, verified, where an output is given. Arguments are those of `quantize`; every rank calls it.

        The model has the dtypes again that it had when it was prepared (shards keep their 32 bits), and trains no more.
        Where this fails, it is as it was before the call, and can be converted again. Raises as `quantize` does.
        """
        self._check_open()
        self._check_whole()
        self._check_scales()
        request = replace(self.job.request, output=output, overwrite=overwrite, verify=verify, store=store)
        request.check()
        comm = Comm()
        with claim(output, comm, resume=False, overwrite=overwrite, model=request.folder) as place, watching(comm):
            job = self._left(request, place, comm, reporter or Silent())
            with uncompiled(self.model), self._as_before():
                result = job.carry_out()
        self.converted = True
        self.unhook()
        return result

    def _left(self, request: Request, place: Directory | None, comm: Comm, reporter: Reporter) -> Job:
        """The job that is left once the model has been trained."""
        before, residency = self.job.run, self._residency()
        identity = {**self.job.identity, "training": OWN_LOOP}
        sink, caches = sink_of(request, place, comm, replace(self.job.opened, model=self.model), before.plan, identity)
        reshard(self.model)
        decisions = trained_decisions(self.model, before.plan, residency, self.decided.decisions)
        record = copy.deepcopy(before.record)
        record.note(reporter, OWN_LOOP)
        self._note_uncalled(record, reporter)
        run = replace(
            before,
            plan=replace(before.plan, passes=(), trained=decisions),
            residency=residency,
            sink=sink,
            comm=comm,
            record=record,
            reporter=reporter,
            earlier=self.decided.blocks,
        )
        stores = self.stores if isinstance(residency, Sharded) else {}
        return replace(self.job, request=request, run=run, identity=identity, caches=caches, stores=stores)

    def _residency(self) -> Residency:
        """The weights' residency now: the caller may have sharded them since."""
        before = self.job.run.residency
        if isinstance(before, Local) and isinstance(self.model, FSDPModule):
            return Sharded(self.model, before.device, before.dtype, self.stores)
        return before

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Gives layers their own classes back and parameters the dtypes that the model stores; undoes that only if the
        body raises."""
        with ExitStack() as back:
            back.callback(self.caches.on)
            self.caches.off()
            for layer in self.layers:
                back.callback(swap, layer.module, detach(layer.module))
            with undone(values(self.model), hooks_and_buffers(self.model)):
                self.narrow()
                yield
            back.pop_all()

    def _check_whole(self) -> None:
        """Refuse a model in which something stands in the place of what was prepared."""
        if (name := adapter_in(self.model)) is not None:
            raise InputError(
                f"{name or 'the model'} is an adapter of peft; call merge_and_unload() before convert(), which writes "
                "the model's own weights"
            )
        present = set(self.model.modules())
        for layer in (*self.job.run.plan.treated_layers, *self.job.run.plan.tables):
            if layer.module not in present:
                raise InputError(
                    f"{layer.name} is not the module any more that was prepared (modules_to_save of peft puts copies "
                    "in their place); train the prepared one, or prepare_qat the model that there is now"
                )

    def _check_scales(self) -> None:
        """Refuse weights that were frozen after all (as peft does) and changed: their scales have not moved."""
        if isinstance(self.model, FSDPModule):
            return
        frozen = [n for n in self.layers if id(n.parameter) in self.training and not n.parameter.requires_grad]
        for layer, quantizer in weight_scales(frozen):
            if quantizer.clips(layer.weight):
                raise InputError(
                    f"the weight of {layer.name} was changed and not trained (an adapter was merged?), and reaches "
                    'beyond the codes of its scales; call fit_scales(), or prepare with scales="fitted"'
                )

    def _note_uncalled(self, record: RunRecord, reporter: Reporter) -> None:
        """Say which layers training has not seen rounded: none calls them, though others are called."""
        uncalled = [layer.name for layer in self.layers if not was_called(layer.module)]
        if 0 < len(uncalled) < len(self.layers):
            others = f" and {len(uncalled) - 1} more" if len(uncalled) > 1 else ""
            record.note(
                reporter,
                f"{uncalled[0]}{others}: never called since prepare_qat, so that no loss has seen their rounding (a "
                "module or a fused loss that reads a weight itself reads the one that is trained)",
            )

    def _check_open(self) -> None:
        if self.converted:
            raise InputError("this model is converted already; prepare it again to train it further")


@torch.inference_mode(False)
def prepare_qat(
    model: nn.Module | str | Path,
    passes: Pass | Sequence[Pass],
    *,
    calibration: Calibration | None = None,
    scales: Scales = "learned",
    ignore: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    one_block: bool = False,
    convolutions: bool | None = None,
    drop_zeros: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Prepared:
    """Let passes decide about a model, and leave it rounding so, to be trained by any loop.

    What they decide is what is trained: codes stay codes on their grids, zeros of a mask stay zeros, inputs and outputs
    are rounded; gradients go straight through. scales: `learned` (LSQ), `anchored`
    (learned, while codes are chosen by the scales of the beginning), `fixed`, or `fitted` to the weights at every
    step. Keys and values are rounded as a cache will keep them. The other arguments are those of `quantize`.

    The module stays the one that was given, with its names and keys; its layers change their class. A parameter of 16
    bits has 32 afterwards: compute in 16 under autocast. What requires no gradient stays as it is, and so do the scales
    of its layer. Adapters of peft may be put on what was prepared, and merged before `convert`. Sharded by
    `fully_shard` before this call (in 32 bits) or after it; blocks may be compiled (`block.compile()`), and any process
    group may exist.

    Raises InputError before any work for input that cannot work, CompressError for work that failed; a model in memory
    is then what it was.
    """
    one_of("scales", scales, get_args(Scales))
    request = Request.of(locals())
    if any(p.stage(Learn) for p in request.passes):
        raise InputError("train is a loop of its own; leave it out of what your loop trains, or call quantize")
    comm = Comm()
    with watching(comm):
        job = prepare(request, None, comm, reporter or Silent())
        if not job.run.plan.passes:
            raise InputError("no pass decides about layers, which could be trained; add one, like RTN()")
        return _prepare(job, scales)


def _prepare(job: Job, scales: Scales) -> Prepared:
    """The model of a job, its passes carried out, with quantizers on its layers."""
    try:
        check_storable(job.run.plan)
    except InputError as error:
        job.note(f"convert cannot write this to an output: {error}")
    model, attached = job.run.model, list[Layer]()
    check_forms(job.run.plan.passes, job.run.plan.treated_layers)
    if isinstance(job.run.residency, Sharded):
        job.run.residency.widen(model)  # which refuses what cannot be trained

    def take_off() -> None:
        for layer in attached:
            detach(layer.module)

    with undone(take_off, values(model), hooks_and_buffers(model)):
        with job.undoing(), evaluating(model):
            decided = decide(job.run, job.run.plan.passes)
        wide = {name: p.dtype for name, p in model.named_parameters()}
        narrow = job.run.residency.widen(model)
        for layer in (*job.run.plan.treated_layers, *job.run.plan.tables):
            decision = decided.decisions.get(layer.name)
            if decision is not None and attach(layer, decision, scales):
                attached += [layer, *tied_to(layer)]
        freeze_with_weights(attached)
        if not attached:
            raise InputError("the passes leave nothing to round: no codes, no masks, no rounded inputs")
        caches = TrainedCaches(model, decided.caches)
        caches.on()
        begin(model, job.run.plan, job.run.residency, decided.decisions, decided.places)
    whole = list(scales_in(quantizers_of(attached)).values()) if isinstance(model, FSDPModule) else []
    training = frozenset(id(p) for p in model.parameters() if p.requires_grad)
    return Prepared(job, decided, attached, wide, caches, narrow, average_gradients(whole, job.run.comm), training)
