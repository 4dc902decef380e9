"""Families of transformers in mlx-lm 0.32.2: which it computes as transformers does, and what it reads of config.json.

Small random models of each were run in mlx-lm and in transformers, on texts longer than their windows.
"""

from collections.abc import Iterator
from typing import Any

from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source
from compress.checkpoint.windows import FULL, LOCAL, missing_window, window_period

VERSION = "mlx-lm 0.32.2"
ROTARY = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
# Families whose mixtures it computes from stacks of experts. It makes two matrices of DeepSeek's `kv_b_proj` as it
# loads, and rounds them again.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe")
# Families that it computes, those that scale rotary positions first. It has files for Apertus, BitNet, Falcon-H1, GLM,
# GPT-BigCode, GPT-NeoX, LFM2, Mamba 2, MiniCPM3, NanoChat, Nemotron-H and OLMo, too: these read other entries or
# tensors than transformers 5 writes, or compute other numbers.
SCALED: tuple[str, ...] = ("llama", "mistral", "ministral3", "qwen2", "qwen3", "olmo2", "olmo3", "olmoe", "exaone4")
SCALED += ("gemma3_text", "granite", "seed_oss", "smollm3")
PLAIN: tuple[str, ...] = ("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "glm4", "gptj", "helium", "mamba", "phi")
PLAIN += ("stablelm", "starcoder2", *MIXTURES)
# {model_type: the ways to scale rotary positions that it computes}.
KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
RUNS: dict[str, tuple[str, ...]] = {**dict.fromkeys(PLAIN, ()), **dict.fromkeys(SCALED, KINDS)}
RUNS |= {"gemma4_text": (*KINDS, "proportional"), "phi3": ("longrope",)}
RUNS |= {"hunyuan_v1_dense": ("dynamic",), "nemotron": ("linear",)}
# It has a file for these; nobody has run it.
UNTRIED: tuple[str, ...] = ("exaone", "internlm2", "internlm3", "minicpm", "mimo", "mistral3", "openelm", "plamo")
UNTRIED += ("plamo2", "qwen", "qwen2_vl", "qwen3_vl", "recurrent_gemma")
# Families with windows in all layers but each nth, and in some of `layer_types`. Llama's file, which runs Mistral, has
# windows in some layers, too, but Mistral has them in all.
PERIODIC, SOME = ("gemma3_text", "cohere2"), ("exaone4", "olmo3", "smollm3", "gemma4_text")


def why_not_family(model: Source) -> list[str]:
    """Reasons why mlx-lm would compute something else, each the end of a sentence about the model."""
    family, config = model.config["model_type"], read_config(model)
    kind = (model.config.get("architectures") or [None])[0]
    if family in UNTRIED:
        return []
    if family not in RUNS or not (kind is None or kind.endswith("ForCausalLM")):
        return [f"it is a {kind or family}, which {VERSION} does not run, or not as transformers does"]
    full, local = _rope(config)
    for rope, kinds in ((full, RUNS[family]), (local, RUNS[family] if local is full else ())):
        if (found := rope.get("rope_type", "default")) not in ("default", *kinds):
            return [f"its rotary positions are scaled by {found!r}, which mlx-lm's {family} does not compute"]
    if family == "olmo3" and full["rope_theta"] != local["rope_theta"]:
        return ["its layers with a window have another rope_theta; mlx-lm's olmo3 has one for all"]
    types = getattr(config, "layer_types", None) or []
    if family in PERIODIC and window_period(types) is None:
        return [f"its layers with a window are not all but each nth; mlx-lm's {family} has no others"]
    if family in SOME and LOCAL in types and FULL not in types:
        return [f"all its layers have a window; mlx-lm's {family} has one without"]
    return []


def notes_of(model: Source) -> Iterator[str]:
    """A line for each property of the model that mlx-lm leaves out."""
    family, config = model.config["model_type"], read_config(model)
    if family in UNTRIED:
        yield f"{VERSION} was not tried with this family ({family}): compare its answers with `compress generate`"
    elif family not in (*PERIODIC, *SOME) and (line := missing_window(config, f"mlx-lm's {family}")) is not None:
        yield line
    rope, _ = _rope(config)
    if rope.get("rope_type") == "longrope" and rope["short_factor"] != rope["long_factor"]:
        yield (
            f"logits of texts of up to {rope['original_max_position_embeddings']} tokens will differ: mlx-lm takes "
            "rope's long_factor for them, transformers its short_factor"
        )


def config_for(model: Source) -> dict[str, Any]:
    """config.json with what mlx-lm reads under other names than transformers 5: it takes its defaults without them, or
    refuses the model."""
    stored, family, config = model.config, model.config["model_type"], read_config(model)
    older = {old: stored[new] for old, new in config.attribute_map.items() if new in stored}
    full, local = _rope(config)
    types: list[str] = getattr(config, "layer_types", None) or []
    windows: dict[str, Any] = {}
    if "rope_theta" in full and family != "gemma4_text":  # which reads rope_parameters
        kind = full.get("rope_type", "default")
        older |= {key: full[key] for key in ROTARY if key in full}
        older["rope_scaling"] = None if kind == "default" else {"type": kind, **full}
    if family == "gemma3_text":
        older["rope_local_base_freq"] = local["rope_theta"]
    if family in PERIODIC:
        windows["sliding_window_pattern"] = window_period(types)
    if family == "exaone4":
        older["head_dim"] = config.hidden_size // config.num_attention_heads
        letters = "".join("L" if each == LOCAL else "G" for each in types)
        windows["sliding_window_pattern"] = letters if "L" in letters else None
    return {**older, **stored, **windows}


def _rope(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary parameters of layers that see all, and of those with a window; the same where all have one."""
    found = getattr(config, "rope_parameters", None) or {}
    return found.get(FULL, found), found.get(LOCAL, found)
