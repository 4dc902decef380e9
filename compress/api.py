"""`quantize`: from a model and passes to a compressed model, a checkpoint, or both."""

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from compress.architecture import Table, find_stacks
from compress.cache import attentions, cache_entry, has_cache_format
from compress.caching import head_sizes
from compress.checkpoint import RECORD, checksum, fingerprint, read_json, write_json
from compress.comm import Comm
from compress.data import Tokens, batches_of, load_tokens
from compress.device import find_device
from compress.errors import CompressError, InputError
from compress.forward import Batch, ChainBrokenError, evaluating
from compress.passes.base import Pass
from compress.pipeline import run
from compress.plan import Plan, plan
from compress.progress import Reporter, Silent
from compress.recipe import describe
from compress.record import RunRecord
from compress.residency import Local, Residency, Sharded, shard
from compress.scheme import Scheme, group_entry
from compress.source import Source, find_source, load_dense, load_tokenizer, model_fingerprint
from compress.version import VERSION
from compress.writer import Discard, Writer

Calibration = str | Tensor | Sequence[Mapping[str, Tensor]]
RECORDED_VERSIONS = ("torch", "transformers", "safetensors", "numpy")
VERIFY_LIMIT = 2 * 2**30  # bytes of the original up to which a result is verified without being asked


@dataclass
class Result:
    """What `quantize` did. model: the compressed model, where one is in memory. output: where it was written."""

    record: RunRecord
    model: nn.Module | None = None
    output: Path | None = None
    verification: dict[str, Any] | None = None


