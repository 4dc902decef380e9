"""Loads models, configurations and tokenizers through transformers, with errors of one clear line."""

import copy
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from compress.base.errors import CheckpointError, CompressError, InputError, first_line
from compress.checkpoint.files import VARIANT, checksum, read_json
from compress.checkpoint.read.compressed_layers import idle_biases, stored_in
from compress.checkpoint.read.configuration import check_counts
from compress.checkpoint.read.source import ADAPTER, Source, check_dense, needs_code, once, own_code
from compress.checkpoint.read.tokenizer_check import check_tokenizer
from compress.checkpoint.read.views import ViewedFiles
from compress.checkpoint.read.weight_files import DTYPES
from compress.kernels.cpu.processor import usable_cores
from compress.model.disk_names import DiskNames, disk_names, places_in
from compress.model.experts import Experts
from compress.model.split_experts import join_experts, joins_experts, loading_steps, split_experts
from compress.model.tensors import stored_buffers

TOKENIZERS = ("tokenizer*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")  # files, one of which every kind has
# Types of models with code of their own, whose configuration and layers are those of a class of transformers.
READ_AS = {"kimi_k2": "DeepseekV3Config"}
DTYPE_KEYS = ("dtype", "torch_dtype")  # in config.json; the second one of transformers before 5
# A model may have this many values beyond those of the files. Below that the loader, which takes memory for them, names
# the missing tensor.
SLACK_ELEMENTS = 2**26
SLACK_FACTOR = 2


def read_config(source: Source) -> PretrainedConfig:
    """The configuration as transformers reads it, but for a dtype wider than that of the files (`narrower`). It is read
    once; every caller gets a copy that it may change.

    Raises CheckpointError where transformers cannot read it, or where it asks for more layers than the files can fill;
    InputError for one that needs code which is not trusted.
    """
    return copy.deepcopy(_configuration(source))


@once
def _configuration(source: Source) -> PretrainedConfig:
    check_counts(source.config, source.headers, source.path / "config.json")
    if source.quantization is not None and "model_type" not in source.config:
        kind = ", ".join(source.config.get("architectures") or ["a module"])
        raise InputError(
            f"{source.name} holds a model that is not of transformers ({kind}); make one of the same class and sizes, "
            "and fill it: compress.load(DIR, into=model)"
        )
    try:
        config = _reader(source).from_pretrained(source.path, trust_remote_code=source.trusted)
    except Exception as error:  # noqa: BLE001 - one line for whatever transformers finds wrong
        code = source.code.get("AutoConfig")
        if code is not None and not source.trusted:
            raise needs_code(source, "configuration", code) from None
        raise CheckpointError(
            f"{source.path / 'config.json'} is not a configuration that transformers knows: {first_line(error)}"
        ) from None
    config.dtype = narrower(source) or config.dtype
    return config


def _reader(source: Source) -> Any:
    name = None if source.trusted else READ_AS.get(str(source.config.get("model_type")))
    return AutoConfig if name is None else getattr(transformers, name)


def narrower(source: Source) -> torch.dtype | None:
    """The one dtype of all floats of an uncompressed model's files, where the configuration says a wider one; None
    elsewhere. What stays dense would take more bytes in that, and have no more digits."""
    said = getattr(torch, str(next((source.config[key] for key in DTYPE_KEYS if key in source.config), None)), None)
    held = {DTYPES[dtype] for _, dtype in source.headers.values() if dtype in DTYPES}
    floats = [dtype for dtype in held if dtype.is_floating_point]
    if source.quantization is not None or not isinstance(said, torch.dtype) or len(floats) != 1:
        return None
    return floats[0] if 1 < floats[0].itemsize < said.itemsize else None


def _model_class(source: Source, notes: list[str] | None) -> Any:
    """The class of the model: that of the model's own code where it is trusted, otherwise one of transformers. Raises
    InputError for a class that only untrusted code has. notes: takes a remark on an unknown architecture."""
    names = source.config.get("architectures") or []
    own = {task: code for task, code in source.code.items() if task.startswith("AutoModel")}
    # Each task may have its own class; the weights fit the architecture that the configuration names.
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


def main_input(source: Source | None, model: nn.Module | None) -> str | None:
    """The name of a model's main input, like input_ids or pixel_values; None for a model that is not transformers'."""
    return getattr(model if source is None else _model_class(source, None), "main_input_name", None)


