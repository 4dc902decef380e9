"""Check a written checkpoint in this (fresh) process: files against the run's record, and transformers against us."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.checkpoint.files import RECORD, checksum
from compress.checkpoint.manifest import read_record
from compress.checkpoint.pretrained import from_pretrained
from compress.checkpoint.source import Source, find_source
from compress.checkpoint.stored import stored_in, weight_of
from compress.errors import CheckpointError, CompressError, InputError, first_line
from compress.progress import without_bars
from compress.runtime.assembly import compressed_layers
from compress.runtime.caches import rounded_cache
from compress.runtime.linear import QuantLinear, RowLinear, SumLinear
from compress.runtime.loading import load_source, transformers_alone
from compress.weights.compressed_tensors import needs_dequantizing, read_scheme
from compress.weights.own_words import METHOD
from compress.weights.rounding import ActivationCodes

PROBE_ROWS, PROBE_LENGTH = 2, 32
PROBE_SIZE = 64  # pixels, height and width
# Of the standard deviation of logits, and of a layer's output, for models that round what their layers multiply.
ACTIVE_TOLERANCE = 0.05


def check_record(source: Source) -> int:
    """Compare every tensor, and every layer's values, with the checksums that the run recorded; returns how many layers
    were compared. Raises CheckpointError that names the tensor or the layer."""
    path = source.path / RECORD
    if not path.exists():
        raise InputError(f"{source.path} holds no {RECORD}; only checkpoints of this tool can be verified")
    record = read_record(source.path)
    # Before tensors had checksums of their own, only the values of compressed layers did.
    check_tensors(source, record.get("tensors"))
    for layer in record["layers"]:
        if checksum(_values(source, layer["name"])) != layer["figures"].get("sha256"):
            raise CheckpointError(f"{layer['name']} does not hold the values that the run decided; write it again")
    return len(record["layers"])


def _values(source: Source, layer: str) -> Tensor:
    """The values [N, K] of a layer, compressed or stored dense."""
    if layer in stored_in(source).layers:
        return weight_of(source, layer).dequantize()
    if f"{layer}.weight" not in source.weights:
        raise CheckpointError(f"{layer} is in {RECORD} but not in the checkpoint")
    dense = source.weights.tensor(f"{layer}.weight")
    return dense.t() if dense.ndim == 2 else dense.flatten(1)  # Conv1D, transposed, or a convolution


def check_tensors(source: Source, recorded: Mapping[str, str] | None) -> None:
    """Hold the bytes of every tensor to the SHA-256 in the record: scales, norms, embeddings and all. Raises
    CheckpointError that names one which is missing, superfluous or not what was written."""
    if recorded is None:
        return
    found = {name: checksum(source.weights.tensor(name)) for name in source.weights}
    if lost := sorted(recorded.keys() - found.keys()):
        raise CheckpointError(f"{lost[0]} is in {RECORD} but not in the checkpoint ({len(lost)} missing in all)")
    if foreign := sorted(found.keys() - recorded.keys()):
        raise CheckpointError(f"{foreign[0]} is in the checkpoint but not in {RECORD} ({len(foreign)} such tensors)")
    if changed := [name for name in recorded if found[name] != recorded[name]]:
        raise CheckpointError(
            f"{changed[0]} is not what the run wrote ({len(changed)} tensors differ in all); write it again"
        )


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


def activation_codes(layer: QuantLinear, side: Literal["input", "output"]) -> ActivationCodes | None:
    """How the input or the output of a layer is rounded."""
    grid = layer.scheme.inputs if side == "input" else layer.scheme.outputs
    if grid is None:
        return None
    fixed = (getattr(layer, f"{side}_{part}", None) for part in ("scale", "zero"))
    return ActivationCodes(grid, *(None if value is None else value.reshape(1, -1) for value in fixed))


def rounded_product(layer: QuantLinear, x: Tensor) -> Tensor:
    """What the codes of a layer and of its input stand for, by torch's own product; its output is not rounded yet."""
    codes = activation_codes(layer, "input")
    return nn.functional.linear(x if codes is None else codes.fake_quantize(x), layer.dequantize(), layer.bias)


