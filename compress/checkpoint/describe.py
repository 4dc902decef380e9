"""What a checkpoint says of itself: its configuration, and the `quantization_config` in it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from compress.checkpoint.shown import shown
from compress.checkpoint.source import Source
from compress.model.layers import Table
from compress.weights.compressed_tensors import group_entry
from compress.weights.scheme import Scheme


def configuration(model: Any, source: Source | None) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """A model's configuration (None for one that has none), and {file: content} of what goes beside it.

    source: where the model was read, with its files beside it; None for one that was given in memory.
    """
    config: dict[str, Any] | None = None
    companions: dict[str, str] = {}
    if source is not None:
        config = dict(source.config)
    elif hasattr(model, "config"):
        config = json.loads(model.config.to_json_string(use_diff=True))
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            companions["generation_config.json"] = generation.to_json_string()
    if config is not None and isinstance(config.get("_name_or_path"), str):
        config["_name_or_path"] = shown(config["_name_or_path"])
    return config, companions


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
