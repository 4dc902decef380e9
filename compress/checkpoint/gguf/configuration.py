"""The configuration of transformers that a GGUF file describes: the inverse of `Architecture.keys`.

Every key of the file's family must be one that this configuration gives, with the same value: a model that llama.cpp
computes otherwise than transformers would is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.gguf.architectures import (
    FAMILIES,
    LARGEST,
    SIZES,
    WINDOWS,
    Architecture,
    rope_factors,
)
from compress.checkpoint.windows import FULL, LOCAL

Keys = Mapping[str, Any]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of every model that Meta has published
FACTORS = "rope_factors_{}.weight"
FREQUENCIES = "rope_freqs.weight"
WITHOUT_MEANING = ("rope.scaling.finetuned",)  # llama.cpp computes the same whatever they say
NEAR = 1e-5  # relative difference of numbers that are the same


def family_of(name: str, keys: Keys) -> tuple[str, Architecture]:
    """(Class of transformers, family) of a file. name: llama.cpp's, of the architecture. Raises InputError."""
    named = {kind: family for kind, family in FAMILIES.items() if family.name == name}
    fitting = [kind for kind, family in named.items() if family.copied.keys() <= keys.keys()]
    if not fitting:
        known = ", ".join(sorted({family.name for family in FAMILIES.values()}))
        lacking = next((min(family.copied.keys() - keys.keys()) for family in named.values()), None)
        what = f"of the family {name!r}" if lacking is None else f"a {name} without the key {name}.{lacking}"
        raise InputError(f"is {what}; readable: {known}; give the Hugging Face directory that it was made from")
    kind = max(fitting, key=lambda kind: len(named[kind].copied))
    return kind, named[kind]


def config_of(kind: str, family: Architecture, keys: Keys, tensors: Mapping[str, Tensor]) -> Any:
    """The configuration of a model of this class. keys: of the family, without its prefix. tensors: of the file, by
    their names. Raises CheckpointError for a key that is missing, InputError for one that says what transformers does
    not compute."""
    cls = getattr(transformers, kind).config_class
    default = cls()
    keys = {"vocab_size": len(tensors["token_embd.weight"]), **keys} if "token_embd.weight" in tensors else keys
    if missing := [key for key in (*SIZES, "feed_forward_length", family.epsilon) if key not in keys]:
        raise CheckpointError(f"lacks the key {family.name}.{missing[0]}")
    entries = {entry: keys[key] for key, entry in {**SIZES, **family.copied}.items()}
    entries |= {entry: None for entry in entries if entries[entry] == 0 and getattr(default, entry, 0) is None}
    entries[family.norm] = _decimal(keys[family.epsilon])
    entries |= {entry: _decimal(keys[key]) for key, entry in family.copied.items() if isinstance(keys[key], float)}
    entries["intermediate_size" if hasattr(default, "intermediate_size") else "n_inner"] = keys["feed_forward_length"]
    entries |= _attention(family, keys, default, tensors)
    if hasattr(default, "rope_parameters"):
        entries["rope_parameters"] = _rope(family, keys, default, tensors, entries)
        if hasattr(default, entry := "original_max_position_embeddings"):
            entries[entry] = keys.get("rope.scaling.original_context_length", keys["context_length"])
    entries |= {
        entry: wanted for entry, wanted in family.needs.items() if (getattr(default, entry, wanted) or 0) != wanted
    }
    entries["tie_word_embeddings"] = "output.weight" not in tensors
    try:
        config = cls(**{cls.attribute_map.get(entry, entry): value for entry, value in entries.items()})
    except Exception as error:  # noqa: BLE001 - whatever transformers finds wrong
        raise CheckpointError(f"describes no {kind} ({error})") from None
    _check(family, config, keys, tensors)
    return config


