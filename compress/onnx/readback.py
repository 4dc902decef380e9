"""Reads an exported graph with ONNX Runtime and compares it with what was decided.

Of every compressed layer, ONNX Runtime's own weights are compared bit for bit: it runs the node that holds the codes
alone, without rounding inputs, on rows of the identity. As the graph is written, it also runs it on the tokens (or
images) of `reference.safetensors`, beside our outputs for them. Without rounded inputs they have to be equal but for
the order of sums; as the file is written, the difference is stated.

A sum of K products in float32 moves by about eps sqrt(K) of itself when its order changes. A number that lies half-way
between two codes then takes the other code, and the next layer's with it. `jitter` makes runs of ours in which every
layer's input is moved by so much, at random: as far as their outputs are from ours, others may be.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from compress.base.errors import CheckpointError, InputError, first_line, install
from compress.checkpoint.export.place import found_aside
from compress.checkpoint.files import checksum
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.source import Source
from compress.inference.check.by_transformers import NotComparedError
from compress.inference.layers.linear import QuantLinear
from compress.jobs.verify import probe_of, run_ours
from compress.kernels.cpu.processor import cpu_flags
from compress.onnx.onnxruntime_weights import layer_weights, read_columns, session

# Of the standard deviation of our outputs, where only the order of sums differs.
TOLERANCE = 1e-3
# Where inputs are rounded, the mean difference is held against the largest of a few of ours (`jitter`) so many times: a
# draw of theirs may be larger than all of ours.
MARGIN = 4
GIVEN, EXPECTED = "given", "outputs"
# Rows and tokens of the probe that a graph is run on.
KEPT = (slice(2), slice(16))
DRAWS = 4  # moved runs of ours
SATURATES = (
    "; this processor has no VNNI, without which its int8 products saturate: `--to onnx-exact` has others, and "
    "`--no-verify` leaves the comparison out"
)


def missing() -> str | None:
    """The line for a person without onnxruntime; None where it is installed."""
    return None if find_spec("onnxruntime") else f"needs the package onnxruntime; {install('onnx')}"


def weight_sums(source: Source, names: Mapping[str, str]) -> dict[str, str]:
    """{layer in the graph: SHA-256 of its values, float32, in the columns that are read back}. names: {layer in the
    graph: layer in the checkpoint}."""
    found = {}
    for module, layer in names.items():
        found[module] = value_sum(weight_of(source, layer, torch.float32).dequantize())
    return found


def value_sum(values: Tensor) -> str:
    """SHA-256 of a layer's values [N, K], float32, in the columns that are read back."""
    return _sum(values[:, torch.from_numpy(read_columns(values.shape[1]))])


def input_name(name: str) -> str:
    """The name in `reference.safetensors` of an input of a graph that has names of its own."""
    return f"{GIVEN}.{name}"


def _sum(values: Tensor) -> str:
    """The SHA-256 of values, in which a zero has no sign: a product with the identity loses it."""
    return checksum((values + 0.0).contiguous())


def reference(source: Source) -> tuple[dict[str, Tensor], list[float]] | str:
    """({"given": token ids or images, "outputs": our outputs for them}, in float32; their `jitter`, of a model that
    rounds inputs), or the reason why there are none."""
    tokens = probe_of(source.config)
    if tokens is None:
        return "the configuration names neither vocab_size nor num_channels"
    tokens = tokens if tokens.is_floating_point() else tokens[KEPT]

    def run() -> Tensor:
        return run_ours(source, torch.float32, tokens, rounds(source), not rounds(source)).uncached

    try:
        ours = run()
        moved = jitter(run, ours) if rounds(source) else []
    except NotComparedError as why:
        return str(why)
    return {GIVEN: tokens.contiguous(), EXPECTED: ours.contiguous()}, moved


def rounds(source: Source) -> bool:
    """True where layers round their inputs: a sum in another order then takes the other code of some ties."""
    return any(layer.scheme.inputs is not None for layer in stored_in(source).layers.values())


