"""Check a written checkpoint in this (fresh) process: files against the run's record, and transformers against us."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint import RECORD, checksum, read_json
from compress.errors import CheckpointError, CompressError, InputError
from compress.grid import Quantized
from compress.loading import load, transformers_alone
from compress.lowbit import compressed_layers
from compress.nn import QuantLinear
from compress.scheme import InputCodes
from compress.source import Source, find_source, from_pretrained, layers_of, read_tensors

PROBE_ROWS, PROBE_LENGTH = 2, 32
PROBE_SIZE = 64  # pixels, height and width
# Of the standard deviation of logits, and of a layer's output, for models that round what their layers multiply.
ACTIVE_TOLERANCE = 0.05


def check_record(source: Source) -> int:
    """Compare every layer's values with the checksum that the run recorded; returns how many were compared."""
    path = source.path / RECORD
    if not path.exists():
        raise InputError(f"{source.path} holds no {RECORD}; only checkpoints of this tool can be verified")
    tensors = read_tensors(source)
    compared = 0
    for layer in read_json(path)["layers"]:
        value = tensors.get(f"{layer['name']}.weight")
        if value is None:
            raise CheckpointError(f"{layer['name']} is in {RECORD} but not in the checkpoint")
        if isinstance(value, Quantized):
            values = value.dequantize()
        else:  # Conv1D, transposed, or a convolution
            values = value.t() if value.ndim == 2 else value.flatten(1)
        if checksum(values) != layer["figures"]["sha256"]:
            raise CheckpointError(f"{layer['name']} does not hold the values that the run decided; write it again")
        compared += 1
    return compared


def probe(vocabulary: int) -> Tensor:
    """Token ids [rows, length], the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (PROBE_ROWS, PROBE_LENGTH), generator=generator)


def probe_of(config: Mapping[str, Any]) -> Tensor | None:
    """Token ids, or images for a model that takes those; None for one that does not say what it takes."""
    vocabulary, channels = config.get("vocab_size"), config.get("num_channels")
    if isinstance(vocabulary, int):
        return probe(vocabulary)
    size = config.get("image_size", PROBE_SIZE)  # a model of convolutions alone names none
    if not isinstance(size, int) or not isinstance(channels, int):
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PROBE_ROWS, channels, size, size, generator=generator)


@torch.no_grad()
def outputs(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits, or the last hidden state of a model without a head, from token ids or (floating point) images."""
    config: Any = model.config
    if ids.is_floating_point():
        found = model(pixel_values=ids.to(next(p for p in model.parameters() if p.is_floating_point()).dtype))
        return found.logits if "logits" in found else found[0]
    decoder = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    result = model(input_ids=ids, **decoder)
    return result.logits if "logits" in result else result[0]


def rounded_product(layer: QuantLinear, x: Tensor) -> Tensor:
    """What the codes of a layer and of its input stand for, by torch's own product."""
    if layer.scheme.inputs is not None:
        fixed = {"scale": getattr(layer, "input_scale", None), "zero_point": getattr(layer, "input_zero", None)}
        given = {key: None if value is None else value.reshape(1, 1) for key, value in fixed.items()}
        x = InputCodes(layer.scheme.inputs, **given).fake_quantize(x)
    return nn.functional.linear(x, layer.dequantize(), layer.bias)