def _attention(family: Architecture, keys: Keys, default: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The entries of heads, windows and biases."""
    hidden, heads = keys["embedding_length"], keys["attention.head_count"]
    size = keys.get("attention.key_length", hidden // heads)
    entries: dict[str, Any] = {}
    if hasattr(default, "num_key_value_heads"):
        entries["num_key_value_heads"] = keys.get("attention.head_count_kv", heads)
    if family.copied.get("attention.key_length") is not None:  # of latent attention
        rotated = keys["rope.dimension_count"]
        entries |= {"qk_rope_head_dim": rotated, "qk_nope_head_dim": size - rotated}
    elif hasattr(default, "head_dim") or size != hidden // heads:
        entries["head_dim"] = size
    if hasattr(default, "query_pre_attn_scalar"):
        largest = keys["block_count"] == LARGEST.get(family.name)
        entries["query_pre_attn_scalar"] = hidden // heads if largest else size
    if family.name in WINDOWS:
        entries["sliding_window"] = keys.get("attention.sliding_window")
    for entry in ("attn_logit_softcapping", "final_logit_softcapping"):
        entries |= {entry: keys.get(entry)} if hasattr(default, entry) else {}
    for entry, tensor in {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}.items():
        entries |= {entry: f"blk.0.{tensor}.bias" in tensors} if hasattr(default, entry) else {}
    return entries


def _rope(
    family: Architecture, keys: Keys, default: Any, tensors: Mapping[str, Tensor], entries: Mapping[str, Any]
) -> dict[str, Any]:
    """The rotary parameters."""
    own = default.rope_parameters
    kind = keys.get("rope.scaling.type", "none")
    kind = "longrope" if FACTORS.format("long") in tensors else "llama3" if FREQUENCIES in tensors else kind
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    if own.get("rope_type") == kind:  # what no key says
        rope |= own
    rope["rope_theta"] = _decimal(keys.get("rope.freq_base", 10000.0))
    size = entries.get("head_dim", keys["embedding_length"] // keys["attention.head_count"])
    rotated = keys.get("rope.dimension_count", size)
    if family.partial:
        rope["partial_rotary_factor"] = rotated / size
    named = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    named |= {f"yarn_{key}": key for key in ("beta_fast", "beta_slow")}
    rope |= {
        entry: _decimal(keys[f"rope.scaling.{key}"]) for key, entry in named.items() if f"rope.scaling.{key}" in keys
    }
    if (factor := keys.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), _decimal(10 * factor))
    if kind == "longrope":
        rope |= {f"{each}_factor": tensors[FACTORS.format(each)].tolist() for each in ("long", "short")}
    if kind == "llama3":
        rope |= _llama3(tensors[FREQUENCIES], rope["rope_theta"])
    if FULL not in own:
        return rope
    local = {**own[LOCAL], "rope_theta": _decimal(keys.get("rope.freq_base_swa", own[LOCAL]["rope_theta"]))}
    return {FULL: rope, LOCAL: local}


def _llama3(factors: Tensor, theta: float) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, from what it divides frequencies by: [pairs], 1 for short waves, the factor
    for long ones, and between these what tells how long the first context was."""
    factor = float(factors.max())
    pairs = torch.arange(len(factors), dtype=torch.float64)
    waves = 2 * math.pi * theta ** (pairs / len(factors))
    between = (factors > 1) & (factors < factor)
    smooth = (1 / factors.double() - 1 / factor) / (1 - 1 / factor)
    low, high = LLAMA3.values()
    length = ((smooth * (high - low) + low) * waves)[between]
    return {**LLAMA3, "factor": factor, "original_max_position_embeddings": round(float(length.median()))}


def _check(family: Architecture, config: Any, keys: Keys, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError unless the family's keys of this configuration are those of the file."""
    if reasons := family.why_not(config):
        raise InputError(f"is no {family.name} that can be read: {reasons[0]}")
    made = family.keys(config)
    for key, value in keys.items():
        if key in WITHOUT_MEANING:
            continue
        known = made.get(key)
        same = (
            isinstance(value, int | float)
            and isinstance(known, int | float)
            and math.isclose(value, known, rel_tol=NEAR)
        )
        if known != value and not same:
            said = "is not known here" if known is None else f"is {value}; a {family.name} is read that has {known}"
            raise InputError(f"cannot be read: its key {family.name}.{key} {said}")
    for name, factors in rope_factors(config).items():
        if not torch.allclose(factors, tensors[name].float(), rtol=NEAR):
            raise InputError(f"cannot be read: its {name} is not Llama 3's way to scale rotary positions")


def _decimal(number: float) -> float:
    """The shortest decimal that is this number in float32: 1e-05 of 9.999999747e-06."""
    return number if isinstance(number, int) else float(str(np.float32(number)))