def read_back(folder: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a graph with the record of its values. written: the entry `graph` of the record.

    Returns {layers, reader, remarks} and figures of the outputs: deviation, exact_max_difference, exact_mean_difference
    and the allowed one (by MatMulNBits without rounded inputs), max_difference, and of logits same_top and kl.
    Raises CheckpointError, which names a layer that differs, and InputError where the package is missing.
    """
    import onnxruntime

    if (line := missing()) is not None:
        raise InputError(f"{folder} {line}")
    graph, reader = folder / written["file"], f"onnxruntime {onnxruntime.__version__}"
    try:
        for layer, values in layer_weights(graph, written["layers"]):
            if _sum(torch.from_numpy(values)) != written["layers"][layer]:
                raise CheckpointError(f"{layer} of {graph}, as {reader} reads it, is not what was decided")
        figures = _outputs(graph, written, reader)
    except CheckpointError:
        raise
    except (SafetensorError, Exception) as error:  # noqa: BLE001 - onnx and onnxruntime raise kinds of their own
        raise CheckpointError(f"{graph} cannot be run by {reader}: {first_line(error)}") from None
    found = {"layers": len(written["layers"]), "reader": reader, **figures}
    return {**found, "remarks": [*_remarks(found, written)]}


def _outputs(graph: Path, written: Mapping[str, Any], reader: str) -> dict[str, Any]:
    kept = None if written["reference"] is None else found_aside(graph.parent, written["reference"])
    if kept is None:
        return {}
    held = load_file(kept)
    ours = held[EXPECTED]
    named = GIVEN not in held
    inputs = {name: held[input_name(name)] for name in written["inputs"]} if named else held[GIVEN]
    deviation, exact = float(ours.std()), run(graph, inputs, 0)
    distances = (exact - ours).abs()
    off, mean = float(distances.max()), float(distances.mean())
    allowed = TOLERANCE * deviation + MARGIN * max(written["jitter"], default=0.0)
    if not (mean if written["rounds"] else off) <= allowed:
        raise CheckpointError(
            f"outputs of {graph} by {reader} differ from ours by up to {off:.3g}, of a deviation of {deviation:.3g}"
            + (SATURATES if written["rounds"] and saturates() else "")
        )
    found = run(graph, inputs, None)
    result = {"deviation": deviation, "allowed": allowed, "exact_max_difference": off, "exact_mean_difference": mean}
    result["max_difference"] = float((found - ours).abs().max())
    if written["logits"]:
        result["same_top"] = float((found.argmax(-1) == ours.argmax(-1)).float().mean())
        result["kl"] = divergence(ours, found)
    return result


def saturates() -> bool:
    """True on a processor where ONNX Runtime's products of int8 codes saturate: x86 without VNNI."""
    flags = cpu_flags()
    return "avx2" in flags and not flags & {"avx_vnni", "avx512_vnni"}


def _remarks(found: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[str]:
    """The findings about the outputs, in words."""
    if "max_difference" not in found:
        why = written.get("why", "that is done as it is written")
        yield f"outputs of the graph were not compared: {why}"
        return
    off, deviation = found["max_difference"], found["deviation"]
    line = f"outputs by {found['reader']} differ from ours by up to {off:.2g}, of a deviation of {deviation:.2g}"
    if "kl" in found:
        line += f"; same top {found['same_top']:.1%}, KL {found['kl']:.2g}"
    yield line


def divergence(ours: Tensor, theirs: Tensor) -> float:
    """The mean KL divergence, in nats, of predictions from logits [..., V] to those from others."""
    p, q = (each.double().log_softmax(-1) for each in (ours, theirs))
    return float((p.exp() * (p - q)).sum(-1).mean())


def run(graph: Path, given: Tensor | Mapping[str, Tensor], level: int | None) -> Tensor:
    """The first output of a graph for token ids or images, or for inputs by name. level: of accuracy, instead of the
    file's. A graph with a cache runs twice, the second half after the first."""
    opened = session(graph, level)
    if not isinstance(given, Tensor):
        return torch.from_numpy(opened.run(None, {name: each.numpy() for name, each in given.items()})[0])
    shapes = {value.name: value.shape for value in opened.get_inputs()}
    if given.is_floating_point():
        (name,) = shapes
        return torch.from_numpy(opened.run(None, {name: given.numpy()})[0])
    cached = [name for name in shapes if "past_key_values" in name]
    if not cached:
        ones, zeros = np.ones(given.shape, np.int64), np.zeros(given.shape, np.int64)
        whole = {"input_ids": given.numpy(), "attention_mask": ones, "token_type_ids": zeros}
        return torch.from_numpy(opened.run(None, {name: whole[name] for name in shapes})[0])
    past = {name: np.zeros((len(given), shapes[name][1], 0, shapes[name][3]), np.float32) for name in cached}
    parts, done = [], 0
    for part in given.split(-(-given.shape[1] // 2), dim=1):
        done += part.shape[1]
        feed = {"input_ids": part.numpy(), "attention_mask": np.ones((len(part), done), np.int64), **past}
        logits, *caches = opened.run(None, {name: feed[name] for name in shapes})
        past = dict(zip(cached, caches, strict=True))
        parts.append(torch.from_numpy(logits))
    return torch.cat(parts, 1)


def jitter(run: Callable[[], Tensor], first: Tensor) -> list[float]:
    """Mean distances between the first run's outputs and those of `DRAWS` moved ones. run: makes the outputs."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(DRAWS):
        with move_inputs(generator):
            found.append(float((run() - first).abs().mean()))
    return found


@contextmanager
def move_inputs(generator: torch.Generator) -> Iterator[None]:
    """Moves what layers of all models read by a rounding of float32 sums, for the body."""

    def move(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | QuantLinear) or not given:
            return None
        x = given[0]
        terms = module.weight[0].numel() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else x.shape[-1]
        size = torch.finfo(torch.float32).eps * terms**0.5
        shift = torch.empty(x.shape).uniform_(-size, size, generator=generator)
        return (x * (1 + shift), *given[1:])

    with register_module_forward_pre_hook(cast(Any, move)):
        yield
