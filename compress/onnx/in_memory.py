"""`export_onnx`: the graph of a model that was quantized in memory, convolutions included.

    quantize(model, ..., keep_codes=True) -> its modules and their codes -> layers of a graph -> OUT, read back

Every layer that was rounded keeps its codes: linear ones as checkpoints have them (`graph_layer`), convolutions as
`layers` says. Tensors between convolutions stay in integers where they can (`graph_edits`).
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Reporter, Silent
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.write import Exported, in_one_line, verify_written
from compress.checkpoint.write.directory import claim
from compress.checkpoint.write.manifest import manifest
from compress.checkpoint.write.record import RunRecord
from compress.engine.layer_versions import RoundInput
from compress.jobs.job import Result
from compress.model.calls import evaluating, removing
from compress.model.convolution import is_convolution
from compress.model.online_rotation import input_rotation
from compress.onnx.exporters import (
    GRAPH,
    REFERENCE,
    TENSORS,
    ExactGraph,
    Form,
    MatMulNBitsGraph,
    PortableGraph,
    graph_layer,
)
from compress.onnx.graph_edits import keep_integers, narrow_tables
from compress.onnx.layers import GraphConvolution, GraphLayer, RoundedInGraph, why_not_convolution
from compress.onnx.readback import EXPECTED, input_name, jitter, missing, value_sum
from compress.onnx.repacked import why_not
from compress.onnx.tracing import OPSET, trace_module, why_no_tracing
from compress.weights.decision import Decision
from compress.weights.grid import Quantized

FORMS = {kind.kind: kind.form for kind in (MatMulNBitsGraph, ExactGraph, PortableGraph)}


def export_onnx(
    result: Result,
    batch: Mapping[str, Tensor],
    output: str | Path,
    to: str = "onnx",
    *,
    overwrite: bool = False,
    verify: bool = True,
    reporter: Reporter | None = None,
) -> Exported:
    """Write a model that was quantized in memory as an ONNX graph.

    result: of `quantize` with `keep_codes`. batch: inputs by their names in the model's forward, several samples of
    each, like {"pixel_values": images}; the number of samples may change later, other sizes not. Our outputs for them
    are compared with the graph's. to: a word of `FORMS`, as `export` has them. verify: read the output back by
    onnxruntime, where it is installed, in a process of its own.

    Raises InputError, having written nothing, for a layer without an exact form; CompressError for a model that cannot
    be traced, and for an output that is not what was decided.
    """
    model, codes, reporter = result.model, result.codes, reporter or Silent()
    if model is None or codes is None:
        raise InputError("the result holds no codes; give keep_codes=True to quantize, or export its output")
    _check(model, codes, batch, to)
    size = 0
    with claim(output, Comm(), resume=False, overwrite=overwrite) as directory, evaluating(model):
        assert directory is not None
        place = Place(directory, reporter)
        with in_one_line(directory):
            entry = _write(model, codes, batch, FORMS[to], place)
            identity = {"export": to, "model": type(model).__name__}
            notes = RunRecord(notes=[*result.record.notes, *place.lost])
            about = manifest(notes, model=type(model).__name__, identity=identity, calibration=None, ranks=1)
            size = place.finish(None, {**about, "graph": entry})
            if verify and missing() is None:
                verify_written(directory, reporter)
        directory.take_name(overwrite)
    before = sum(part.numel() * part.element_size() for part in model.parameters())
    return Exported(directory.output, len(codes), size, tuple(place.lost), before)


def _check(model: nn.Module, codes: Mapping[str, Decision], batch: Mapping[str, Tensor], to: str) -> None:
    """Raises InputError for what cannot be written."""
    if to not in FORMS:
        raise InputError(f"export {to!r} of a model in memory; allowed: {', '.join(FORMS)}")
    if (reason := why_no_tracing()) is not None:
        raise InputError(reason)
    if not batch or any(not isinstance(x, Tensor) or len(x) < 2 for x in batch.values()):
        raise InputError("batch: give tensors of two or more samples, by the names of the model's inputs")
    for name, decision in codes.items():
        module = model.get_submodule(name)
        if input_rotation(module) is not None:
            reason = "rotates its input as the model runs, which graphs here do not; leave rotate's online out"
        elif isinstance(decision.weight, Quantized) and decision.weight.scale.dtype != torch.float32:
            kind = str(decision.weight.scale.dtype).removeprefix("torch.")
            reason = f"was quantized in {kind}, and graphs compute in float32; quantize model.float(), or a checkpoint"
        elif is_convolution(module):
            reason = why_not_convolution(decision)
        elif type(module) is nn.Linear:
            reason = why_not(decision.scheme(), FORMS[to].portable)
        else:
            reason = f"is a {type(module).__name__}, which has no codes in ONNX; ignore it"
        if reason is not None:
            raise InputError(f"{name} {reason}")


def _write(
    model: nn.Module, codes: Mapping[str, Decision], batch: Mapping[str, Tensor], form: Form, place: Place
) -> dict[str, Any]:
    """The entry `graph` of the record, with its files written."""
    import onnx_ir

    outputs = _outputs(model, batch)
    expected = next(iter(outputs.values()))
    program = trace_module(_with_codes(model, codes, form), batch, list(outputs))
    keep_integers(program)
    narrow_tables(program)
    onnx_ir.save(program, place.file(GRAPH), external_data=place.file(TENSORS).name)
    held = {input_name(name): x.contiguous().clone() for name, x in batch.items()}
    save_file({**held, EXPECTED: expected.contiguous()}, place.aside(REFERENCE))
    rounded = any(each.inputs is not None or each.outputs is not None for each in codes.values())
    values = {name: each.weight.dequantize().to(torch.float32) for name, each in codes.items()}
    return {
        "file": GRAPH,
        "opset": OPSET,
        "inputs": list(batch),
        "accuracy_level": None if form.portable else form.level,
        "layers": {name: value_sum(each) for name, each in values.items()},
        "rounds": rounded,
        "jitter": jitter(lambda: next(iter(_outputs(model, batch).values())), expected) if rounded else [],
        "reference": REFERENCE,
        "logits": expected.ndim == 2,  # [samples, classes]
    }


def _with_codes(model: nn.Module, codes: Mapping[str, Decision], form: Form) -> nn.Module:
    """A copy of a model in float32, with layers that stand for compressed ones."""
    layers: dict[str, GraphLayer] = {}
    for name, decision in codes.items():
        module: Any = model.get_submodule(name)
        (term,) = decision.weight.terms
        assert isinstance(term, Quantized)
        if is_convolution(module):
            layers[name] = GraphConvolution(module, term, decision.inputs, signed=form.signed)
        else:
            layers[name] = graph_layer(term, module.bias, decision.inputs, form)
        if decision.outputs is not None:
            layers[name].outputs = RoundedInGraph(decision.outputs)
    whole = copy.deepcopy(model)
    for name, layer in layers.items():
        whole.set_submodule(name, layer)
    return whole.float().eval()


@torch.no_grad()
def _outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{name: output} of a model, as its graph computes it."""
    with _share_rounding(model):
        found = model(**batch)
    if isinstance(found, Tensor):
        return {"output": found}
    if isinstance(found, Mapping):
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return {f"output_{i}": value for i, value in enumerate(found) if isinstance(value, Tensor)}


def _share_rounding(model: nn.Module) -> AbstractContextManager[None]:
    """Makes convolutions round what they read in place, so that later readers of it get the rounded tensor, too, as
    `graph_edits.keep_integers` makes graphs."""
    rounding = {
        module: hook
        for module in model.modules()
        if is_convolution(module)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, RoundInput)
    }
    return removing(
        [module.register_forward_pre_hook(partial(_in_place, hook), prepend=True) for module, hook in rounding.items()]
    )


def _in_place(hook: RoundInput, module: nn.Module, given: tuple[Any, ...]) -> None:
    given[0].copy_(hook.rounded(given[0]))
