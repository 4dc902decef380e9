"""Refusals, before the work, of what compressed-tensors cannot express, and notes for readers after it."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from compress.base.errors import InputError
from compress.checkpoint.files import VARIANT
from compress.checkpoint.read.fused import fusing, mixed_experts, mixed_groups, naming
from compress.checkpoint.write.quantization_config import unknown_to_others
from compress.engine.plan.plan import Plan
from compress.inference.check.by_transformers import misread_experts
from compress.model.attention import attentions, has_cache_format, head_sizes
from compress.model.layers import Layer, layers_of
from compress.model.online_rotation import input_rotation
from compress.passes.options.activation_format import ActivationFormat
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn
from compress.weights.compressed_tensors import cache_entry, decompressed_in, group_entry, needs_dequantizing, why_not
from compress.weights.formats.sparse24 import PackedSparse24, is_halved
from compress.weights.kv_cache_codes import CacheScheme
from compress.weights.own_config import CACHE_SCHEME, CACHES, caches_entry
from compress.weights.scheme import Scheme

NOT_EXPRESSED = "compressed-tensors cannot express"  # begins a note on who reads a checkpoint


def check_storable(plan: Plan) -> None:
    """Refuse what compressed-tensors has no format for: experts in one parameter, inputs with a scale per channel, and
    rounded inputs of layers that are stored dense, where the checkpoint would not say so."""
    check_rotated(plan)
    for layer in (layer for layers in plan.layers.values() for layer in layers if not layer.is_called):
        if layer.name in plan.treated:
            raise InputError(
                f"{layer.name} is one of several experts in a parameter, which checkpoints hold one by one; give the "
                "model by name, or call compress.split_experts(model) first, or leave the output out"
            )
    for p in plan.passes:
        if isinstance(p, ActivationFormat) and p.rounds_inputs and p.per_channel_inputs:
            raise InputError(
                f"per_channel_inputs of {p.name} cannot be written: no format holds a scale per input "
                "channel; leave the output out and keep the model in memory, or leave per_channel_inputs out"
            )
    for layer in (layer for layers in plan.layers.values() for layer in layers if not layer.has_format):
        for p in plan.passes:
            if p.rounds_inputs and p.wants(layer.name):
                raise InputError(
                    f"{layer.name} is a {type(layer.module).__name__}, which compressed-tensors cannot hold with a "
                    f"rounded input ({p.name}); ignore it, give it weights only, or leave the output out"
                )


def check_rotated(plan: Plan) -> None:
    """Refuse layers that rotate their input as they run and are stored dense, where the checkpoint would not say so."""
    for name, block in (each for stack in plan.stacks for each in stack.blocks):
        for layer in layers_of(block, name):
            if input_rotation(layer.module) is None:
                continue
            passes = [p for p in plan.passes if p.wants(layer.name) and layer.name in plan.treated]
            if all(p.stored(layer.name, layer.shape) is None for p in passes):
                raise InputError(
                    f"{layer.name} rotates its input as it runs, which a checkpoint says of layers of codes alone; "
                    "quantize it in the same run, or leave online out of rotate"
                )


def check_halved(plan: Plan, halved: Collection[str]) -> None:
    """Refuse layers to be stored as 2:4 that will not be, as far as their passes tell."""
    for layer in (layer for layers in plan.layers.values() for layer in layers if layer.name in halved):
        why = _why_not_halved(layer, [p for p in plan.passes if p.wants(layer.name)])
        if why is not None:
            raise InputError(f"{layer.name} cannot be stored as 2:4: {why}; prune it so, ignore it, or leave out store")


def _why_not_halved(layer: Layer, passes: Sequence[Pass]) -> str | None:
    """The reason why a layer has no 2:4 form after these passes; None where it has one, or only the work will tell."""
    if not layer.has_format:
        return f"a {type(layer.module).__name__} has no such form"
    for p in (p.fitted({layer.shape[1]}) for p in passes):
        if p.writes == "quantized weight" and (grid := p.code_grid) is not None:
            if getattr(p, "outliers", 0):
                return f"{p.name} keeps outliers beside its codes"
            try:
                problem = PackedSparse24(grid=grid).problem(*layer.shape)
            except InputError as error:
                return f"{p.name}: {error}"
            if problem is not None:
                return f"{p.name} {problem}"
    pruning = [p for p in passes if p.writes == "mask" or ((learn := p.stage(Learn)) and learn.sparsity.prunes)]
    if not pruning and not is_halved(layer.weight):
        return "no step prunes it"
    if pruning and all(p.scattered for p in pruning):
        return f"{pruning[-1].name} prunes a share of its weights, wherever they are"
    return None


def caches_config(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """The part of a run's `quantization_config` about key-value caches; empty where they stay as they are. Raises
    InputError for caches that readers do not round, or not so."""
    scheme = plan.cache_scheme
    if scheme is None:
        return {}
    if scheme.narrow:
        return {CACHES: caches_entry(scheme)}
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
    sizes = head_sizes(model) if scheme.dynamic else set()
    if len(sizes) > 1:
        raise InputError(
            f"{type(model).__name__} has keys and values of {' and '.join(map(str, sorted(sizes)))} elements per head; "
            "a checkpoint holds one size: give granularity=head or tensor, or leave the output out"
        )
    size = min(sizes, default=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return {CACHE_SCHEME: cache_entry(scheme, size)}


def notes_on_dense(names: Collection[str], model: nn.Module, plan: Plan) -> Iterator[str]:
    """The reasons why compressed layers are stored dense."""
    formless = {layer.name for layers in plan.layers.values() for layer in layers if not layer.has_format}
    without = sorted(formless.intersection(names))
    if without:
        kinds = sorted({type(model.get_submodule(name)).__name__ for name in without})
        yield (
            f"{len(without)} layers are stored dense, with their compressed values: "
            f"compressed-tensors has no {', '.join(kinds)}, so these take no less space on disk"
        )
    if pruned := len(names) - len(without):
        yield (
            f"{pruned} layers are stored dense: a zero takes as much space as another number; those that are 2:4 take "
            "9 bits a weight in what `compress export --to sparse24` makes of them"
        )


def with_dense(schemes: Mapping[str, Scheme], plan: Plan) -> dict[str, Scheme | None]:
    """{layer: its scheme, None for those without codes} of all linear layers that a plan knows of."""
    known = [layer.name for layers in plan.layers.values() for layer in layers]
    return {**dict.fromkeys([*known, *plan.ignored]), **schemes}


def notes_for_readers(schemes: Mapping[str, Scheme], plan: Plan, model: nn.Module) -> Iterator[str]:
    """Instructions to read a checkpoint of these schemes in transformers and vLLM, where it takes more than loading."""
    if schemes and not hasattr(model, "config"):
        yield (
            f"{type(model).__name__} is not of transformers: read the checkpoint with compress.load(DIR, into=model), "
            "where model is of the same class and sizes"
        )
        return
    foreign = {name: why for name, scheme in schemes.items() if (why := why_not(scheme)) is not None}
    own = plan.cache_scheme if plan.cache_scheme is not None and plan.cache_scheme.narrow else None
    if foreign or own is not None:
        yield _note_on_foreign(foreign, own)
        return
    if apart := unknown_to_others(model, schemes):
        yield (
            f"{len(apart)} layers, like {apart[0]}, are parts that split_layers has made: run the checkpoint with "
            "compress.load; other readers refuse it"
        )
        return
    yield from _notes_on_merged(schemes, plan, model)
    transposed = [layer.name for layers in plan.layers.values() for layer in layers if layer.transposed]
    if coded := [name for name in transposed if name in schemes]:
        yield (
            f"transformers reads codes of linear layers alone, and {len(coded)} layers, like {coded[0]}, are Conv1D: "
            "run the checkpoint with compress.load; other readers read what `compress export --to dense` makes of it"
        )
        return
    odd = None
    if any(needs_dequantizing(scheme) for scheme in schemes.values()):
        odd = "asymmetric weights"
    if any(needs_dequantizing(schemes[table.name], table=True) for table in plan.tables):
        odd = "a packed embedding"
    if odd is not None and len({json.dumps(group_entry(s), sort_keys=True) for s in schemes.values()}) == 1:
        rest = ", and this one leaves the key-value cache as it is" if plan.kv is not None else ""
        yield (
            f"{odd}: load in transformers with quantization_config=CompressedTensorsConfig(dequantize=True); the "
            f"default load fails{rest}"
        )
    elif odd is not None:
        yield (
            f"{odd} beside layers of another scheme: transformers loads no such checkpoint (its default load fails, "
            "dequantize=True reads all layers by one scheme); run it with compress.load"
        )
    wanted = decompressed_in(schemes.values())
    kept = {layer.parameter.dtype for layers in plan.layers.values() for layer in layers if layer.name in schemes}
    if wanted is not None and kept != {wanted}:
        yield (
            "compressed-tensors decompresses these floats to bfloat16, whatever the model has: load in transformers "
            "with dtype='bfloat16'; compress.load takes any"
        )
    yield from _notes_on_caches(plan)


def _notes_on_merged(schemes: Mapping[str, Scheme], plan: Plan, model: nn.Module) -> Iterator[str]:
    """Notes on layers of which readers make one, and which they then refuse or compute otherwise."""
    if mixed := mixed_experts(schemes):
        yield (
            f"the experts of {len(mixed)} blocks have several schemes, like those of {mixed[0]}: transformers and "
            "vLLM take one for all experts of a block; run the checkpoint with compress.load"
        )
    elif (why := misread_experts(model, schemes)) is not None:
        yield f"transformers computes these experts otherwise: {why}; run the checkpoint with compress.load or in vLLM"
    if fused := mixed_groups(with_dense(schemes, plan)):
        yield (
            f"{fusing()} make one layer of {naming(fused[0])} ({len(fused)} such groups), which differ in their "
            "scheme, and refuse the checkpoint; other readers take it"
        )


def _note_on_foreign(foreign: Mapping[str, str], caches: CacheScheme | None) -> str:
    """The way to read a checkpoint with layers, {layer: why}, or caches that compressed-tensors cannot express."""
    beyond = [] if caches is None else [f"the {caches}"]
    if foreign:
        first = next(iter(foreign))
        beyond.insert(0, f"{len(foreign)} layers, like {first} ({foreign[first]})")
    return (
        f"{NOT_EXPRESSED} {' and '.join(beyond)}: run the checkpoint with compress.load, or with "
        f"transformers after compress.register(), by from_pretrained(..., variant={VARIANT!r}); other readers refuse "
        "it, and read what `compress export --to dense` makes of it"
    )


def _notes_on_caches(plan: Plan) -> Iterator[str]:
    cache = plan.cache_scheme
    if cache is not None and (cache.type == "int" or cache.granularity == "token"):
        yield (
            f"key-value cache {cache.number} per {cache.granularity}: compress and transformers round it so; vLLM "
            "reads fp8 per tensor (or head) from checkpoints"
        )
