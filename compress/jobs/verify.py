"""Check a written checkpoint in this (fresh) process: files against the run's record, and transformers against us.

Both models run one block at a time: there is no second dense model. Where transformers can load a checkpoint only with
`dequantize=True` (packed zero points, packed embeddings), its own is whole and dense.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, CompressError, InputError, first_line, install
from compress.base.fresh_process import verified
from compress.base.progress import Reporter, tell, without_bars
from compress.checkpoint.export.package_readback import read_again
from compress.checkpoint.files import RECORD, checksum, read_json
from compress.checkpoint.read.checksums import check_tensors
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.fused import unlike_numbers
from compress.checkpoint.read.pretrained import empty_model, stored_name
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.seal import check as check_files
from compress.checkpoint.seal import check_itself, rewrite
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.manifest import read_record
from compress.inference.check.by_transformers import (
    NOT_LOADED,
    NotComparedError,
    NotLoadedError,
    UnknownInputsError,
    decompress_by_block,
    open_by_transformers,
    report_loading,
)
from compress.inference.check.dense_twin import compare_layer, compare_layers
from compress.inference.check.streaming import stream
from compress.inference.load.block_streaming import run_by_block
from compress.inference.load.kv_caches import cache_hook
from compress.model.calls import removing
from compress.model.experts import SortedExperts
from compress.weights.compressed_tensors import decompressed_in
from compress.weights.formats.registry import folder_of
from compress.weights.own_config import is_own

PROBE_ROWS, PROBE_LENGTH = 2, 32
PROBE_SIZE = 64  # pixels, height and width
# Of the standard deviation of logits, for models that round what their layers multiply: transformers rounds for itself,
# and takes the other code of some ties.
ACTIVE_TOLERANCE = 0.05
# The same for models of which transformers multiplies experts one after the other, and we do all at once, in float32:
# other sums.
ORDER_TOLERANCE = 1e-3
# Dimensions of an input whose tokens compressed-tensors rounds one by one; those of others get one scale together.
BATCHED = 3


def check_record(source: Source) -> int:
    """Compare every tensor, and every layer's values, with the checksums that the run recorded; returns how many layers
    were compared. Raises CheckpointError that names the tensor or the layer."""
    path = source.path / RECORD
    if not path.exists():
        raise InputError(f"{source.path} holds no {RECORD}; only checkpoints of this tool can be verified")
    record = read_record(source.path)
    check_itself(source.path, record)
    # Before tensors had checksums of their own, only the values of compressed layers did.
    check_tensors(source, record.get("tensors"))
    for layer in record["layers"]:
        if layer["figures"].get("sha256") not in map(checksum, _values(source, stored_name(source, layer["name"]))):
            raise CheckpointError(f"{layer['name']} does not hold the values that the run decided; write it again")
    return len({layer["name"] for layer in record["layers"]})


def _values(source: Source, layer: str) -> list[Tensor]:
    """The values [N, K] of a layer; of one that is stored dense, as they lie and transposed: Conv1D has [K, N]."""
    if layer in stored_in(source).layers:
        values = weight_of(source, layer).dequantize()
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{layer} stands for values that are not finite numbers; write it again")
        return [values]
    if f"{layer}.weight" not in source.weights:
        raise CheckpointError(f"{layer} is in {RECORD} but not in the checkpoint")
    dense = source.weights.tensor(f"{layer}.weight")
    return [dense, dense.t()] if dense.ndim == 2 else [dense.flatten(1)]


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


@contextmanager
def exact_caches(model: nn.Module) -> Iterator[None]:
    """Makes attentions keep keys and values unrounded inside the context."""
    hooks = [hook for module in model.modules() if (hook := cache_hook(module)) is not None]
    for hook in hooks:
        hook.active = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.active = True


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().mean())


@dataclass(frozen=True)
class Sight:
    """Our own model's outputs for the probe. uncached: with keys and values as they are."""

    outputs: Tensor
    uncached: Tensor


