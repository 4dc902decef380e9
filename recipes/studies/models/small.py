"""A small random model of a class of transformers, and a batch that it takes.

Nothing here knows an architecture by name. A configuration is cut in depth, one layer of each kind kept, and in width,
by the names that sizes usually have or by dividing all sizes by a number, which keeps sums and products of them equal.
Of these ways the first is taken whose model is small and computes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.errors import first_line
from compress.model.convolution import is_convolution
from compress.model.layers import is_linear
from compress.recipes.studies.models.batches import batches_of

Settings = dict[str, Any]  # of a configuration, those of the configurations inside it nested
MOST = (3_000_000, 24_000_000)  # parameters: preferred, allowed
LARGER = 6  # ways with more than the preferred parameters, the smallest first
DROPPED = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names")  # follow from the depth
VOCABULARY = 128
SPECIAL = 100  # ids from here on are those of special tokens: no batch of text has them
LENGTH = 64  # positions

# Sizes by the names that configurations have for them.
WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "projection_dim", "embedding_size")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
HEAD_WIDTHS = ("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim")
NAMED: dict[str, int] = {
    **dict.fromkeys(WIDTHS, 32),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(INNER, 64),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(HEAD_WIDTHS, 8),
    "num_key_value_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "state_size": 8,
}
STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}  # of networks for images, with the usual names
# Values that are small whatever the way, where they are larger.
CAPS: dict[str, float] = {
    **dict.fromkeys((*EXPERTS, "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("zero_expert_num",), 4),
    **dict.fromkeys(("first_k_dense_replace", "num_kv_shared_layers", "attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "layer_group_size"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), LENGTH),
    "depth_coefficient": 1.0,
    "mm_tokens_per_image": 4,
}
FIRST_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
FILLED: dict[str, Any] = {
    **NAMED,
    **dict.fromkeys(FIRST_IDS, 0),
    **dict.fromkeys(("num_experts_per_tok", "indexer_n_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "indexer_kv_heads"), 1),
    "vocab_size": VOCABULARY,
    "indexer_budget": 16,
    "indexer_head_dim": 8,
    "indexer_compress_ratio": 4,
    "attn_layer_indices": [1],
}
ID = re.compile(r"token_(id|index)$|_token$")
DEPTH = re.compile(r"^(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(en|de)coder_layers|num_blocks)$")
REPEATS = re.compile(r"depths$|repeats$|^layers$|num_stage_layers|^num_conv_(pos_)?layers$|num_layers_per")
COUNT = re.compile(r"heads|(^|_)n_?head|groups")
HEAD_WIDTH = re.compile(r"head_(dim|size|width)|(d|dim)_(head|kv|qk)$|rotary_dim|key_dim$")
WIDTH = re.compile(
    r"hidden|embd|embed|inner|inter|ffn|dim|width|(?<!batch_)(?<!image_)(?<!patch_)(?<!kernel_)size|d_model|channels|rank|"
    r"feature|units|proj|latents|filter"
)
KEPT = re.compile(r"kernel|stride|dilation|pad|patch|image|max_|label|num_channels|window|chunk|version|d_conv")
SMALL = 16  # no width is divided below this
LEAST = 4  # nor one of a head below this
FACTORS = (32, 16, 64, 8, 4, 2, 1)
BY_HEADS = (4, 8, 2, 1)
DEPTHS = (2, 4, 8)


def small(kind: Any, task: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small random model of a class and a batch of a task; ValueError says what stood against the way that came
    farthest."""
    against: list[tuple[int, str]] = []
    larger: dict[int, Any] = {}
    seen: list[Settings] = []
    for settings in ways(kind.config_class().to_dict(), task):
        if settings in seen:
            continue
        seen.append(settings)
        stage = 0
        try:
            config = kind.config_class.from_dict(settings)
            stage = 1
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(config).parameters())
            if size <= MOST[0]:
                stage = 2
                model = random(kind, config)
                return model, runs(model, task)
            if size <= MOST[1]:
                larger.setdefault(size, config)
            against.append((stage, f"{size} parameters: its configuration has sizes under other names"))
        except Exception as error:  # noqa: BLE001 - whatever transformers finds wrong with a small one
            against.append((stage, f"{type(error).__name__}: {first_line(error)}"))
    for size in sorted(larger)[:LARGER]:
        try:
            model = random(kind, larger[size])
            return model, runs(model, task)
        except Exception as error:  # noqa: BLE001 - the same
            against.append((3, f"{type(error).__name__}: {first_line(error)}"))
    raise ValueError(max(against, key=lambda found: found[0])[1])


def random(kind: Any, config: Any) -> nn.Module:
    """A model with random weights, which all have something to say."""
    torch.manual_seed(0)
    model: nn.Module = kind(config).eval()
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, 0, p[0].numel() ** -0.5)
    return model


def runs(model: Any, task: str) -> dict[str, Tensor]:
    """The batch of a task on which a model calls most of its layers. A model that cannot make its cache has none."""
    said: Exception | None = None
    caches = bool(getattr(model.config, "use_cache", False))
    for caching in (True, False) if caches else (False,):
        if caches:
            model.config.use_cache = caching
        best: tuple[int, dict[str, Tensor]] | None = None
        for batch in batches_of(model, task):
            try:
                missed = uncalled(model, batch)
            except Exception as error:  # noqa: BLE001 - a batch for another kind of model
                said = said or error
                continue
            if best is None or missed < best[0]:
                best = missed, batch
            if not missed:
                break
        if best is not None:
            give_statistics(model, best[1])
            return best[1]
    assert said is not None
    raise said