def generates(source: Source | None, model: nn.Module | None) -> bool:
    """True for a model that writes text, as transformers says; of one that it says nothing about, for a checkpoint."""
    says = getattr(model if source is None else _model_class(source, None), "can_generate", None)
    return source is not None if says is None else bool(says())


def modalities(source: Source) -> tuple[str, ...]:
    """The kinds of input that a model reads, like image and text, as transformers says."""
    found = getattr(_model_class(source, None), "input_modalities", "text")
    return (found,) if isinstance(found, str) else tuple(found)


def load_dense(
    source: Source, dtype: torch.dtype | None = None, notes: list[str] | None = None, apart: bool = False
) -> nn.Module:
    """The model of an uncompressed checkpoint, by default in its own dtype; on CPU the weights stay mapped files.

    notes: takes remarks on the checkpoint for the person. apart: experts that the files hold one by one stay so
    (`split_experts`), and mapped, where transformers joins copies of them. Raises InputError for a quantized one.
    """
    check_dense(source)
    config, wanted = read_config(source), "auto" if dtype is None else dtype
    if dtype is None and (kept := narrower(source)) is not None:
        wanted = kept
        if notes is not None:
            notes.append(f"all weights are {kept}, and stay so, where config.json says more".replace("torch.", ""))
    with suppress(CheckpointError):  # said below
        if apart and (split := split_on_meta(source)) is not None:
            own = source.weights.tensors(source.weights)
            named = {disk_names(split, source.headers).in_model(name): value for name, value in own.items()}
            return with_experts_apart(source, split, named, notes, config=config, dtype=dtype or config.dtype)
        viewed = isinstance(source.weights, ViewedFiles)  # transformers finds other tensors in the files
        if viewed or any(isinstance(module, Experts) for module in empty_model(source).modules()):
            own = {
                names_in(source).in_model(name): value for name, value in source.weights.tensors(source.weights).items()
            }
            tensors = join_experts(empty_model(source), own)
            return from_pretrained(source, None, notes, config=config, state_dict=tensors, dtype=dtype or config.dtype)
    return from_pretrained(source, str(source.path), notes, dtype=wanted)


@once
def split_on_meta(source: Source) -> nn.Module | None:
    """The model on the meta device with its experts apart; None where files do not hold all of these one by one. Made
    once: callers must not change it."""
    model = _model_on_meta(source)
    own = {f"{name}." for name in split_experts(model, source.headers)}
    on_disk, experts = disk_names(model, source.headers).on_disk, tuple(own)
    shapes = {on_disk(name): tuple(p.shape) for name, p in model.named_parameters() if name.startswith(experts)}
    held = {name: shape for name, (shape, _) in source.headers.items() if name in shapes}
    coded = {} if source.quantization is None else stored_in(source).layers
    held |= {f"{name}.weight": layer.shape for name, layer in coded.items() if f"{name}.weight" in shapes}
    return model if own and held == shapes else None


def with_experts_apart(
    source: Source, split: nn.Module, tensors: Mapping[str, Tensor], notes: list[str] | None = None, **arguments: Any
) -> nn.Module:
    """The model of a checkpoint with experts as in `split`, which keep the tensors that are given for them.
    transformers loads the rest, with nothing in the places of the parameters to which it would join them."""
    own = {name for name, _ in split.named_parameters()}
    whole = dict(_model_on_meta(source).named_parameters())
    apart, nothing = own - whole.keys(), torch.zeros((), dtype=arguments["dtype"])
    joined = {name: p for name, p in whole.items() if name not in own}
    rest = {name: tensor for name, tensor in tensors.items() if name not in apart}
    rest |= {name: nothing.expand(p.shape) for name, p in joined.items()}
    model = from_pretrained(source, None, notes, state_dict=rest, **arguments)
    for name, p in joined.items():
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._parameters[key] = nn.Parameter(torch.empty_like(p), p.requires_grad)
    split_experts(model, source.headers)
    for name in apart:
        module, _, key = name.rpartition(".")
        trained = model.get_parameter(name).requires_grad
        model.get_submodule(module)._parameters[key] = nn.Parameter(tensors[name].to(nothing.dtype), trained)
    return model