@without_bars()
def verify(path: str | Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Verify a checkpoint. Raises CompressError where it is not what the run decided or loads as something else.

    trust_remote_code: run Python code that comes with the model, if any does.

    An export in another program's format is read back by that program's own package instead: see
    `checkpoint.export.exporter`. Returns then {layers, reader, ...}.

    Returns {layers, transformers, loader, dtype, logits_max_difference}: the layers compared, whether transformers was
    compared (and why not), how it loads the checkpoint ("none": not, or as something else), in which dtype, and the
    largest difference of its logits from ours: 0.0, or up to ACTIVE_TOLERANCE of their standard deviation where inputs
    or key-value caches are quantized too (ORDER_TOLERANCE where only the order of sums differs).
    Where inputs are, our kernels are compared layer by layer. cache, where a key-value cache is quantized: whether it
    was compared, too. remarks, if any: documents that were edited, what records of earlier versions cannot show, and
    layers of which vLLM computes something else.
    """
    if (read := read_again(Path(path))) is not None:
        return read
    source = find_source(str(path), trust_remote_code)
    result: dict[str, Any] = {"layers": check_record(source), "transformers": "compared"}
    if remarks := [*check_files(source.path, read_record(source.path)), *unlike_numbers(source)]:
        result["remarks"] = remarks
    try:
        ids = comparable_probe(source)
        stored, sums = stored_in(source), is_own(source.quantization)
        cached = stored.caches is not None
        active = cached or sums or any(layer.scheme.inputs is not None for layer in stored.layers.values())
        # In 16 bits transformers' emulation of quantized activations rounds before it rounds: both compute in float32.
        wanted = decompressed_in(layer.scheme for layer in stored.layers.values())
        apart = any(isinstance(module, SortedExperts) for module in empty_model(source).modules())
        dtype = wanted or (torch.float32 if active or apart else None)
        dense = source.quantization is not None and not active
        ours = run_ours(source, dtype, ids, active, dense)
        if sums:
            raise NotComparedError("it reads neither these formats nor sums of terms")
        result["dtype"] = str(ours.outputs.dtype).removeprefix("torch.")
        theirs, result["loader"] = open_by_transformers(source, dtype)
    except UnknownInputsError as why:
        return {**result, **report_loading(source, why)}
    except NotLoadedError as why:
        return {**result, "transformers": f"not compared: {why}", "loader": NOT_LOADED}
    except NotComparedError as why:
        result["transformers"] = f"not compared: {why}"
        return result
    openings = decompress_by_block(theirs) if result["loader"] == "default" else {}
    with flat_inputs(theirs) as flat:
        logits, expected = run_by_block(theirs, openings, lambda: outputs(theirs, ids)), ours.outputs
    if flat:
        reason = f"compressed-tensors rounds all tokens of {flat[0]} by one scale, as it is given no batches"
        return {**result, "transformers": f"not compared: {reason}"}
    if cached and result["loader"] != "default":
        expected = ours.uncached
        result["cache"] = f"not compared: transformers loads this with {result['loader']}, which leaves it as it is"
    elif cached:
        result["cache"] = "compared"
        if _distance(logits, expected) > _distance(logits, ours.uncached):
            raise CompressError(f"{source.path} loads in transformers without a rounded key-value cache")
    allowed = ACTIVE_TOLERANCE if active else ORDER_TOLERANCE if apart else 0.0
    return {**result, "logits_max_difference": _difference(source, logits, expected, allowed)}


def _difference(source: Source, found: Tensor, expected: Tensor, allowed: float) -> float:
    """The largest difference of transformers' logits. Raises CompressError for one above so many standard deviations of
    ours."""
    largest = float((found.float() - expected.float()).abs().max())
    if not largest <= allowed * float(expected.float().std()):
        raise CompressError(
            f"{source.path} loads in transformers with logits that differ by up to {largest:.3g} from what its codes "
            "stand for"
        )
    return largest


@contextmanager
def flat_inputs(theirs: nn.Module) -> Iterator[list[str]]:
    """Yields names of layers of transformers' model that round every token of their input, and are called with inputs
    of two dimensions in the body."""
    layer_names: list[str] = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        if args[0].ndim < BATCHED and name not in layer_names:
            layer_names.append(name)

    handles = []
    for name, module in theirs.named_modules():
        inputs = getattr(getattr(module, "quantization_scheme", None), "input_activations", None)
        if inputs is not None and inputs.dynamic and inputs.strategy == "token":
            handles.append(module.register_forward_pre_hook(lambda _, args, name=name: note(name, args)))
    with removing(handles):
        yield layer_names


def comparable_probe(source: Source) -> Tensor:
    """The probe for both models. Raises NotComparedError where transformers cannot read the checkpoint, or where the
    configuration tells no inputs."""
    if source.quantization is not None and not is_own(source.quantization):
        try:
            import compressed_tensors  # noqa: F401
        except ImportError:
            raise NotComparedError(install("hf")) from None
    ids = probe_of(source.config)
    if ids is None:
        raise UnknownInputsError("the configuration names neither vocab_size nor num_channels")
    return ids


def run_ours(source: Source, dtype: torch.dtype | None, ids: Tensor, active: bool, dense: bool) -> Sight:
    """Our model's outputs for the probe, computed one block at a time. active: the model rounds inputs or caches; it
    then computes torch's own products, and its kernels are compared with them. dense: with dequantized weights.

    Raises CompressError for a layer whose kernel computes something else and for outputs that are not finite,
    NotComparedError for a model that takes something else."""
    worst: dict[str, float] = {}
    model, openings = stream(source, dtype, partial(compare_layer, worst), dequantize=dense)
    try:
        products: AbstractContextManager[dict[str, float]] = compare_layers(model) if active else nullcontext({})
        with products as outside:
            logits = run_by_block(model, openings, lambda: outputs(model, ids))
            with exact_caches(model):
                again = stored_in(source).caches is not None
                uncached = run_by_block(model, openings, lambda: outputs(model, ids)) if again else logits
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = "images" if ids.is_floating_point() else "token ids"
        raise UnknownInputsError(f"{type(model).__name__} takes no plain {what} ({first_line(error)})") from None
    for name, difference in (worst | outside).items():
        if difference > 1:
            raise CompressError(
                f"{name} of {source.path} computes something else than its codes stand for: off by {difference:.3g} "
                "times what roundings explain"
            )
    if not bool(torch.isfinite(logits).all()):
        half = "; its range ends at 65504: store the model in bfloat16, or give --no-verify"
        raise CompressError(
            f"{source.path} computes logits that are not finite numbers, in "
            f"{str(logits.dtype).removeprefix('torch.')}; nothing can be compared with them"
            f"{half if logits.dtype == torch.float16 else ''}"
        )
    return Sight(logits, uncached)


def verify_output(place: Directory, comm: Comm, reporter: Reporter, trust_remote_code: bool) -> dict[str, Any] | None:
    """Verify a run's checkpoint before it gets its name, on rank 0, and enter what was found into its record."""
    verification, problem = None, None
    if comm.rank == 0:
        tell(reporter, "phase", "verify", "nothing", "the output, in a fresh process")
        try:
            verification = in_fresh_process(place, trust_remote_code)
            rewrite(place.model, {"verification": verification})
        except CompressError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write {place.model / RECORD}: {error.strerror}"
    comm.fail_together(problem)
    return verification


def in_fresh_process(place: Directory, trust_remote_code: bool) -> dict[str, Any]:
    """`compress verify` in a process of its own, outside any process group. Raises CompressError for an output that
    does not verify, and where no process can be started."""
    modules = _modules(place.model)
    more = ["--trust-remote-code"] if trust_remote_code else []
    more += [word for module in modules for word in ("--plugin", module)]
    unread, wrong = (
        f"{place.output} {problem}, so it stays {place.model}" for problem in ("cannot be verified", "does not verify")
    )
    advice, folders = "run again with --resume --no-verify", map(folder_of, modules)
    found = verified(place.model, *more, folders=folders, unread=unread, wrong=wrong, instead=advice)
    return _rename(found, str(place.model), place.output.name)


def _rename(value: Any, path: str, name: str) -> Any:
    """A JSON value whose texts call the output by its name, wherever it lies."""
    if isinstance(value, dict):
        return {key: _rename(each, path, name) for key, each in value.items()}
    if isinstance(value, list):
        return [_rename(each, path, name) for each in value]
    return value.replace(path, name) if isinstance(value, str) else value


def _modules(directory: Path) -> list[str]:
    """The modules whose formats a checkpoint is stored in, beside ours."""
    path = directory / "config.json"
    config = read_json(path) if path.exists() else {}
    return (config.get("quantization_config") or {}).get("modules", [])
