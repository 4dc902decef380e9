"""Makes the configuration of a checkpoint, and the `quantization_config` in it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from compress.base.errors import CompressError
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.pretrained import DTYPE_KEYS, narrower
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.unplaced_tensors import without_heads
from compress.checkpoint.read.weight_files import NAMING
from compress.model.disk_names import DiskNames
from compress.model.experts import Experts, gates
from compress.model.layers import Table
from compress.model.split_experts import LEAVES
from compress.model.splitting.split_layers import is_apart
from compress.weights import own_config
from compress.weights.compressed_tensors import group_entry, layout_of, why_not
from compress.weights.formats.codes import Int8Table
from compress.weights.scheme import Scheme


def configuration(
    model: Any, source: Source | None, changed: Mapping[str, Sequence[Any]] | None = None, headless: bool = False
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """(A model's configuration, or None; {file: content} of files to write with it).

    source: of the model; None for one in memory. changed: {key: (before, after)} of the run's changes to the
    configuration. headless: heads that predict several tokens are not written, so that it may count none.
    """
    config: dict[str, Any] | None = None
    companions: dict[str, str] = {}
    if source is not None:
        config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        if (kept := narrower(source)) is not None:
            config |= {key: str(kept).removeprefix("torch.") for key in DTYPE_KEYS if key in config}
    elif hasattr(model, "config"):
        config = json.loads(model.config.to_json_string(use_diff=True))
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        config.pop(NAMING, None)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            companions["generation_config.json"] = generation.to_json_string()
    if config is not None and (changed or headless):
        own = without_heads(model.config) if headless else model.config
        config = restate(config, own, {**(changed or {}), **differences(model.config, own)})
    if config is not None and isinstance(config.get("_name_or_path"), str):
        config["_name_or_path"] = portable(config["_name_or_path"])
    return config, companions


def restate(
    written: Mapping[str, Any], config: PretrainedConfig, changed: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """config.json with the changes, so that reading it gives this configuration. Numbers that the file left out because
    they followed from others (the size of a head) are written where they follow no longer. Raises CompressError for a
    class that reads the result otherwise."""
    config_json = dict(written)
    wanted = json.loads(config.to_json_string(use_diff=False))
    for key, (before, after) in changed.items():
        if isinstance(config_json.get(key), dict) and isinstance(before, dict) and isinstance(after, dict):
            config_json[key] = {
                **config_json[key],
                **{of: value for of, value in after.items() if before.get(of) != value},
            }
        else:
            config_json[key] = after
    for other, own in getattr(config, "attribute_map", {}).items():
        if own in changed:
            config_json.pop(other, None)  # another name of the same key, which the file may use
    try:
        read = json.loads(type(config).from_dict(dict(config_json)).to_json_string(use_diff=False))
    except Exception:  # noqa: BLE001 - a number may be missing that followed from changed ones
        read = {}
    config_json |= {key: value for key, value in wanted.items() if key not in OF_WRITING and read.get(key) != value}
    again = json.loads(type(config).from_dict(dict(config_json)).to_json_string(use_diff=False))
    if odd := [key for key in changed if again.get(key) != wanted[key]]:
        raise CompressError(f"{type(config).__name__} reads {odd[0]} {wanted[odd[0]]} as {again.get(odd[0])}")
    return config_json


def differences(config: PretrainedConfig, other: PretrainedConfig) -> dict[str, tuple[Any, Any]]:
    """{key: (value, the other's value)} of what two configurations of one class say differently."""
    one, two = (json.loads(each.to_json_string(use_diff=False)) for each in (config, other))
    return {key: (one.get(key), two.get(key)) for key in one.keys() | two.keys() if one.get(key) != two.get(key)}


# Keys that are not of the model.
OF_WRITING = (NAMING, "transformers_version", "dtype", "_name_or_path", "architectures", "torch_dtype")


def quantization_config(
    layers: Mapping[str, Scheme],
    model: nn.Module,
    tables: Sequence[Table] = (),
    caches: Mapping[str, Any] = MappingProxyType({}),
    names: DiskNames | None = None,
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """The `quantization_config` of layers with these schemes: in the words of compressed-tensors, or in our own where
    it cannot express a scheme. tables: those of the layers that are token tables; caches: what it says about key-value
    caches; names: in the files; beside: in the files, of matrices that are kept with the model."""
    on_disk = (names or DiskNames()).on_disk
    # Modules that share int8 rows are targets, too: their weights are decompressed under their own names.
    shared = {n: layers[t.name] for t in tables if isinstance(layers[t.name].codes, Int8Table) for n in t.shared}
    layers = {**layers, **shared}
    stored = {on_disk(name): scheme for name, scheme in layers.items()}
    beyond = own_config.CACHES in caches or any(why_not(scheme) for scheme in layers.values())
    ours = beyond or bool(unknown_to_others(model, layers))
    config = own_config.groups_of(stored) if ours else _compressed_tensors(stored, model, on_disk, beside)
    return {**config, **caches}


def unknown_to_others(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Those of the layers that other readers do not find in their model, or do not know as codes."""
    apart = tuple(f"{name}." for name, module in model.named_modules() if is_apart(module))
    return [name for name in layers if name.startswith(apart)]


def _compressed_tensors(
    layers: Mapping[str, Scheme], model: nn.Module, on_disk: Callable[[str], str], beside: Sequence[str]
) -> dict[str, Any]:
    by_entry: dict[str, list[str]] = {}
    for name, scheme in layers.items():
        by_entry.setdefault(json.dumps(group_entry(scheme), sort_keys=True), []).append(name)
    linears = [on_disk(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    asked = _asked_by_vllm(model, on_disk)
    groups = {}
    for i, (entry, names) in enumerate(sorted(by_entry.items())):
        if len(by_entry) == 1 and set(names) & set(linears):
            targets = ["Linear", *sorted(set(names) - set(linears))]
        else:
            targets = sorted({*names, *(alias for name in names for alias in asked.get(name, ()))})
        groups[f"group_{i}"] = {"targets": targets, **json.loads(entry)}
    layouts = {layout_of(scheme) for scheme in layers.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(layouts) > 1 else next(iter(layouts), "dense"),
        "quantization_status": "compressed",
        # Routers are linear layers in engines, whatever they are here.
        "ignore": sorted({*linears, *map(on_disk, gates(model)), *beside} - set(layers)),
        "config_groups": groups,
    }


def _asked_by_vllm(model: nn.Module, on_disk: Callable[[str], str]) -> dict[str, list[str]]:
    """{name in the files of a layer of the first expert of a list: its names for vLLM}, where these differ: vLLM asks
    for the scheme of a list by the names gate_proj, up_proj and down_proj, whatever the files call these layers."""
    aliases: dict[str, list[str]] = {}
    for name, experts in model.named_modules():
        if isinstance(experts, Experts) and experts.has_gate and experts.leaves != LEAVES:
            for leaf, asked in zip(experts.leaves, LEAVES, strict=True):
                first = on_disk(f"{name}.{experts.numbers[0]}")
                aliases[f"{first}.{leaf}"] = [f"{first}.{asked}"]
    return aliases
