"""Traces a model to an ONNX graph with torch.onnx, models of transformers by their own exporter.

transformers' exporter (`transformers.exporters`) knows what its models need to be traced: caches as inputs and outputs,
masks, patterns that torch.onnx has no nodes for.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from compress.base.errors import CompressError, first_line, install
from compress.onnx.genai import name_caches
from compress.onnx.layers import LAYER, GraphLayer

# The first with blocks and 4 bits in DequantizeLinear; onnxruntime has it since 1.20.
OPSET = 21
# Sizes of the sample that is traced: no two alike and none 1, or torch would take them for one, or for fixed.
BATCH, LENGTH, PAST = 2, 3, 6
IMAGE = 224  # pixels, where a configuration names none
LIBRARIES = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers")


def why_no_tracing() -> str | None:
    """The reason why nothing can be traced here: packages that are missing; None where nothing is."""
    try:
        import onnxscript  # noqa: F401
        from transformers.exporters.exporter_onnx import OnnxExporter
    except ImportError as error:
        return f"a graph needs more packages ({first_line(error)}); {install('onnx')}"
    return None if hasattr(OnnxExporter, "export_program") else f"a graph needs a newer transformers; {install('onnx')}"


def trace_pretrained(model: nn.Module) -> Any:
    """The `onnx_ir.Model` of a model of transformers. Raises CompressError where it cannot be traced."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    sample, sizes = sample_of(model)
    wanted = OnnxConfig(
        dynamic=True,
        dynamic_shapes=sizes,
        opset_version=OPSET,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    with _traceable(model):
        program, _ = OnnxExporter().export_program(cast(Any, model), sample, wanted)
    _narrow(program, model)
    name_caches(program)
    return program


def trace_module(model: nn.Module, given: Mapping[str, torch.Tensor], outputs: list[str]) -> Any:
    """The `onnx_ir.Model` of any module with these inputs, whose first size may change. Raises CompressError where it
    cannot be traced."""
    sizes = {name: {0: torch.export.Dim.DYNAMIC} for name in given}
    with _traceable(model):
        exported = torch.onnx.export(
            model,
            kwargs=dict(given),
            dynamic_shapes=sizes,
            input_names=list(given),
            output_names=outputs,
            opset_version=OPSET,
            verbose=False,
        )
    assert exported is not None
    _narrow(exported.model, model)
    return exported.model


def sample_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """(Inputs to trace a model of transformers with, which of their sizes may change)."""
    config = cast(Any, model).config
    free = torch.export.Dim.DYNAMIC
    if cast(Any, model).main_input_name == "pixel_values":
        size = getattr(config, "image_size", IMAGE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(BATCH, config.num_channels, height, width)}, {"pixel_values": {0: free}}
    sizes = {0: free, 1: free}
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    if not cast(Any, model).can_generate():
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = torch.zeros_like(ids)
        return given, dict.fromkeys(given, sizes)
    from transformers import DynamicCache

    # Without the configuration no layer forgets what lies behind a sliding window; the masks still hide it.
    cache = DynamicCache()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        held = torch.zeros(BATCH, heads, PAST, width)
        cache.update(held, held.clone(), layer)
    mask = torch.ones(BATCH, PAST + LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}, {
        "input_ids": sizes,
        "attention_mask": {0: free, 1: torch.export.Dim.AUTO},
        "past_key_values": [{0: free, 2: free} for _ in range(2 * config.num_hidden_layers)],
    }


@contextmanager
def _traceable(model: nn.Module) -> Iterator[None]:
    """Keeps progress and warnings of the libraries, which are about their own code, off the terminal. Raises
    CompressError for whatever they raise."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    for name, module in model.named_modules():
        if isinstance(module, GraphLayer):
            module.label = name
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        except Exception as error:
            raise CompressError(f"torch.onnx cannot trace {type(model).__name__}: {first_line(error)}") from error
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _narrow(program: Any, model: nn.Module) -> None:
    """Turn initializers with one code in a byte into ONNX's types of 4 bits, with two codes in a byte. Drop what the
    exporter notes about its own work, which is most of a small file."""
    import ml_dtypes
    import onnx_ir as ir

    for node in program.graph.all_nodes():
        noted = node.metadata_props.get(LAYER)
        node.metadata_props.clear()
        if noted is not None:
            node.metadata_props[LAYER] = noted
        for value in node.outputs:
            value.metadata_props.clear()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GraphLayer)}
    types = {f"{name}.{part}": kind for name, layer in layers.items() for part, kind in layer.narrow.items()}
    for name, value in program.graph.initializers.items():
        if (kind := types.get(name)) is not None:
            codes = value.const_value.numpy().astype(getattr(ml_dtypes, kind.lower()))
            value.const_value = ir.tensor(codes, dtype=ir.DataType[kind], name=name)
            value.dtype = ir.DataType[kind]