@contextmanager
def plain_products(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within: compressed layers return `rounded_product`, rounded where they round their output. Yields how far off
    their kernels are on the same input, by name: the largest difference over the standard deviation of the output,
    before it is rounded and of what rounding makes of it.

    Whole models cannot be compared where inputs are rounded: a difference in the last place makes another code of a
    tie, a whole step then makes more of them in the layers that follow, and few blocks make it as large as what
    rounding does. With float8, whose steps are the widest, that is the rule.
    """
    worst: dict[str, float] = {}

    def forward(name: str, layer: QuantLinear, x: Tensor) -> Tensor:
        expected = rounded_product(layer, x)
        codes = activation_codes(layer, "output")
        if codes is None:
            difference = (type(layer).forward(layer, x) - expected).abs().max()
        else:
            assert isinstance(layer, RowLinear | SumLinear)
            returned = codes.fake_quantize(expected)
            apart = (layer.product(x) - expected, layer.rounded(expected) - returned)
            difference = torch.stack([each.abs().max() for each in apart]).max()
        worst[name] = max(worst.get(name, 0.0), float(difference / expected.std().clamp(min=1e-30)))
        return expected if codes is None else returned

    layers = dict(compressed_layers(model))
    for name, layer in layers.items():
        vars(layer)["forward"] = partial(forward, name, layer)
    try:
        yield worst
    finally:
        for layer in layers.values():
            del vars(layer)["forward"]


@contextmanager
def exact_caches(model: nn.Module) -> Iterator[None]:
    """Within: attentions keep keys and values as they are."""
    hooks = [hook for module in model.modules() if (hook := rounded_cache(module)) is not None]
    for hook in hooks:
        hook.active = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.active = True


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
    quantization = source.quantization or {}
    groups = (quantization.get("config_groups") or {}).values()
    schemes = [read_scheme(group, quantization.get("format"), f"a layer of {source.path}") for group in groups]
    if not any(needs_dequantizing(scheme) for scheme in schemes):
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


def _unknown_mix(source: Source, model: nn.Module) -> bool:
    """Whether transformers cannot load a checkpoint in any way: its default load knows neither packed zero points nor
    packed embeddings, and `dequantize=True` reads all layers by the scheme of the first group."""
    if len((source.quantization or {}).get("config_groups") or ()) < 2:
        return False
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return any(needs_dequantizing(stored.scheme, name in tables) for name, stored in stored_in(source).layers.items())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().mean())


@without_bars()
def verify(path: str | Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Verify a checkpoint. Raises CompressError where it is not what the run decided or loads as something else.

    trust_remote_code: run Python code that comes with the model, if any does.

    Returns {layers, transformers, loader, dtype, logits_max_difference}: the layers compared, whether transformers was
    compared (and why not), how it loads the checkpoint, in which dtype, and the largest difference of its logits from
    ours: 0.0, or up to ACTIVE_TOLERANCE of their standard deviation where inputs or key-value caches are quantized too.
    Where inputs are, our kernels are compared layer by layer. cache, where a key-value cache is quantized: whether it
    was compared, too.
    """
    source = find_source(str(path), trust_remote_code)
    result: dict[str, Any] = {"layers": check_record(source), "transformers": "compared"}
    ours_alone = (source.quantization or {}).get("quant_method") == METHOD
    if source.quantization is not None and not ours_alone:
        try:
            import compressed_tensors  # noqa: F401
        except ImportError:
            return {**result, "transformers": "not compared: install compress-models[hf]"}
    ids = probe_of(source.config)
    if ids is None:
        return {**result, "transformers": "not compared: the configuration names neither vocab_size nor num_channels"}
    # In 16 bits transformers' emulation of quantized activations rounds before it rounds: both compute in float32.
    cached = stored_in(source).caches is not None
    active = (
        cached or ours_alone or any(stored.scheme.inputs is not None for stored in stored_in(source).layers.values())
    )
    dtype = torch.float32 if active else None
    dense = source.quantization is not None and not active
    ours = load_source(source, dtype, dequantize=dense)
    try:
        products: AbstractContextManager[dict[str, float]] = plain_products(ours) if active else nullcontext({})
        with products as worst:
            expected = outputs(ours, ids)
            with exact_caches(ours):
                uncached = outputs(ours, ids) if cached else expected
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = "images" if ids.is_floating_point() else "token ids"
        refusal = f"{type(ours).__name__} takes no plain {what} ({first_line(error)})"
        return {**result, "transformers": f"not compared: {refusal}"}
    for name, difference in worst.items():
        if not difference <= ACTIVE_TOLERANCE:
            raise CompressError(
                f"{name} of {source.path} computes something else than its codes stand for: off by {difference:.3g} "
                "standard deviations of its output"
            )
    if ours_alone:
        return {**result, "transformers": "not compared: it has no sums of terms"}
    result["dtype"] = str(expected.dtype).removeprefix("torch.")
    unknown = _unknown_mix(source, ours)
    del ours
    try:
        theirs, result["loader"] = load_with_transformers(source, dtype)
    except CheckpointError as error:
        if not unknown:
            raise
        return {**result, "transformers": f"not compared: it cannot load this mix of schemes ({error})"}
    found = outputs(theirs, ids)
    if cached and result["loader"] != "default":
        expected = uncached
        result["cache"] = f"not compared: transformers loads this with {result['loader']}, which leaves it as it is"
    elif cached:
        result["cache"] = "compared"
        if _distance(found, expected) > _distance(found, uncached):
            raise CompressError(f"{source.path} loads in transformers without a rounded key-value cache")
    result["logits_max_difference"] = float((found.float() - expected.float()).abs().max())
    allowed = ACTIVE_TOLERANCE * float(expected.float().std()) if active else 0.0
    if not result["logits_max_difference"] <= allowed:
        raise CompressError(
            f"{source.path} loads in transformers with logits that differ by up to "
            f"{result['logits_max_difference']:.3g} from what its codes stand for"
        )
    return result
