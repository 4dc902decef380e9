"""Where a model comes from: a directory, a hub id, `demo`, or a model in memory; checked before work starts."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from compress.cache import SIDES, CacheScheme, attentions, hold_scales, read_cache_scheme, round_cache
from compress.checkpoint import INDEX, check_parts, quantized_from, read_json, shape_of
from compress.configuration import Index, check_config, check_counts
from compress.errors import CheckpointError, CompressError, InputError, first_line
from compress.grid import Quantized
from compress.reading import special
from compress.schema import fits
from compress.scheme import FLOATS, LAYOUTS, PARTS, Scheme, scheme_for
from compress.shown import shown

DEMO = Path(__file__).parent / "demo"
SAMPLES_PER_FILE, SAMPLE_BYTES = 64, 4096
WHOLE = "model.safetensors"
SHOWN = 60  # characters of a name in a message
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Source:
    """A checkpoint directory that has a readable configuration and all of its weight files.

    trusted: Python code that comes with it may be run. Never otherwise, whoever asks on standard input.
    """

    name: str
    path: Path
    config: dict[str, Any]
    weights: Mapping[str, Path]
    trusted: bool = False

    @cached_property
    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """{tensor name: (shape, safetensors' name of its dtype)}, from the headers of the files, read once."""
        found = {}
        for path in sorted(set(self.weights.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    piece = file.get_slice(name)
                    found[name] = (tuple(piece.get_shape()), piece.get_dtype())
        return found

    @property
    def quantization(self) -> dict[str, Any] | None:
        return self.config.get("quantization_config")

    def fingerprint(self) -> str:
        """SHA-256 over the configuration and each weight file's name, size, header and evenly spread samples."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in sorted(set(self.weights.values())):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for i in range(SAMPLES_PER_FILE):
                    file.seek(size * i // SAMPLES_PER_FILE)
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()


def path_of(name: str, what: str) -> Path:
    """A path that can be asked whether it exists. Raises InputError where the system refuses even that."""
    path = Path(name)
    try:
        path.exists()
    except OSError as error:
        shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
        raise InputError(f"{what} {shown!r} cannot be looked up: {error.strerror}") from None
    return path


def find_source(name: str, trust_remote_code: bool = False) -> Source:
    """Resolve `demo`, a directory or a hub id. Raises InputError in one line where it is not a usable checkpoint.

    trust_remote_code: run the model's own Python code where it has some.
    """
    if not name.strip():
        raise InputError("the model is an empty name; give a directory, a hub id (owner/name) or 'demo'")
    path = DEMO if name == "demo" else path_of(name, "model")
    kind = special(path)
    if kind is None and not path.exists():
        path = _download(name)
    if not path.is_dir():
        raise InputError(f"model {name!r} is {kind or 'a file'}; give the directory that holds its config.json")
    _check_entries(path)
    if not (path / "config.json").exists():
        raise InputError(f"{path} holds no config.json; give a Hugging Face model directory, a hub id or 'demo'")
    config = read_json(path / "config.json")
    check_config(config, path / "config.json")
    return Source(name, path, config, weight_files(path), trust_remote_code)


def _check_entries(path: Path) -> None:
    """Refuse a model directory in which something waits to be read that is no file: transformers opens what it finds
    by names of its own."""
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for entry in entries:
        kind = special(entry)
        if kind is not None and not entry.is_dir():
            raise CheckpointError(f"{entry} is {kind}; a model directory holds regular files: move it away")


def _download(name: str) -> Path:
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or not name.strip():
        raise InputError(f"model {name!r} does not exist; give a directory, a hub id (owner/name) or 'demo'")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*", "NOTICE*"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # noqa: BLE001 - every failure of the hub client means the same to the person
        raise InputError(
            f"model {name!r} is no local directory and cannot be had from the hub ({first_line(error)}); give a "
            "directory, a hub id (owner/name) or 'demo'"
        ) from None


def weight_files(path: Path) -> dict[str, Path]:
    """{tensor name: file}, from headers alone; every file is complete."""
    if (path / INDEX).exists():
        index = read_json(path / INDEX)
        fits(index, Index, path / INDEX)
        weight_map = index["weight_map"]
        if not weight_map:
            raise CheckpointError(f"{path / INDEX} has an empty weight_map")
        files = sorted({path / file for file in weight_map.values()})
    else:
        # What transformers reads; otherwise whatever there is.
        files = [path / WHOLE] if (path / WHOLE).exists() else sorted(path.glob("*.safetensors"))
        weight_map = None
    if not files:
        raise CheckpointError(f"{path} holds no .safetensors weights; convert the model with save_pretrained first")
    found: dict[str, Path] = {}
    for file in files:
        kind = special(file)
        if kind is not None:
            named = f"{path / INDEX} names {file.name}, which" if weight_map else f"{file}"
            raise CheckpointError(f"{named} is {kind}; weights are in regular files")
        if not file.exists():
            raise CheckpointError(f"{path / INDEX} names {file.name}, which is missing; fetch the checkpoint again")
        try:
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or incomplete ({error}); fetch it again") from None
    for name, holder in (weight_map or {}).items():
        if name not in found:
            raise CheckpointError(f"{path / INDEX} names the tensor {name}, which {holder} does not hold")
    if not found:
        raise CheckpointError(f"{files[0]} holds no tensor")
    return found


def needs_code(source: Source, what: str, code: str) -> InputError:
    """The refusal of a model whose `what` is Python code of its own."""
    return InputError(
        f"the {what} of {source.name} is Python code of its own ({code}), which is not run; read it, and if you trust "
        "it give --trust-remote-code (in Python trust_remote_code=True)"
    )


def own_code(config: Any) -> dict[str, str]:
    """{Auto class of transformers: `module.Class` that comes with the model}, the `auto_map` of a configuration."""
    auto_map = config.get("auto_map") if isinstance(config, Mapping) else None
    found: dict[str, str] = {}
    for kind, code in auto_map.items() if isinstance(auto_map, Mapping) else ():
        names = [name for name in (code if isinstance(code, list) else [code]) if isinstance(name, str)]
        found |= {kind: names[-1]} if names else {}  # of a tokenizer: a slow and a fast one
    return found


def read_config(source: Source) -> PretrainedConfig:
    """The configuration as transformers reads it. Raises CheckpointError where it cannot, or where it asks for more
    layers than the files can fill; InputError for one that needs code which is not trusted."""
    check_counts(source.config, len(source.weights), source.path / "config.json")
    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=source.trusted)
    except Exception as error:  # noqa: BLE001 - one line for whatever transformers finds wrong
        code = own_code(source.config).get("AutoConfig")
        if code is not None and not source.trusted:
            raise needs_code(source, "configuration", code) from None
        raise CheckpointError(
            f"{source.path / 'config.json'} is not a configuration that transformers knows: {first_line(error)}"
        ) from None


def _model_class(source: Source, notes: list[str] | None) -> Any:
    """The class of the model: what comes with it where that is trusted, transformers' own otherwise. Raises InputError
    for one that transformers does not have and that comes as code which is not trusted."""
    names = source.config.get("architectures") or []
    own = {task: code for task, code in own_code(source.config).items() if task.startswith("AutoModel")}
    # Several tasks may have a class each; the weights are those of the architecture that is named.
    task = next((task for task, code in own.items() if code.rpartition(".")[2] in names[:1]), None)
    if source.trusted and own:
        usual = AutoModelForCausalLM.__name__
        task = task or (usual if usual in own else next(iter(own)))
        kind = get_class_from_dynamic_module(own[task], str(source.path))
        kind.register_for_auto_class(task)  # save_pretrained then writes the code, too
        return kind
    found = getattr(transformers, names[0], None) if names else None
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    if task is not None:
        raise needs_code(source, "model", own[task])
    if notes is not None:
        notes.append(
            f"config.json names no architecture that transformers has ({names}); loaded as a causal language model"
        )
    return AutoModelForCausalLM


def check_dense(source: Source) -> None:
    """Raises InputError for a checkpoint that is quantized already."""
    if source.quantization is not None:
        raise InputError(
            f"{source.name} is quantized already ({source.quantization.get('quant_method')}); give the original model"
        )


def load_dense(source: Source, dtype: torch.dtype | None = None, notes: list[str] | None = None) -> nn.Module:
    """The model of an uncompressed checkpoint, in its own dtype unless given; on CPU the weights stay mapped files.

    notes: takes what the person should know about the checkpoint.
    """
    check_dense(source)
    read_config(source)
    return from_pretrained(source, str(source.path), notes, dtype="auto" if dtype is None else dtype)


def from_pretrained(
    source: Source, path: str | None, notes: list[str] | None = None, strict: bool = False, **arguments: Any
) -> nn.Module:
    """Load with transformers. Raises CheckpointError for what does not fit; `notes` takes what was left out.

    strict: tensors that the model has no place for are an error, too.
    """
    if source.trusted and own_code(source.config):  # such a class does not find its configuration by itself
        arguments.setdefault("config", read_config(source))
    try:
        # Mismatched sizes are an error below, which names the tensor; transformers only prints a table.
        model, info = _model_class(source, notes).from_pretrained(
            path,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=source.trusted,
            **arguments,
        )
    except CompressError:
        raise
    except Exception as error:
        raise CheckpointError(f"transformers cannot load {source.path}: {first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing and source.quantization is not None:
        # compressed-tensors turns what a module does not store into what it does.
        missing = sorted(set(missing) - unstored(source))
    if missing:
        raise CheckpointError(f"{source.path} lacks the tensor {missing[0]} ({len(missing)} missing in all)")
    mismatched = sorted((name, list(found), list(expected)) for name, found, expected in info["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise CheckpointError(
            f"{source.path}: {name} has shape {found}, its config.json asks for {expected} ({len(mismatched)} tensors "
            "differ in all)"
        )
    unused = sorted(info["unexpected_keys"])
    if unused and strict:
        raise CheckpointError(
            f"{source.path} holds {unused[0]}, which is no part of {type(model).__name__} ({len(unused)} such tensors)"
        )
    if unused and notes is not None:
        notes.append(
            f"{len(unused)} tensors of {shown(source.name)} are no part of {type(model).__name__} and are not written, "
            f"like {unused[0]}"
        )
    return model.eval()


def empty_model(source: Source) -> nn.Module:
    """The model that a checkpoint's configuration describes, without memory."""
    config = read_config(source)
    config.__dict__.pop("quantization_config", None)
    kind = _model_class(source, None)
    try:
        with torch.device("meta"):
            own = hasattr(kind, "_from_config")
            model = kind._from_config(config) if own else kind.from_config(config, trust_remote_code=source.trusted)
    except Exception as error:
        raise CheckpointError(f"transformers makes no model of {source.path}: {first_line(error)}") from error
    assert isinstance(model, nn.Module)
    return model


def unstored(source: Source) -> set[str]:
    """Names of the model's buffers that are no part of a checkpoint."""
    modules = empty_model(source).named_modules()
    return {f"{name}.{buffer}" for name, module in modules for buffer in module._non_persistent_buffers_set}


def embeddings_of(source: Source) -> set[str]:
    """Names of the model's embeddings."""
    return {name for name, module in empty_model(source).named_modules() if isinstance(module, nn.Embedding)}


@dataclass(frozen=True)
class StoredLayer:
    """A compressed layer of a checkpoint: [N, K] = shape, and its tensors by the names that `Scheme.parts` uses.

    shares: the layer whose int8 rows are this one's, too; it has scales of its own, which are the same.
    """

    scheme: Scheme
    shape: tuple[int, int]
    parts: Mapping[str, str]
    shares: str | None = None


def layers_of(source: Source) -> dict[str, StoredLayer]:
    """The compressed layers of a checkpoint, every tensor's shape and dtype checked from headers alone.

    Raises CheckpointError that names the tensor which is missing, superfluous or of the wrong shape, or the layer
    whose scheme cannot be read.
    """
    found = source.headers
    own = set(PARTS) - {"weight"}
    names = {name.rpartition(".")[0] for name in found if name.rpartition(".")[2] in own}
    names |= {
        name.removesuffix(".weight")
        for name, (_, dtype) in found.items()
        if name.endswith(".weight") and dtype in ("I8", "F8_E4M3")
    }
    quantization = source.quantization
    if quantization is None:
        if names:
            raise CheckpointError(
                f"{source.path} holds compressed tensors of {min(names)} but config.json has no quantization_config"
            )
        return {}
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method != "compressed-tensors":
        raise CheckpointError(f"{source.path} is quantized as {method}; readable: compressed-tensors")
    cache = quantization.get("kv_cache_scheme")
    if layout not in LAYOUTS and layout != "mixed-precision" and (names or not cache):
        raise CheckpointError(
            f"{source.path} is quantized as {method} {layout}; readable: compressed-tensors {', '.join(LAYOUTS)}"
        )
    if quantization.get("transform_config"):
        raise CheckpointError(f"{source.path} transforms what its layers read (transform_config), which cannot be read")
    if not names and not cache:
        raise CheckpointError(f"{source.path} says it is {layout} but holds no compressed layer")
    by_layer: dict[str, dict[str, str]] = {layer: {} for layer in sorted(names)}
    for name in found:
        layer, _, part = name.rpartition(".")
        if layer in by_layer:
            by_layer[layer][part] = name
    shapes = _read(source, [name for name in found if name.endswith(".weight_shape")])
    layers: dict[str, StoredLayer] = {}
    # Last, those without codes of their own.
    for layer, parts in sorted(by_layer.items(), key=lambda item: not {"weight", "weight_packed"} & set(item[1])):
        scheme = scheme_for(layer, quantization)
        if scheme.layout == "int-quantized" and scheme.inputs is None and "weight" not in parts:
            layers[layer] = _sharing(source, layer, scheme, parts, layers)
            continue
        strange = next((name for name in parts.values() if found[name][1] not in DTYPES), None)
        if strange is not None:
            raise CheckpointError(f"{strange} has the dtype {found[strange][1]}; known: {', '.join(DTYPES)}")
        held = {part: (found[name][0], DTYPES[found[name][1]]) for part, name in parts.items()}
        if scheme.layout != "pack-quantized":
            shape = held.get("weight", ((0, 0), None))[0]
            if len(shape) != 2:
                raise CheckpointError(f"{layer}.weight has shape {shape}; it must have two dimensions")
            if 0 in shape:
                raise CheckpointError(f"{layer}.weight has shape {shape}; there is nothing in it")
        else:
            if "weight_shape" not in parts:
                raise CheckpointError(f"{layer}.weight_shape is missing from the checkpoint")
            shape = shape_of(layer, shapes[parts["weight_shape"]])
        check_parts(layer, held, scheme, (shape[0], shape[1]))
        parts.pop("bias", None)
        layers[layer] = StoredLayer(scheme, (shape[0], shape[1]), parts)
    return layers


@dataclass(frozen=True)
class StoredCaches:
    """The key-value caches of a checkpoint: their scheme, and of each attention with scales of its own the names of
    their tensors and the shape of each, by the names that the attention has for them."""

    scheme: CacheScheme
    scales: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]


def caches_of(source: Source) -> StoredCaches | None:
    """How a checkpoint keeps keys and values; None where it says nothing. Raises CheckpointError that names the tensor
    which is missing or of the wrong shape."""
    entry = (source.quantization or {}).get("kv_cache_scheme")
    if not entry:
        return None
    scheme, found = read_cache_scheme(entry), source.headers
    keys = tuple(f"{side}_scale" for side in SIDES)
    holders = sorted({name.rpartition(".")[0] for name in found if name.rpartition(".")[2] in keys})
    if scheme.dynamic and holders:
        raise CheckpointError(f"{holders[0]} has scales of a cache whose scales are fitted to every token")
    if not scheme.dynamic and not holders:
        raise CheckpointError(f"{source.path} has a key-value cache of fixed scales and holds none of them")
    scales = {}
    for holder in holders:
        for key in keys:
            if f"{holder}.{key}" not in found:
                raise CheckpointError(f"{holder}.{key} is missing from the checkpoint")
            shape, dtype = found[f"{holder}.{key}"]
            fits = len(shape) == 3 and shape[1:] == (1, 1) if scheme.granularity == "head" else shape == (1,)
            if not fits or DTYPES.get(dtype) not in FLOATS:
                needed = "[heads, 1, 1]" if scheme.granularity == "head" else "[1]"
                raise CheckpointError(f"{holder}.{key} is {dtype} {list(shape)}; it must be floats {needed}")
        scales[holder] = {key: (f"{holder}.{key}", found[f"{holder}.{key}"][0]) for key in keys}
    return StoredCaches(scheme, scales)


def _sharing(
    source: Source, layer: str, scheme: Scheme, parts: Mapping[str, str], layers: Mapping[str, StoredLayer]
) -> StoredLayer:
    """A layer that has scales and no codes: those of the layer with the very same scales (a tied head)."""
    own = {part: name for part, name in parts.items() if part != "bias"}
    scales = _read(source, own.values())
    for other, stored in layers.items():
        if stored.scheme != scheme or set(stored.parts) != {*own, "weight"}:
            continue
        theirs = _read(source, [stored.parts[part] for part in own])
        if all(torch.equal(scales[name], theirs[stored.parts[part]]) for part, name in own.items()):
            return StoredLayer(scheme, stored.shape, own, other)
    raise CheckpointError(f"{layer}.weight is missing from the checkpoint")


def _read(source: Source, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors by name, each file opened once."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(source.weights[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for path, inside in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in inside}
    return tensors


def read_tensors(source: Source) -> dict[str, Tensor | Quantized]:
    """Every tensor of a checkpoint; compressed layers as `<layer>.weight` -> Quantized."""
    layers = layers_of(source)
    compressed = {name for stored in layers.values() for name in stored.parts.values()}
    result: dict[str, Tensor | Quantized] = {}
    result |= _read(source, [name for name in source.weights if name not in compressed])
    for layer, stored in layers.items():
        if stored.shares is not None:
            continue
        result[f"{layer}.weight"] = quantized_from(layer, _read(source, stored.parts.values()), stored.scheme)
    return result


def load_dequantized(source: Source, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a compressed checkpoint with dense weights: exactly what its codes stand for.

    Raises InputError where a layer also quantizes its input or output, which dense weights would not show.
    """
    layers = layers_of(source)
    active = [layer for layer, stored in layers.items() if stored.scheme.inputs is not None]
    if active:
        both = "input and output" if layers[active[0]].scheme.outputs is not None else "input"
        raise InputError(
            f"{source.name} quantizes the {both} of {active[0]} ({len(active)} layers in all), which dense weights "
            "would leave out; load it without dequantize"
        )
    tensors = {
        name: value.dequantize() if isinstance(value, Quantized) else value
        for name, value in read_tensors(source).items()
    }
    caches = caches_of(source)
    scales = {
        attention: [tensors.pop(name) for name, _ in held.values()]
        for attention, held in ({} if caches is None else caches.scales).items()
    }
    config = read_config(source)
    del config.quantization_config
    target = dtype if dtype is not None else config.dtype
    model = from_pretrained(source, None, config=config, state_dict=tensors, dtype=target)
    if caches is not None:
        for name, attention in attentions(model).items():
            if name in scales:
                hold_scales(attention, scales[name], persistent=False)
            round_cache(attention, caches.scheme)
    return model


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights. Raises InputError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=source.trusted)
    except Exception as error:  # noqa: BLE001 - one line for whatever transformers finds wrong
        settings = source.path / "tokenizer_config.json"
        own = own_code(source.config) | (own_code(read_json(settings)) if settings.exists() else {})
        code = own.get("AutoTokenizer")
        if code is not None and not source.trusted:
            raise needs_code(source, "tokenizer", code) from None
        raise InputError(
            f"{source.path} has no usable tokenizer ({first_line(error)}); "
            "give token ids ([samples, length], .pt or .npy) instead of text"
        ) from None


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and evenly spread values of a model in memory. A collective if sharded."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        data = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
        flat = data.detach().flatten()
        picked = flat[:: max(1, len(flat) // SAMPLE_BYTES)].float().cpu()
        digest.update(f"{name} {tuple(data.shape)} {data.dtype}".encode())
        digest.update(picked.numpy().tobytes())
    return digest.hexdigest()
