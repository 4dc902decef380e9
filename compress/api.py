"""`quantize`: from a model and passes to a compressed model, a checkpoint, or both."""

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from compress.checkpoint import coverage
from compress.checkpoint.describe import quantization_config
from compress.checkpoint.directory import Directory, claimed
from compress.checkpoint.files import RECORD, checksum, fingerprint, read_json, write_json
from compress.checkpoint.pretrained import load_dense, load_tokenizer, model_fingerprint, read_config
from compress.checkpoint.record import RunRecord
from compress.checkpoint.shown import command, shown
from compress.checkpoint.source import Source, check_dense, find_source
from compress.checkpoint.writer import Discard, Writer
from compress.comm import Comm
from compress.data import Tokens, batches_of, load_tokens
from compress.device import find_device
from compress.errors import CompressError, InputError
from compress.model.calls import Batch, evaluating
from compress.model.layers import FLOATS, find_stacks
from compress.passes.base import Pass
from compress.progress import Reporter, Silent
from compress.ranks import watching
from compress.recipe import describe
from compress.run.batches import ChainBrokenError, check_batches
from compress.run.pipeline import run
from compress.run.plan import Plan, plan, planned
from compress.run.remarks import nothing_done
from compress.run.residency import Local, Residency, Sharded, shard
from compress.run.restore import hooks_and_buffers, naming, undone, values
from compress.run.storable import cache_entry_of, check_storable, notes_for_readers
from compress.runtime.embedding import QuantEmbedding
from compress.runtime.linear import QuantLinear
from compress.version import VERSION

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


@torch.inference_mode(False)  # where it is on, no weight can be changed
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
    restore: bool = True,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Result:
    """Compress a model with one or more passes.

    model: a directory, hub id or 'demo', or a model in memory (changed in place; no tokenizer or name is needed).
    calibration: text ('demo', a file, a datasets id), token ids [samples, length], a .pt/.npy file of them, or a list
    of dictionaries of model inputs; passes without statistics need none and leave it unread. output: a directory to
    write; without it the compressed model is only returned. ignore: shell-style patterns of layers to leave alone.
    samples, length: windows of text (128 of the model's context, at most 2048). device: where blocks are worked on (a
    CUDA device if there is one). dtype: of that work (the model's own on a GPU, float32 on a CPU). verify: reload the
    output in a fresh process and compare (by default for models up to 2 GiB). fsdp: shard the model over the ranks of
    the initialised process group. one_block: run the model as a whole; found by itself where its blocks are no chain.
    convolutions: whether they are layers, too (by default where no stack of blocks holds linear layers: in CNNs).
    trust_remote_code: run Python code that comes with a model given by name, if any does.
    restore: after any exception a model in memory is what it was, bit for bit (one that `fsdp` sharded stays sharded).
    Until the run has succeeded that takes as much memory as the weights of the blocks and the buffers (sharded: as this
    rank's part of the model). False does without; the exception then says which blocks are changed.

    Raises InputError before any work for input that cannot work, CompressError for work that failed or that compressed
    nothing.
    """
    reporter = reporter or Silent()
    passes = _passes(passes)
    _check_options(passes, ignore, batch_size, samples, length, dtype)
    if (resume or overwrite or verify) and output is None:
        raise InputError("resume, overwrite and verify need an output")
    comm = Comm()
    given = Path(model) if isinstance(model, str | Path) else None
    with claimed(output, comm, resume=resume, overwrite=overwrite, model=given) as place, watching(comm):
        source = _source(model, trust_remote_code)
        if verify and source is None and not hasattr(model, "config"):
            raise InputError(
                "verify reloads the output by its configuration, which this model has none of; leave it out"
            )
        if fsdp:
            _check_group()
        target = find_device(device) if source is not None or device is not None else None
        config = read_config(source) if source is not None else getattr(model, "config", None)
        tokens, batches = _calibration(passes, calibration, config, source, samples, length, batch_size)
        if len(batches) < comm.world and any(p.calibrated for p in passes):
            raise InputError(
                f"{len(batches)} micro-batches for {comm.world} ranks; give more samples or a smaller batch size"
            )
        # What follows needs the model.
        notes: list[str] = []
        network = load_dense(source, notes=notes) if source is not None else model
        assert isinstance(network, nn.Module)
        _check_no_codes(network)
        plan_ = plan(network, passes, ignore, one_block, convolutions)
        check_batches(network, batches)
        target = next(network.parameters()).device if target is None else target
        compute = _compute_dtype(network, target, dtype)
        identity = {
            "version": VERSION,
            "model": source.fingerprint() if source is not None else model_fingerprint(network),
            "recipe": describe(plan_.recipe),
            "ignore": list(ignore),
            "calibration": _calibration_fingerprint(tokens, batches),
            "batch_size": batch_size,
            "compute_dtype": str(compute),
            "one_block": one_block,
            "convolutions": plan_.convolutions,
        }
        sink: Writer | Discard = Discard()
        cache: dict[str, Any] | None = None
        if place is not None:
            check_storable(plan_)
            cache = cache_entry_of(plan_, network)
            sink = Writer(place, fingerprint(identity), comm, resume=resume, overwrite=overwrite)
        if calibration is not None and not plan_.calibrated:
            notes.append("no pass uses calibration data: what is given stays unread")
        notes += [*plan_.notes, *(tokens.notes if tokens is not None else ())]
        if plan_.stacks[0].container is None and not one_block and len(find_stacks(network, plan_.convolutions)) > 1:
            notes.append(
                "the model has several stacks of blocks (an encoder and a decoder, say); it is run as one block"
            )
        if resume and isinstance(sink, Writer) and not sink.blocks:
            notes.append(f"no finished block of an earlier run for {sink.output.name}: started from the beginning")
        if plan_.passes and not any(p.rounds for p in plan_.passes):
            notes.append(
                "no pass rounds the layers: they are prepared, not compressed; add one, or leave out rounding=none"
            )
        elif plan_.passes and (little := coverage.remark(planned(network, plan_, output is not None))):
            notes.append(little)
        for note in notes:
            reporter.note(note)
        record = RunRecord(notes=notes)
        mine = batches[comm.rank :: comm.world]
        residency = _residency(network, plan_, target, compute, fsdp, keep=source is None or output is None)
        with _undoing(network if source is None else None, restore, record):
            with evaluating(network):
                try:
                    run(network, plan_, mine, residency, sink, comm, record, reporter)
                except ChainBrokenError as why:
                    record.note(
                        reporter, f"the blocks are not a simple chain ({why}); the model is treated as one block"
                    )
                    plan_ = plan(network, passes, ignore, one_block=True, convolutions=convolutions)
                    identity["recipe"] = describe(plan_.recipe)  # of more layers: a group size may be another
                    for note in plan_.notes:
                        record.note(reporter, note)
                    run(network, plan_, mine, residency, sink, comm, record, reporter)
                _check_done(plan_, record, sink)
            dense = sink.dense_layers() if isinstance(sink, Writer) else ()
            record.coverage = coverage.achieved(network, [r.name for r in record.layers], dense, record.left_alone)
            result = Result(record)
            if isinstance(sink, Writer):
                _finish(sink, network, source, plan_, record, identity, tokens, comm, reporter, cache)
                if verify or (verify is None and hasattr(network, "config") and _bytes(network) <= VERIFY_LIMIT):
                    result.verification = _verified(sink.place, comm, reporter, trust_remote_code)
                sink.take_name()
                result.output = sink.output
        if residency.keep:
            result.model = network
        return result


