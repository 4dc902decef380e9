"""What a checkpoint says of itself: its `quantization_config`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from compress.model.layers import Table
from compress.weights.compressed_tensors import group_entry
from compress.weights.scheme import Scheme


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