@contextmanager
def plain_products(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within: compressed layers return `rounded_product`. Yields how far off their kernels are on the same input, by
    name: the largest difference over the standard deviation of the output.

    Whole models cannot be compared where inputs are rounded: a difference in the last place makes another code of a
    tie, a whole step then makes more of them in the layers that follow, and few blocks make it as large as what
    rounding does. With float8, whose steps are the widest, that is the rule.
    """
    worst: dict[str, float] = {}

    def forward(name: str, layer: QuantLinear, x: Tensor) -> Tensor:
        expected = rounded_product(layer, x)
        difference = (type(layer).forward(layer, x) - expected).abs().max()
        worst[name] = max(worst.get(name, 0.0), float(difference / expected.std().clamp(min=1e-30)))
        return expected

    layers = dict(compressed_layers(model))
    for name, layer in layers.items():
        vars(layer)["forward"] = partial(forward, name, layer)
    try:
        yield worst
    finally:
        for layer in layers.values():
            del vars(layer)["forward"]


def load_with_transformers(source: Source, dtype: torch.dtype | None = None) -> tuple[nn.Module, str]:
    """The checkpoint as any user of transformers loads it, and how: "default" or "dequantize=True".

    Needs compressed-tensors for a quantized one. The default load has no packed asymmetric weights and no packed
    embeddings, and breaks for architectures whose initialization touches the weights (T5). Dequantizing while loading
    works for all that have one scheme; it would read several as if they were the first. Raises CheckpointError for what
    neither can load.
    """
    with transformers_alone():
        return _load_with_transformers(source, dtype or "auto")


def _load_with_transformers(source: Source, dtype: torch.dtype | str) -> tuple[nn.Module, str]:
    groups = (source.quantization or {}).get("config_groups", {}).values()
    if all(group["weights"]["symmetric"] or group["format"] != "pack-quantized" for group in groups):
        try:
            return from_pretrained(source, str(source.path), dtype=dtype), "default"
        except CheckpointError:
            if len(groups) != 1:
                raise
    elif len(groups) > 1:
        raise CheckpointError("packed asymmetric weights beside layers of another scheme")
    from transformers import CompressedTensorsConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers remarks that it was given a second configuration
        config = CompressedTensorsConfig(dequantize=True)
        return from_pretrained(source, str(source.path), dtype=dtype, quantization_config=config), "dequantize=True"


def verify(path: str | Path) -> dict[str, Any]:
    """Verify a checkpoint. Raises CompressError where it is not what the run decided or loads as something else.

    Returns {layers, transformers, loader, dtype, logits_max_difference}: the layers compared, whether transformers was
    compared (and why not), how it loads the checkpoint, in which dtype, and the largest difference of its logits from
    ours: 0.0, or up to ACTIVE_TOLERANCE of their standard deviation where inputs are quantized too. There our kernels
    are compared layer by layer.
    """
    source = find_source(str(path))
    result: dict[str, Any] = {"layers": check_record(source), "transformers": "compared"}
    if source.quantization is not None:
        try:
            import compressed_tensors  # noqa: F401
        except ImportError:
            return {**result, "transformers": "not compared: install compress-models[hf]"}
    ids = probe_of(source.config)
    if ids is None:
        return {**result, "transformers": "not compared: the configuration names neither vocab_size nor num_channels"}
    # In 16 bits transformers' emulation of quantized inputs rounds before it rounds: both compute in float32.
    active = any(stored.scheme.inputs is not None for stored in layers_of(source).values())
    dtype = torch.float32 if active else None
    ours = load(path, dtype, dequantize=source.quantization is not None and not active)
    try:
        products: AbstractContextManager[dict[str, float]] = plain_products(ours) if active else nullcontext({})
        with products as worst:
            expected = outputs(ours, ids)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "images" if ids.is_floating_point() else "token ids"
        return {**result, "transformers": f"not compared: {type(ours).__name__} takes no plain {what} ({reason})"}
    for name, difference in worst.items():
        if not difference <= ACTIVE_TOLERANCE:
            raise CompressError(
                f"{name} of {source.path} computes something else than its codes stand for: off by {difference:.3g} "
                "standard deviations of its output"
            )
    result["dtype"] = str(expected.dtype).removeprefix("torch.")
    del ours
    try:
        theirs, result["loader"] = load_with_transformers(source, dtype)
    except CheckpointError as error:
        if len((source.quantization or {}).get("config_groups", {})) < 2:
            raise
        return {**result, "transformers": f"not compared: it cannot load this mix of schemes ({error})"}
    found = outputs(theirs, ids)
    result["logits_max_difference"] = float((found.float() - expected.float()).abs().max())
    allowed = ACTIVE_TOLERANCE * float(expected.float().std()) if active else 0.0
    if not result["logits_max_difference"] <= allowed:
        raise CompressError(
            f"{source.path} loads in transformers with logits that differ by up to "
            f"{result['logits_max_difference']:.3g} from what its codes stand for"
        )
    return result
