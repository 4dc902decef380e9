"""Models whose steps run in one call, beside the same models with the forwards of their blocks."""

import copy

import torch
import transformers
from models import FAMILIES, GATED, strong, tokens
from torch import nn

import compress
from compress.inference.steps.block import STATE, installed_steps

NEW = 12
BOUND = {torch.float32: 1e-5, torch.bfloat16: 0.04}  # of logits, relative to the largest
OF_HEADS = {name: size for name, size in GATED.items() if name != "head_dim"} | {"pad_token_id": 0}
WHOLE = GATED | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE = {
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**OF_HEADS)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**OF_HEADS, eos_token_id=2)),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**WHOLE)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **WHOLE, sliding_window=4, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
        )
    ),
    "smollm3": lambda: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**WHOLE, no_rope_layers=[1, 0])),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**WHOLE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**WHOLE, residual_multiplier=0.5)),
    "olmo_clipped": lambda: transformers.OlmoForCausalLM(transformers.OlmoConfig(**OF_HEADS, clip_qkv=20.0)),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**WHOLE)),
}


def stepping(folder, kind="llama", dtype=torch.float32, what=None, ignore=(), **options):
    """A loaded model of a family, in codes of 4 bits, or as a pass says."""
    FAMILIES.update(MORE)
    made = what or compress.RTN(group_size=32)
    compress.quantize(strong(kind), made, output=folder / kind, ignore=ignore, verify=False)
    return compress.load(folder / kind, dtype, **options).eval()


def unfused(model: nn.Module) -> nn.Module:
    """A copy whose blocks keep their own forwards."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if module.__dict__.pop(STATE, None) is not None:
            del module.forward
    return plain


def known(model: nn.Module) -> int:
    """Blocks whose steps run in one call."""
    return sum(steps.known is not None for _, steps in installed_steps(model))


def reasons(model: nn.Module) -> set[str]:
    """Why blocks are left to their own forwards."""
    return {steps.why_not for _, steps in installed_steps(model) if steps.why_not}


def answer(model: nn.Module, **asked):
    """(Tokens, logits) of a greedy answer to a batch with padding on the left."""
    ids = tokens(3, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    said = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | asked
    found = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **said)
    return found.sequences, torch.stack(found.logits)


def assert_same_answers(model: nn.Module, other: nn.Module, **asked) -> None:
    """Equal tokens, and logits that are equal but for the order of sums."""
    (said, logits), (expected, wanted) = answer(model, **asked), answer(other, **asked)
    bound = BOUND[model.dtype] * float(wanted.abs().max())
    torch.testing.assert_close(logits, wanted, rtol=0, atol=bound)
    assert torch.equal(said, expected)
