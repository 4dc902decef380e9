"""Try the architectures of transformers: a tiny random model of each, through 4-bit GPTQ and 8-bit weights and inputs.

    python recipes/studies/architectures.py --json OUT.json [--only NAME ...] [--tasks causal masked ...]

Of each class: it is made small by its configuration's own names, quantized from its directory, loaded, and computed on
its codes and on their dequantized values, which must agree. A row says "works" (all linear layers in codes), "partly"
(with what stays dense, and why) or "refused" (in which words); "not tried" where no small model was made. Rows already
in the file are not computed again; `--only` computes them anew.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import compress
from compress.errors import CompressError, InputError, first_line
from compress.recipes.studies.figures import asked, made_by, stored

TASKS: dict[str, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
# Sizes by the names that configurations have for them.
WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "projection_dim", "embedding_size")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTHS, 32),
    **dict.fromkeys(DEPTHS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(INNER, 64),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "image_size": 32,
    "patch_size": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "state_size": 8,
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
}
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")  # an entry for each layer
MOST = 3_000_000  # parameters
PLAIN: dict[str, Any] = {"drift": 1.0, "clip": False, "refit": 0, "sweeps": 0, "shrink": False}
METHODS = {
    "w4a16 gptq": lambda: compress.GPTQ(scheme="w4a16", group_size=-1, **PLAIN),
    "w8a8 rtn": lambda: compress.RTN(scheme="w8a8"),
}
USUAL = ("embedding", "output head", "router or gate of experts")
AGREE = 1e-2  # of the outputs' deviation


def shrunk(config: Any, depth: int = 0) -> Any:
    """A configuration with small sizes, and those inside it."""
    for name, size in SIZES.items():
        if isinstance(vars(config).get(name), type(size)):
            setattr(config, name, size)
    if getattr(config, "kv_lora_rank", None) and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads
    layers = getattr(config, "num_hidden_layers", None)
    for name in LISTS:
        if isinstance(vars(config).get(name), list) and isinstance(layers, int):
            setattr(config, name, vars(config)[name][:layers])
    for inner in list(vars(config).values()):
        if isinstance(inner, transformers.PretrainedConfig) and depth < 3:
            shrunk(inner, depth + 1)
    return config


def tiny(model_type: str, kind: str) -> nn.Module:
    """A small random model of a class, or any error of transformers'."""
    config = shrunk(transformers.AutoConfig.for_model(model_type))
    config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "model_type"})
    make = getattr(transformers, kind)
    with torch.device("meta"):
        if sum(p.numel() for p in make(config).parameters()) > MOST:
            raise ValueError("its configuration has sizes under other names")
    torch.manual_seed(0)
    model: nn.Module = make(config).eval()
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, 0, 0.1)
    return model


def inputs_of(model: Any, task: str) -> dict[str, Tensor]:
    """A batch that a model of a task takes."""
    random = torch.Generator().manual_seed(0)
    main = model.main_input_name
    if main == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        side = size if isinstance(size, int) else 32
        return {main: torch.randn(4, getattr(model.config, "num_channels", 3), side, side, generator=random)}
    if main == "input_values":
        return {main: torch.randn(2, 4000, generator=random)}
    if main == "input_features":
        return {main: torch.randn(2, getattr(model.config, "num_mel_bins", 80), 200, generator=random)}
    ids = torch.randint(2, 100, (4, 24), generator=random)
    return {"input_ids": ids, "decoder_input_ids": ids} if task == "seq2seq" else {"input_ids": ids}


def tried(folder: Path, method: str, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The result of a method on the model in a folder."""
    out = folder.parent / method.split()[0]
    try:
        made = compress.quantize(folder, METHODS[method](), calibration=[dict(batch)], output=out, verify=False)
        with torch.no_grad():
            found = compress.load(out)(**batch)[0]
            if method.startswith("w4"):
                expected = compress.load(out, dequantize=True)(**batch)[0]
                off = float((found - expected).abs().max() / expected.std())
                if off > AGREE:
                    return {"result": "wrong", "off": off}
    except (InputError, CompressError) as error:
        return {"result": "refused", "why": str(error).replace(str(folder), "MODEL").replace(str(out), "OUT")}
    assert made.record.coverage is not None
    dense = sorted({why.partition(":")[0] for why in made.record.left_alone.values()} - {*USUAL})
    share = round(made.record.coverage.share, 3)
    return {"result": "partly" if dense else "works", "share": share, **({"dense": dense} if dense else {})}


def row(task: str, model_type: str, kind: str) -> dict[str, Any]:
    """The results of an architecture."""
    about = {"task": task, "model_type": model_type, "class": kind}
    try:
        model = tiny(model_type, kind)
        batch = inputs_of(model, task)
        with torch.no_grad():
            model(**batch)
    except Exception as error:  # noqa: BLE001 - whatever transformers finds wrong with a small one
        return {**about, "not tried": f"{type(error).__name__}: {first_line(error)}"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model.save_pretrained(folder)  # type: ignore[operator]
        results = {}
        for method in METHODS:
            try:
                results[method] = tried(folder, method, batch)
            except Exception as error:  # noqa: BLE001 - what this is to find
                results[method] = {"result": "fails", "why": f"{type(error).__name__}: {first_line(error)}"}
    return {**about, **results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="model types")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS])
    said = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = {(r["task"], r["model_type"]): r for r in stored(said.json)}
    for task in said.tasks:
        for model_type, kinds in getattr(modeling_auto, TASKS[task]).items():
            kind = kinds if isinstance(kinds, str) else kinds[0]
            if (said.only and model_type not in said.only) or (not said.only and (task, model_type) in rows):
                continue
            found = rows[task, model_type] = row(task, model_type, kind)
            shown = found.get("not tried") or {method: found[method] for method in METHODS}
            print(task, model_type, shown, flush=True)
            made = {**made_by(), "command": asked(__file__), "rows": [*rows.values()]}
            said.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
