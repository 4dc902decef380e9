"""The graph of a checkpoint, in which compressed layers hold their codes and everything else computes in float32.

checkpoint -> model without these weights -> layers that stand for them -> graph
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.inference.load.caches import cache_hook
from compress.inference.load.dense_model import without_weights
from compress.model.experts import Experts
from compress.model.layers import transposed_weights
from compress.model.split_experts import is_joined
from compress.onnx.graph_edits import narrow_tables
from compress.onnx.layers import Dynamic, GraphLayer, InBlocks, NBits, Static
from compress.onnx.repacked import blocks_of
from compress.onnx.tracing import trace_pretrained, why_no_tracing
from compress.weights.grid import Quantized, steps_of_range
from compress.weights.rounding import ActivationCodes


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
    if any(isinstance(module, Experts) or is_joined(module) for module in model.modules()):
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