def _check_no_codes(network: nn.Module) -> None:
    """Refuse a model that runs compressed already."""
    coded = next((n for n, m in network.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)), None)
    if coded is not None:
        raise InputError(f"{coded} computes on codes already; give the original model, or load it with dequantize=True")


def _passes(given: Any) -> tuple[Pass, ...]:
    """The passes that were given: one, or several."""
    if isinstance(given, Pass):
        return (given,)
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise InputError(f"passes: {given!r} is no pass; give one, like compress.GPTQ(scheme='w4a16'), or a list")
    passes = tuple(given)
    if not passes:
        raise InputError("no pass given; give at least one, like RTN() or GPTQ()")
    for p in passes:
        if not isinstance(p, Pass):
            raise InputError(f"passes: {p!r} is no pass; give instances, like compress.GPTQ(scheme='w4a16')")
    return passes


def _source(model: Any, trust_remote_code: bool) -> Source | None:
    """Where a model is read from, None for one in memory."""
    if isinstance(model, nn.Module):
        return None
    if not isinstance(model, str | Path):
        raise InputError(f"model: {model!r} is no model; give a directory, a hub id, 'demo' or a torch.nn.Module")
    source = find_source(str(model), trust_remote_code)
    check_dense(source)
    return source


def _check_options(
    passes: tuple[Pass, ...],
    ignore: Any,
    batch_size: Any,
    samples: Any,
    length: Any,
    dtype: Any,
) -> None:
    """Refuse arguments that are wrong whatever the model is."""
    if isinstance(ignore, str):
        raise InputError(f"ignore: {ignore!r} is one pattern; give a list of them, [{ignore!r}]")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch size {batch_size!r}; allowed: 1 or more")
    for what, value in (("samples", samples), ("length", length)):
        if value is not None and not isinstance(value, int):
            raise InputError(f"{what} {value!r}; it must be a whole number")
    if dtype is not None and dtype not in FLOATS:
        raise InputError(f"dtype {dtype!r}; allowed: {', '.join(map(str, FLOATS))}")
    try:
        json.dumps(describe(passes))
    except TypeError as error:
        raise InputError(
            f"a pass has an option that cannot be recorded ({error}); use numbers, words and lists"
        ) from None


def _check_group() -> None:
    """Refuse a sharded run where there is no process group, or a torch that has none of this kind."""
    if not torch.distributed.is_initialized():
        raise InputError("a sharded run needs a process group; start it with torchrun")
    Sharded.require()