def from_pretrained(
    source: Source, path: str | None, notes: list[str] | None = None, strict: bool = False, **arguments: Any
) -> nn.Module:
    """Load with transformers. Raises CheckpointError for missing tensors and wrong shapes.

    notes: takes remarks on the class. strict: tensors of a compressed layer that it has no place for are an error, too.
    """
    empty = None
    with suppress(CheckpointError):  # where transformers makes no model, the call below gives the reason
        empty = empty_model(source)
    if empty is not None:
        check_room(source, empty)
    if path is not None and (source.path / ADAPTER).exists():
        raise InputError(
            f"{source.path} holds an adapter of peft beside its model, which transformers would put into it; "
            f"merge_and_unload(), save_pretrained and give that directory, or move {ADAPTER} away"
        )
    if path is not None and source.weights.of_variant:  # load the files that were found, not others in the directory
        arguments["variant"] = VARIANT
    if source.trusted and source.code:  # a class of the model's own code does not find its configuration by itself
        arguments.setdefault("config", read_config(source))
    try:
        # Mismatched sizes are an error below, which names the tensor; transformers only prints a table.
        with without_progress_bar():
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
        # compressed-tensors stores other tensors than its modules hold in memory.
        missing = sorted(set(missing) - unstored_buffers(source))
    if missing:
        raise CheckpointError(f"{source.path} lacks the tensor {missing[0]} ({len(missing)} missing in all)")
    if path is None and model.can_generate() and (source.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    mismatched = sorted((name, list(found), list(expected)) for name, found, expected in info["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise CheckpointError(
            f"{source.path}: {name} has shape {found}, its config.json asks for {expected} ({len(mismatched)} tensors "
            "differ in all)"
        )
    if strict and (unused := sorted(set(info["unexpected_keys"]) - idle_biases(source))):
        modules, place = dict(model.named_modules()), places_in(model)
        layers = {at for name in stored_in(source).layers for at in (name, place(modules, name))}
        lost = [name for name in unused if name.rpartition(".")[0] in layers]
        if lost:
            raise CheckpointError(
                f"{source.path} holds {lost[0]}, which is no part of {type(model).__name__} ({len(lost)} such tensors)"
            )
    return model.eval()


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Keeps transformers from drawing a bar on standard error, which a notebook shows in red."""
    logging: Any = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging._tqdm_active = False  # `disable_progress_bar` would change the hub's bars, too
    try:
        yield
    finally:
        logging._tqdm_active = shown


@once
def empty_model(source: Source) -> nn.Module:
    """The model that a checkpoint's configuration describes, on the meta device. Made once: callers must not change it.

    Raises CheckpointError where transformers cannot make it.
    """
    model = _model_on_meta(source)
    if source.quantization is not None or not any(map(joins_experts, loading_steps(model))):
        split_experts(model, source.headers)
    return model


@once
def names_in(source: Source) -> DiskNames:
    """Names of tensors in a checkpoint's files and in its model; the same ones where transformers makes no model of
    it."""
    try:
        return disk_names(empty_model(source), source.headers)
    except CheckpointError:
        return DiskNames()


def stored_name(source: Source, layer: str) -> str:
    """The name in the files of a layer of the record, which has the model's names."""
    if f"{layer}.weight" in source.weights or layer in stored_in(source).layers:
        return layer
    return names_in(source).on_disk(layer)


def meta_model(source: Source) -> nn.Module:
    """The model that `load_dense` reads, on the meta device, a new one for every caller. Raises CheckpointError where
    transformers cannot make it, or the files hold far less."""
    model = _model_on_meta(source)
    check_room(source, model)
    return model


def _model_on_meta(source: Source) -> nn.Module:
    config = read_config(source)
    if config.dtype is None:  # then transformers takes that of the files
        floats = (DTYPES[dtype] for _, dtype in source.headers.values() if dtype in DTYPES)
        config.dtype = next((dtype for dtype in floats if dtype.is_floating_point), None)
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


def check_room(source: Source, empty: nn.Module) -> None:
    """Raises CheckpointError for a model (on the meta device) of far more values than the weight files hold. Tied ones
    count once; a compressed layer counts with all its weights."""
    layers = [] if source.quantization is None else [*stored_in(source).layers.values()]
    parts = {name for stored in layers for name in stored.parts.values()}
    stored_count = sum(prod(stored.shape) for stored in layers if stored.shares is None)
    stored_count += sum(prod(shape) for name, (shape, _) in source.headers.items() if name not in parts)
    asked = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    if asked <= SLACK_FACTOR * stored_count + SLACK_ELEMENTS:
        return
    shapes = {name: (tuple(tensor.shape), source.headers.get(name)) for name, tensor in empty.named_parameters()}
    other = (
        f" ({name} has shape {list(stored[0])}, the model's has {list(shape)})"
        for name, (shape, stored) in shapes.items()
        if stored is not None and stored[0] != shape
    )
    raise CheckpointError(
        f"{source.path / 'config.json'} describes a {type(empty).__name__} of {asked:,} values and the weight files "
        f"hold {stored_count:,}{next(other, '')}; fetch the checkpoint again"
    )


def unstored_buffers(source: Source) -> set[str]:
    """Names of the model's buffers that checkpoints do not store."""
    modules = empty_model(source).named_modules()
    return {f"{name}.{buffer}" for name, module in modules for buffer in module._non_persistent_buffers_set}


def embeddings_of(source: Source) -> set[str]:
    """Names of the model's embeddings."""
    return {name for name, module in empty_model(source).named_modules() if isinstance(module, nn.Embedding)}


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. Raises InputError where there is none."""
    try:
        found = AutoTokenizer.from_pretrained(source.path, trust_remote_code=source.trusted)
        if not isinstance(found.model_max_length, int | float):
            raise CheckpointError(f"model_max_length is {found.model_max_length!r}; it must be a number")
        check_tokenizer(found)
        return found
    except Exception as error:  # noqa: BLE001 - one line for whatever transformers finds wrong
        settings = source.path / "tokenizer_config.json"
        own = {**source.code} | (own_code(read_json(settings)) if settings.exists() else {})
        code = own.get("AutoTokenizer")
        if code is not None and not source.trusted:
            raise needs_code(source, "tokenizer", code) from None
        there = any(any(source.path.glob(pattern)) for pattern in TOKENIZERS)
        raise InputError(
            f"{source.path} has no {f'usable tokenizer ({first_line(error)})' if there else 'tokenizer'}; copy that of "
            "the original model into it, or give token ids ([samples, length], .pt or .npy) instead of text"
        ) from None


def tokens_of(source: Source | None) -> dict[str, int] | None:
    """{token: id} of a model's tokenizer; None where it has none."""
    try:
        return None if source is None else dict(load_tokenizer(source).get_vocab())
    except InputError:
        return None


def tokenizer_of(source: Source | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises InputError where there is none, and for a model in memory (source None)."""
    if source is None:
        raise InputError("a model in memory has no tokenizer; give token ids [samples, length] instead of text")
    return load_tokenizer(source)


def processor_of(source: Source, *, texts: bool) -> Any:
    """The maker of a model's inputs from images: the processor of a model that also reads texts, otherwise its image
    processor. Raises InputError where there is none."""
    kind: Any = AutoProcessor if texts else AutoImageProcessor
    try:
        processor = kind.from_pretrained(source.path, trust_remote_code=source.trusted)
    except Exception as error:  # noqa: BLE001 - one line for whatever transformers finds wrong
        library = re.search(r"requires the (\S+) library", str(error))
        if library is not None:
            raise InputError(
                f"transformers makes the processor of {source.path} with {library[1]}, which is not installed; install "
                "it, or give batches in Python"
            ) from None
        raise InputError(
            f"{source.path} has no usable {'' if texts else 'image '}processor ({first_line(error)}); give the files "
            "that belong to it (processor_config.json, preprocessor_config.json), or batches in Python"
        ) from None
    if texts and not hasattr(processor, "image_processor"):
        raise InputError(
            f"{source.path} has a {type(processor).__name__} and no processor of images; give its "
            "processor_config.json or preprocessor_config.json, or batches in Python"
        )
    return processor


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and values of the parameters and stored buffers of a model in memory. A
    collective if sharded."""
    tensors = [*model.named_parameters(), *stored_buffers(model)]
    sums: Iterable[str]
    if any(isinstance(tensor, DTensor) for _, tensor in tensors):  # gathered one by one
        sums = (checksum(t.full_tensor() if isinstance(t, DTensor) else t) for _, t in tensors)
    else:
        with ThreadPoolExecutor(usable_cores()) as threads:
            sums = threads.map(checksum, (tensor for _, tensor in tensors))
    digest = hashlib.sha256()
    for (name, tensor), each in zip(tensors, sums, strict=True):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {each}".encode())
    return digest.hexdigest()