def quantize(
    model: nn.Module | str | Path,
    passes: Pass | Sequence[Pass],
    *,
    calibration: Calibration | None = None,
    output: str | Path | None = None,
    ignore: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool | None = None,
    fsdp: bool = False,
    one_block: bool = False,
    convolutions: bool | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Compress a model with one or more passes.

    model: a directory, hub id or 'demo', or a model in memory (changed in place; no tokenizer or name is needed).
    calibration: text ('demo', a file, a datasets id), token ids [samples, length], a .pt/.npy file of them, or a list
    of dictionaries of model inputs; not needed by passes without statistics. output: a directory to write; without it
    the compressed model is only returned. ignore: shell-style patterns of layers to leave alone. samples, length:
    windows of text (128 of the model's context, at most 2048). device: where blocks are worked on (a CUDA device if
    there is one). dtype: of that work (the model's own on a GPU, float32 on a CPU). verify: reload the output in a
    fresh process and compare (by default for models up to 2 GiB). fsdp: shard the model over the ranks of the
    initialised process group. one_block: run the model as a whole; found by itself where its blocks are no chain.
    convolutions: whether they are layers, too (by default where no stack of blocks holds linear layers: in CNNs).

    Raises InputError before any work for input that cannot work, CompressError for work that failed.
    """
    reporter = reporter or Silent()
    passes = (passes,) if isinstance(passes, Pass) else tuple(passes)
    if not passes:
        raise InputError("no pass given; give at least one, like RTN() or GPTQ()")
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}; allowed: 1 or more")
    if (resume or overwrite or verify) and output is None:
        raise InputError("resume, overwrite and verify need an output")
    comm = Comm()
    source = find_source(str(model)) if isinstance(model, str | Path) else None
    if verify and source is None and not hasattr(model, "config"):
        raise InputError("verify reloads the output by its configuration, which this model has none of; leave it out")
    notes: list[str] = []
    network = load_dense(source, notes=notes) if source is not None else model
    assert isinstance(network, nn.Module)
    plan_ = plan(network, passes, ignore, one_block, convolutions)
    target = _device(network, source, device)
    compute = _compute_dtype(network, target, dtype)
    tokens, batches = _calibration(plan_, calibration, network, source, samples, length, batch_size)
    if len(batches) < comm.world and plan_.calibrated:
        raise InputError(
            f"{len(batches)} micro-batches for {comm.world} ranks; give more samples or a smaller batch size"
        )
    identity = {
        "version": VERSION,
        "model": source.fingerprint() if source is not None else model_fingerprint(network),
        "recipe": describe(passes),
        "ignore": list(ignore),
        "calibration": _calibration_fingerprint(tokens, batches),
        "batch_size": batch_size,
        "compute_dtype": str(compute),
        "one_block": one_block,
        "convolutions": plan_.convolutions,
    }
    try:
        json.dumps(identity)
    except TypeError as error:
        raise InputError(
            f"a pass has an option that cannot be recorded ({error}); use numbers, words and lists"
        ) from None
    sink: Writer | Discard = Discard()
    cache: dict[str, Any] | None = None
    if output is not None:
        if not Path(output).name:
            raise InputError(f"output {str(output)!r} is no directory that can be made; give a path with a name")
        _check_storable(plan_)
        cache = _cache_entry(plan_, network)
        sink = Writer(Path(output), fingerprint(identity), comm, resume=resume, overwrite=overwrite)
    notes.extend(tokens.notes if tokens is not None else ())
    if plan_.stacks[0].container is None and not one_block and len(find_stacks(network, plan_.convolutions)) > 1:
        notes.append("the model has several stacks of blocks (an encoder and a decoder, say); it is run as one block")
    if resume and isinstance(sink, Writer) and not sink.blocks:
        notes.append(f"{sink.partial} held no finished block: started from the beginning")
    if plan_.kv is None and not any(p.rounds for p in passes):
        notes.append("no pass rounds: the model is prepared, not compressed; add a pass, or leave out rounding=none")
    for note in notes:
        reporter.note(note)
    record = RunRecord(notes=notes)
    mine = batches[comm.rank :: comm.world]
    with _nothing_left_of_nothing(sink), evaluating(network):
        residency = _residency(network, plan_, target, compute, fsdp, keep=source is None or output is None)
        try:
            run(network, plan_, mine, residency, sink, comm, record, reporter)
        except ChainBrokenError as reason:
            record.note(reporter, f"the blocks are not a simple chain ({reason}); the model is treated as one block")
            plan_ = plan(network, passes, ignore, one_block=True, convolutions=convolutions)
            run(network, plan_, mine, residency, sink, comm, record, reporter)
    result = Result(record)
    if isinstance(sink, Writer):
        _finish(sink, network, source, plan_, record, identity, tokens, comm, reporter, cache)
        result.output = sink.output
        small = verify is None and hasattr(network, "config") and _bytes(network) <= VERIFY_LIMIT
        if verify or small:
            problem = None
            if comm.rank == 0:
                reporter.note("verifying the output in a fresh process")
                try:
                    result.verification = _verify(sink.output)
                    _store_verification(sink.output, result.verification)
                except CompressError as error:
                    problem = str(error)
            comm.fail_together(problem)
    if residency.keep:
        result.model = network
    return result


@contextmanager
def _nothing_left_of_nothing(sink: Writer | Discard) -> Iterator[None]:
    """Work that fails before its first block is finished leaves no unfinished run in the way of the next try."""
    try:
        yield
    except BaseException:
        if isinstance(sink, Writer):
            sink.abandon()
        raise


def _check_storable(plan_: Plan) -> None:
    """Refuse what compressed-tensors has no format for: inputs with a scale per channel, and rounded inputs of layers
    that are stored dense, where the checkpoint would not say so."""
    for p in plan_.passes:
        if p.rounds_inputs and getattr(p.innermost, "per_channel_inputs", False):
            raise InputError(
                f"per_channel_inputs of {p.innermost.name} cannot be written: no format holds a scale per input "
                "channel; leave the output out and keep the model in memory, or leave per_channel_inputs out"
            )
    for layer in (layer for layers in plan_.layers.values() for layer in layers if not layer.has_format):
        for p in plan_.passes:
            if p.rounds_inputs and p.wants(layer.name):
                raise InputError(
                    f"{layer.name} is a {type(layer.module).__name__}, which compressed-tensors cannot hold with a "
                    f"rounded input ({p.innermost.name}); ignore it, give it weights only, or leave the output out"
                )


def _cache_entry(plan_: Plan, model: nn.Module) -> dict[str, Any] | None:
    """The `kv_cache_scheme` of a run; None where caches stay as they are. Raises InputError for caches that readers do
    not round, or not so."""
    if plan_.kv is None:
        return None
    strange = next((n for n, attention in attentions(model).items() if not has_cache_format(attention)), None)
    if strange is not None:
        raise InputError(
            f"{strange} is a {type(model.get_submodule(strange)).__name__}, whose key-value cache the readers of "
            "compressed-tensors do not round; leave kv-cache or the output out"
        )
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    if not isinstance(getattr(text, "num_key_value_heads", None), int):
        raise InputError(
            f"the configuration of {type(model).__name__} has no num_key_value_heads, without which the readers of "
            "compressed-tensors do not round a cache; leave kv-cache or the output out"
        )
    sizes = head_sizes(model) if plan_.kv.scheme.dynamic else set()
    if len(sizes) > 1:
        raise InputError(
            f"{type(model).__name__} has keys and values of {' and '.join(map(str, sorted(sizes)))} elements per head; "
            "a checkpoint holds one size: give granularity=head or tensor, or leave the output out"
        )
    size = min(sizes, default=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return cache_entry(plan_.kv.scheme, size)


def _device(model: nn.Module, source: Source | None, wanted: str | torch.device | None) -> torch.device:
    if wanted is None and source is None:
        return next(model.parameters()).device
    return find_device(wanted)


def _compute_dtype(model: nn.Module, device: torch.device, wanted: torch.dtype | None) -> torch.dtype | None:
    if wanted is not None or device.type != "cpu":
        return wanted
    return None if next(model.parameters()).dtype == torch.float64 else torch.float32


def _calibration(
    plan_: Plan,
    calibration: Calibration | None,
    model: nn.Module,
    source: Source | None,
    samples: int | None,
    length: int | None,
    batch_size: int,
) -> tuple[Tokens | None, list[Batch]]:
    if not plan_.calibrated:
        if calibration is not None:
            raise InputError("calibration data is given but no pass uses any; leave it out")
        if samples is not None or length is not None:
            raise InputError("samples and length are of calibration data, which no pass uses; leave them out")
        return None, []
    if calibration is None:
        assert plan_.needing is not None
        raise InputError(f"{plan_.needing.innermost.name} needs calibration data; give text, token ids or 'demo'")
    if not isinstance(calibration, str | Path | Tensor):
        if samples is not None or length is not None:
            raise InputError("samples and length do not apply to ready-made batches; leave them out")
        return None, batches_of(calibration, batch_size)

    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            "an encoder-decoder is calibrated on pairs; give batches with input_ids and decoder_input_ids (Python)"
        )

    def tokenizer() -> Any:
        if source is None:
            raise InputError("a model in memory has no tokenizer; give token ids [samples, length] instead of text")
        return load_tokenizer(source)

    is_text = not isinstance(calibration, Tensor)
    wanted = samples if samples is not None or not is_text or str(calibration).endswith((".pt", ".npy")) else 128
    given = str(calibration) if is_text else calibration
    tokens = load_tokens(
        given, tokenizer, getattr(model, "config", None), what="calibration", length=length, samples=wanted
    )
    return tokens, batches_of(tokens.ids, batch_size)


def _calibration_fingerprint(tokens: Tokens | None, batches: Sequence[Batch]) -> str:
    if tokens is not None:
        return tokens.fingerprint()
    return fingerprint(
        {str(i): {k: checksum(v) for k, v in b.items() if isinstance(v, Tensor)} for i, b in enumerate(batches)}
    )


def _residency(
    model: nn.Module, plan_: Plan, device: torch.device, dtype: torch.dtype | None, fsdp: bool, keep: bool
) -> Residency:
    if isinstance(model, FSDPModule):
        return Sharded(model, device, dtype)
    if not fsdp:
        return Local(device, dtype, keep)
    if not torch.distributed.is_initialized():
        raise InputError("a sharded run needs a process group; start it with torchrun")
    Sharded.require()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    return Sharded(shard(model, find_stacks(model, plan_.convolutions), mesh), device, dtype)


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _rest(model: nn.Module, plan_: Plan) -> Iterator[tuple[str, Tensor]]:
    """Tensors outside what was written as blocks, each gathered when its turn comes."""
    blocks = [block for stack in plan_.stacks for block in stack.blocks]
    blocks += [(table.name, table.module) for table in plan_.tables]
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    prefixes = tuple(f"{name}." if name else "" for name, _ in blocks)
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            if name not in module._non_persistent_buffers_set and not full.startswith(prefixes):
                yield full, buffer


def quantization_config(
    layers: Mapping[str, Scheme],
    model: nn.Module,
    tables: Sequence[Table] = (),
    cache: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors for layers with their schemes, some of them `tables`, and the
    entry of the caches."""
    # What shares int8 rows is targeted, too: its weight is decompressed under its own name.
    shared = {n: layers[t.name] for t in tables if layers[t.name].layout == "int-quantized" for n in t.shared}
    layers = {**layers, **shared}
    by_entry: dict[str, list[str]] = {}
    for name, scheme in layers.items():
        by_entry.setdefault(json.dumps(group_entry(scheme), sort_keys=True), []).append(name)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    groups = {}
    for i, (entry, names) in enumerate(sorted(by_entry.items())):
        targets = sorted(names)
        if len(by_entry) == 1 and set(names) & set(linears):
            targets = ["Linear", *sorted(set(names) - set(linears))]
        groups[f"group_{i}"] = {"targets": targets, **json.loads(entry)}
    layouts = {scheme.layout for scheme in layers.values()}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(layouts) > 1 else next(iter(layouts), "dense"),
        "quantization_status": "compressed",
        "ignore": sorted(set(linears) - set(layers)),
        "config_groups": groups,
    }
    return config if cache is None else {**config, "kv_cache_scheme": cache}


def _finish(
    sink: Writer,
    model: nn.Module,
    source: Source | None,
    plan_: Plan,
    record: RunRecord,
    identity: dict[str, Any],
    tokens: Tokens | None,
    comm: Comm,
    reporter: Reporter,
    cache: dict[str, Any] | None,
) -> None:
    schemes = sink.schemes()
    if sink.dense_layers():
        kinds = sorted({type(model.get_submodule(name)).__name__ for name in sink.dense_layers()})
        record.note(
            reporter,
            f"{len(sink.dense_layers())} layers are stored dense, with their compressed values: "
            f"compressed-tensors has no {', '.join(kinds)}, so these take no less space on disk",
        )
    odd = None
    if any(not s.weights.symmetric and s.layout == "pack-quantized" for s in schemes.values()):
        odd = "asymmetric weights"
    if any(schemes[table.name].layout == "pack-quantized" for table in plan_.tables):
        odd = "a packed embedding"
    if odd is not None and len({json.dumps(group_entry(s), sort_keys=True) for s in schemes.values()}) == 1:
        record.note(
            reporter,
            f"{odd}: load in transformers with "
            "quantization_config=CompressedTensorsConfig(dequantize=True); the default load fails"
            + (", and this one leaves the key-value cache as it is" if plan_.kv is not None else ""),
        )
    elif odd is not None:
        record.note(
            reporter,
            f"{odd} beside layers of another scheme: transformers loads no such checkpoint (its default load fails, "
            "dequantize=True reads all layers by one scheme); run it with compress.load",
        )
    if plan_.kv is not None and (plan_.kv.type == "int8" or plan_.kv.granularity == "token"):
        record.note(
            reporter,
            f"key-value cache {plan_.kv.type} per {plan_.kv.granularity}: compress and transformers round it so; vLLM "
            "reads fp8 per tensor (or head) from checkpoints",
        )
    config: dict[str, Any] | None = dict(source.config) if source is not None else None
    extra: dict[str, str] = {}
    if source is None and hasattr(model, "config"):
        own: Any = model
        config = json.loads(own.config.to_json_string(use_diff=True))
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            extra["generation_config.json"] = generation.to_json_string()
    if config is not None and (schemes or cache is not None):
        config["quantization_config"] = quantization_config(schemes, model, plan_.tables, cache)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    manifest = {
        "compress": VERSION,
        "model": source.name if source is not None else type(model).__name__,
        "identity": identity,
        "command": " ".join(sys.argv),
        "calibration": None
        if tokens is None
        else {
            "source": tokens.source,
            "samples": len(tokens.ids),
            "length": tokens.ids.shape[1],
            "sha256": tokens.fingerprint(),
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in RECORDED_VERSIONS}},
        "seeds": "none: a run draws no random numbers",
        "world_size": comm.world,
        "seconds": round(record.seconds, 3),
        "peak_memory_bytes": peak,
        "block_forwards": record.block_forwards,
        "layers": [asdict(layer) for layer in record.layers],
        "caches": record.caches,
        "ranges": [asdict(found) for found in record.ranges],
        "folds": [asdict(fold) for fold in record.folds],
        "not_folded": record.not_folded,
        "left_alone": record.left_alone,
        "notes": record.notes,
        "verification": None,
    }
    sink.finish(_rest(model, plan_), config, source.path if source is not None else None, extra, manifest)


def _verify(output: Path) -> dict[str, Any]:
    """`compress verify` in a fresh process, outside any process group."""
    distributed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    environment = {k: v for k, v in os.environ.items() if k not in distributed and not k.startswith("TORCHELASTIC")}
    command = [sys.executable, "-m", "compress", "verify", str(output), "--json", "-", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CompressError(f"{output} was written but does not verify: {lines[-1] if lines else 'no message'}")
    return json.loads(done.stdout)


def _store_verification(output: Path, verification: dict[str, Any]) -> None:
    record = read_json(output / RECORD)
    record["verification"] = verification
    write_json(output / RECORD, record)