def _undoing(model: nn.Module | None, restore: bool, record: RunRecord) -> AbstractContextManager[None]:
    """Within: a failure leaves a model in memory as it was, or says what it is. None: nobody else has the model."""
    if model is None:
        return nullcontext()
    if not restore:
        return naming(record.changed)
    return undone(values(model), hooks_and_buffers(model))


def _check_done(plan_: Plan, record: RunRecord, sink: Writer | Discard) -> None:
    """Raise CompressError for a run in which a pass found nothing that it could compress."""
    problem = nothing_done(plan_, record)
    if problem is None:
        return
    if isinstance(sink, Writer):
        sink.forget()  # what it wrote is the original: nothing to go on with
    raise CompressError(problem)


def _compute_dtype(model: nn.Module, device: torch.device, wanted: torch.dtype | None) -> torch.dtype | None:
    if wanted is not None or device.type != "cpu":
        return wanted
    return None if next(model.parameters()).dtype == torch.float64 else torch.float32


def _calibration(
    passes: tuple[Pass, ...],
    calibration: Calibration | None,
    config: Any,
    source: Source | None,
    samples: int | None,
    length: int | None,
    batch_size: int,
) -> tuple[Tokens | None, list[Batch]]:
    needing = next((p for p in passes if p.calibrated), None)
    if needing is None:
        if calibration is None and (samples is not None or length is not None):
            raise InputError("samples and length are of calibration data, which no pass uses; leave them out")
        return None, []
    if calibration is None:
        raise InputError(f"{needing.name} needs calibration data; give text, token ids or 'demo'")
    if not isinstance(calibration, str | Path | Tensor):
        if samples is not None or length is not None:
            raise InputError("samples and length do not apply to ready-made batches; leave them out")
        return None, batches_of(calibration, batch_size, getattr(config, "vocab_size", None))

    if getattr(config, "is_encoder_decoder", False):
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
    tokens = load_tokens(given, tokenizer, config, what="calibration", length=length, samples=wanted)
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
    for note in notes_for_readers(schemes, plan_):
        record.note(reporter, note)
    config: dict[str, Any] | None = dict(source.config) if source is not None else None
    extra: dict[str, str] = {}
    if source is None and hasattr(model, "config"):
        own: Any = model
        config = json.loads(own.config.to_json_string(use_diff=True))
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            extra["generation_config.json"] = generation.to_json_string()
    if config is not None and isinstance(config.get("_name_or_path"), str):
        config["_name_or_path"] = shown(config["_name_or_path"])
    if config is not None and (schemes or cache is not None):
        config["quantization_config"] = quantization_config(schemes, model, plan_.tables, cache)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    manifest = {
        "compress": VERSION,
        "model": shown(source.name) if source is not None else type(model).__name__,
        "identity": identity,
        "command": command(),
        "calibration": None
        if tokens is None
        else {
            "source": shown(tokens.source),
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
        "coverage": None if record.coverage is None else asdict(record.coverage),
        "layers": [asdict(layer) for layer in record.layers],
        "caches": record.caches,
        "ranges": [asdict(found) for found in record.ranges],
        "folds": [asdict(fold) for fold in record.folds],
        "not_folded": record.not_folded,
        "left_alone": record.left_alone,
        "notes": record.notes,
        "verification": None,
    }
    sink.complete(_rest(model, plan_), config, source.path if source is not None else None, extra, manifest)


def _verified(place: Directory, comm: Comm, reporter: Reporter, trust_remote_code: bool) -> dict[str, Any] | None:
    """Verify the checkpoint before it gets its name, on rank 0, and enter what was found into its record."""
    found, problem = None, None
    if comm.rank == 0:
        reporter.note("verifying the output in a fresh process")
        try:
            found = _verify(place, trust_remote_code)
            write_json(place.model / RECORD, {**read_json(place.model / RECORD), "verification": found})
        except CompressError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write {place.model / RECORD}: {error.strerror}"
    comm.fail_together(problem)
    return found


def _verify(place: Directory, trust_remote_code: bool) -> dict[str, Any]:
    """`compress verify` in a fresh process, outside any process group."""
    distributed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    environment = {k: v for k, v in os.environ.items() if k not in distributed and not k.startswith("TORCHELASTIC")}
    # Not from the current directory, unless that is where this package is: what lies there is anybody's.
    home = Path(__file__).resolve().parents[1]
    if home == Path.cwd():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), environment.get("PYTHONPATH"))))
    words = [sys.executable, "-P", "-m", "compress", "verify", str(place.model), "--json", "-", "--quiet"]
    words += ["--trust-remote-code"] if trust_remote_code else []
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CompressError(
            f"{place.output} does not verify, so it stays {place.model}: {lines[-1] if lines else 'no message'}"
        )
    # What is recorded names the output as it will be called, wherever it lies.
    return json.loads(done.stdout.replace(json.dumps(str(place.model))[1:-1], place.output.name))