def give_statistics(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Gives batch norms the statistics of a batch: with those of a new model, activations vanish or explode."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None  # the mean of what is seen
        norm.train()
    if norms:
        with torch.no_grad():
            model(**batch)
    model.eval()


def uncalled(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The number of linear layers and convolutions that a batch does not call."""
    left = {module for module in model.modules() if is_linear(module) or is_convolution(module)}
    hooks = [module.register_forward_hook(lambda module, *_: left.discard(module)) for module in left]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return len(left)


def ways(settings: Settings, task: str) -> Iterator[Settings]:
    """A configuration made small in one way after the other."""
    given = {k: v for k, v in settings.items() if k not in DROPPED}
    if task == "causal" and "is_decoder" in given:
        given["is_decoder"] = True
    for layers, fill in product(DEPTHS, (same, filled)):
        yield named(fill(shallow(given, layers)))
    for layers, fill, by, heads in product(DEPTHS, (same, filled), FACTORS, BY_HEADS):
        if heads <= by:
            yield divided(fill(shallow(given, layers)), by, heads)


def same(settings: Settings) -> Settings:
    """The settings as they are."""
    return settings


def filled(settings: Settings) -> Settings:
    """Settings with values where the default is to have none, which some classes do not compute with."""
    made = inside(settings, filled)
    for name, value in FILLED.items():
        if name in made and made[name] is None:
            made[name] = value
    layers = next((v for k, v in made.items() if DEPTH.search(k) and is_count(v)), 0)
    if "layer_types" in made and made["layer_types"] is None:
        made["layer_types"] = ["full_attention"] * layers
    if made.get("rope_parameters") == {}:
        rotary = {"rope_type": "default", "rope_theta": 10000.0}
        made["rope_parameters"] = dict.fromkeys(made.get("layer_types") or (), rotary) or rotary
    if made.get("languages") and not made.get("default_language"):
        made["default_language"] = made["languages"][0]
    return made


def inside(settings: Settings, change: Callable[[Settings], Settings]) -> Settings:
    """Settings whose nested configurations, and those of single layers, are changed."""
    made = {k: change(v) if isinstance(v, dict) and "model_type" in v else v for k, v in settings.items()}
    if made.get("per_layer_config"):
        made["per_layer_config"] = {at: change(v) for at, v in made["per_layer_config"].items()}
    return made


def shallow(settings: Settings, layers: int) -> Settings:
    """Settings of a model of few layers: the first of each kind, and more in their order up to this number."""
    made = inside(settings, lambda nested: shallow(nested, layers))
    depths = {k: v for k, v in made.items() if DEPTH.search(k) and is_count(v)}
    made |= {name: min(depth, layers) for name, depth in depths.items()}
    own = {int(at): v for at, v in (made.get("per_layer_config") or {}).items()}
    for depth in sorted(set(depths.values())):
        lists = {k: v for k, v in made.items() if isinstance(v, list | tuple) and len(v) == depth > layers}
        if not lists and not own:
            continue
        kinds = [str([*(v[at] for v in lists.values()), own.get(at)]) for at in range(depth)]
        first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        more = [at for at in range(depth) if at not in first]
        kept = sorted([*first, *more][: max(layers, len(first))])
        made |= {name: [v[at] for at in kept] for name, v in lists.items()}
        made |= {name: len(kept) for name, was in depths.items() if was == depth}
        if own:
            made["per_layer_config"] = {at: own[was] for at, was in enumerate(kept) if was in own}
    repeats = {k: v for k, v in made.items() if REPEATS.search(k) and isinstance(v, list | tuple)}
    return made | {name: [min(v, layers // 2) for v in value] for name, value in repeats.items() if all_counts(value)}


def named(settings: Settings) -> Settings:
    """Settings with small sizes by their usual names."""
    made = capped(inside(settings, named))
    made |= {name: size for name, size in NAMED.items() if is_count(made.get(name))}
    made |= {name: sizes for name, sizes in STAGES.items() if isinstance(made.get(name), list)}
    if made.get("kv_lora_rank") and "num_attention_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    return made


def divided(settings: Settings, by: int, heads: int) -> Settings:
    """Settings with all widths divided by a number, and all counts of heads by another."""
    made = capped(inside(settings, lambda nested: divided(nested, by, heads)))
    for name, value in made.items():
        if name in CAPS or KEPT.search(name) or ID.search(name) or "vocab" in name:
            continue
        by_name = ((HEAD_WIDTH, by // heads, LEAST), (COUNT, heads, 1), (WIDTH, by, SMALL))
        whole, least = next(((whole, least) for role, whole, least in by_name if role.search(name)), (1, 1))
        if is_count(value):
            made[name] = parts(value, whole, least)
        elif isinstance(value, list | tuple) and all_counts(value):
            made[name] = [parts(v, whole, least) for v in value]
    return made


def parts(value: int, by: int, least: int) -> int:
    """A size divided, if that leaves something of it."""
    return max(value // by, min(value, least)) if value > 1 else value


def capped(settings: Settings) -> Settings:
    """Settings with a small vocabulary, special tokens in it, and few experts and positions."""
    made = dict(settings)
    for name, most in CAPS.items():
        if isinstance(made.get(name), int | float):
            made[name] = min(made[name], most)
    for at, (name, value) in enumerate(sorted(made.items())):
        if "vocab" in name and is_count(value):
            made[name] = VOCABULARY if name.startswith("vocab_size") else min(value, VOCABULARY)
        elif name in FIRST_IDS and isinstance(value, int):
            made[name] = 0
        elif ID.search(name) and isinstance(value, int) and not isinstance(value, bool) and value >= SPECIAL:
            made[name] = SPECIAL + at % (VOCABULARY - SPECIAL)
    return made


def is_count(value: object) -> bool:
    """True for a positive whole number that is no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def all_counts(values: Sequence[object]) -> bool:
    """True for some positive whole numbers."""
    return bool(values) and all(map(is_count, values))
