"""Exports a checkpoint as an ONNX graph: `model.onnx`, with its tensors in `model.onnx.data`.

onnx        compressed layers are MatMulNBits of ONNX Runtime, which round inputs to int8 in the product (level 4)
onnx-exact  the same, with inputs that are not rounded (level 0)
onnx-qdq    the same codes in standard operators, DequantizeLinear and MatMul, for any reader of ONNX

Layers of w8a8 are the same in all three: QuantizeLinear and DequantizeLinear around MatMul where the range of inputs is
fixed, and MatMulInteger where it is fitted to every token. Everything else computes in float32.

A decoder that keeps a cache gets genai_config.json, with which onnxruntime-genai generates (`genai`).

    checkpoint -> model without these weights -> layers that stand for them -> graph
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.base.errors import InputError
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import note_losses, why_no_linear_codes
from compress.checkpoint.export.place import Place
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import empty_model, read_config
from compress.checkpoint.read.source import Source
from compress.inference.load.dense_model import without_weights
from compress.inference.load.kv_caches import cache_hook
from compress.model.layers import transposed_weights
from compress.model.split_experts import has_experts
from compress.onnx import genai
from compress.onnx.graph_edits import narrow_tables
from compress.onnx.layers import Dynamic, GraphLayer, InBlocks, NBits, Static
from compress.onnx.readback import missing, read_back, reference, rounds, weight_sums
from compress.onnx.repacked import blocks_of, why_not
from compress.onnx.tracing import OPSET, trace_pretrained, why_no_tracing
from compress.weights.grid import Quantized, steps_of_range
from compress.weights.rounding import ActivationCodes

GRAPH = "model.onnx"
TENSORS = f"{GRAPH}.data"
REFERENCE = "reference.safetensors"  # our outputs, with which it is compared as it is written
# accuracy_level of MatMulNBits.
INT8_INPUTS, EXACT_INPUTS = 4, 0


@dataclass(frozen=True)
class Form:
    """The form of weight-only codes in a graph. portable: in standard operators alone; otherwise as MatMulNBits of this
    accuracy level: 4 rounds inputs to int8 in the product, 0 does not."""

    portable: bool
    level: int

    @property
    def signed(self) -> bool:
        """True where codes beside rounded inputs are int8; in the form that is to be exact everywhere they are not."""
        return self.portable or self.level > 0


@dataclass(frozen=True)
class Graph:
    """A graph. program: an `onnx_ir.Model`. names: {compressed layer in it: its name in the checkpoint}."""

    program: Any
    names: dict[str, str]

    @property
    def inputs(self) -> list[str]:
        """Names of its inputs, in order."""
        return [value.name for value in self.program.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        """Names of its outputs, in order."""
        return [value.name for value in self.program.graph.outputs]


def why_no_graph(source: Source) -> str | None:
    """The reason why no graph can be made here, or of this kind of model; None where one can."""
    if (reason := why_no_tracing()) is not None:
        return reason
    model = cast(Any, empty_model(source))
    if getattr(model.config, "is_encoder_decoder", False):
        return f"a {type(model).__name__} is an encoder with a decoder, two graphs; `--to dense` takes it"
    if getattr(model, "main_input_name", None) not in ("input_ids", "pixel_values"):
        return f"a {type(model).__name__} takes neither token ids nor images; `--to dense` takes it"
    if has_experts(model):
        return f"a {type(model).__name__} routes tokens to experts, which no graph here does; `--to dense` takes it"
    if transposed_weights(model):
        return (
            f"a {type(model).__name__} has layers of the class Conv1D, which no graph here has; `--to dense` takes it"
        )
    return None


def graph_of(source: Source, form: Form) -> Graph:
    """The graph of a checkpoint. Raises CompressError where the model cannot be traced, InputError where transformers
    converts its layers."""
    model, layers = without_weights(source, torch.float32, rounding=True)
    if not layers:
        raise InputError(f"transformers converts layers of {source.name} while it loads them; `--to dense` takes it")
    for name, layer in layers.items():
        stored = stored_in(source).layers[layer]
        (term,) = weight_of(source, layer).terms
        assert isinstance(term, Quantized)
        inputs = stored.scheme.read_inputs(stored.read(source))
        bias = cast(nn.Linear, model.get_submodule(name)).bias
        model.set_submodule(name, graph_layer(term, bias, inputs, form))
    for module in model.modules():
        if (hook := cache_hook(module)) is not None:
            hook.active = False
    program = trace_pretrained(model.eval())
    narrow_tables(program)
    return Graph(program, layers)


def graph_layer(weight: Quantized, bias: Tensor | None, inputs: ActivationCodes | None, form: Form) -> GraphLayer:
    """The layer that stands for a linear one, against which `repacked.why_not` has nothing."""
    if inputs is None:
        blocks = blocks_of(weight)
        return InBlocks(blocks, bias) if form.portable else NBits(blocks, bias, form.level)
    if inputs.dynamic:
        _, steps = steps_of_range(inputs.grid)
        return Dynamic(weight, bias, inputs.grid, steps, form.signed)
    return Static(weight, bias, inputs, form.signed)


class MatMulNBitsGraph(Exporter):
    """Codes of 2, 4 and 8 bits as ONNX Runtime multiplies them, and w8a8."""

    about = "an ONNX graph for ONNX Runtime: MatMulNBits with int8 inputs; codes of 2, 4 or 8 bits, and w8a8"
    kind = "onnx"
    one_file = True
    form: ClassVar[Form] = Form(portable=False, level=INT8_INPUTS)

    @property
    def reads_back(self) -> bool:
        """True where onnxruntime is installed."""
        return missing() is None

    def why_not(self, checkpoint: Source) -> list[str]:
        """Integer codes in every compressed layer, no compressed embedding, a model of one graph, and the packages."""
        if reasons := why_no_linear_codes(checkpoint):
            return reasons
        for name, layer in stored_in(checkpoint).layers.items():
            if (reason := why_not(layer.scheme, self.form.portable)) is not None:
                return [f"{name} {reason}"]
        return self.why_not_model(checkpoint)

    def why_not_model(self, model: Source) -> list[str]:
        """A model of one graph, and the packages."""
        reason = why_no_graph(model)
        return [] if reason is None else [reason]

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Trace the graph and write it, with our outputs for a few tokens or images."""
        import onnx_ir

        note_losses(checkpoint, place)
        graph_made = graph_of(checkpoint, self.form)
        graph, tensors = place.file(GRAPH), place.file(TENSORS)
        onnx_ir.save(graph_made.program, graph, external_data=tensors.name)
        place.json("config.json", {k: v for k, v in checkpoint.config.items() if k != "quantization_config"})
        if any(name.startswith(genai.NAMES["input"]) for name in graph_made.inputs):
            place.json(genai.FILE, genai.settings(checkpoint.path, read_config(checkpoint), GRAPH))
        entry: dict[str, Any] = {"file": GRAPH, "opset": OPSET, "inputs": graph_made.inputs}
        entry["accuracy_level"] = None if self.form.portable else self.form.level
        entry |= {"layers": weight_sums(checkpoint, graph_made.names), "rounds": rounds(checkpoint)}
        expected = reference(checkpoint)
        if isinstance(expected, str):
            entry |= {"reference": None, "why": expected}
        else:
            tensors_held, moved = expected
            save_file(tensors_held, place.aside(REFERENCE))
            entry |= {"reference": REFERENCE, "logits": graph_made.outputs[0] == "logits", "jitter": moved}
        if (line := missing()) is not None:
            place.note(f"nothing was compared: to run the graph {line}")
            return Written(len(graph_made.names), {"graph": entry, "verification": {"reader": f"not run: {line}"}})
        return Written(len(graph_made.names), {"graph": entry})

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the weights and outputs that ONNX Runtime computes with those decided. Raises CheckpointError."""
        return read_back(folder, record["graph"])


class ExactGraph(MatMulNBitsGraph):
    """The same, with inputs that are not rounded."""

    about = "the same, with inputs that are not rounded: slower, and closer"
    kind = "onnx-exact"
    form = Form(portable=False, level=EXACT_INPUTS)


class PortableGraph(MatMulNBitsGraph):
    """The same codes in standard operators."""

    about = "an ONNX graph of standard operators alone (DequantizeLinear, opset 21); codes of 4 or 8 bits, and w8a8"
    kind = "onnx-qdq"
    form = Form(portable=True, level=EXACT_INPUTS)
