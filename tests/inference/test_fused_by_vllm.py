"""What `--for vllm` leaves, computed as vLLM does once it has made one layer of q, k and v, of gate and up, and of a
block's experts: equal to what `compress.load` computes."""

from collections.abc import Callable
from pathlib import Path

import mixtures
import pytest
import torch
import transformers
from combinations import each
from commands import command, fast_gptq, make_llama
from models import tokens
from safetensors.torch import load_file, save_file
from torch import nn
from vllm_loader import VLLMError, model_in_vllm

import compress
from compress.base.errors import InputError
from compress.inference.layers.compressed_layers import compressed_layers
from compress.jobs.target_engines import ENGINES
from compress.passes.protocol.base import Pass

SCHEMES = ENGINES["vllm"].schemes
GPTQ = fast_gptq(scheme="nvfp4a16")
# Every other way to NVFP4: by statistics, behind folds and pruning, in two passes, trained, in a rotated basis.
METHODS: dict[str, list[Pass]] = {
    "gptq": [GPTQ],
    "awq": [compress.AWQ(scheme="nvfp4a16")],
    "smoothquant": [compress.SmoothQuant(scheme="nvfp4")],
    "pruned": [compress.Wanda(pattern="2:4"), compress.RTN(scheme="nvfp4a16")],
    "one by gptq": [
        compress.only(GPTQ, "*.q_proj", "*.up_proj"),
        compress.but(compress.RTN(scheme="nvfp4a16"), "*.q_proj", "*.up_proj"),
    ],
    "trained": [compress.RTN(scheme="nvfp4a16"), compress.Train(steps=1, rows=2, held_out=0.0)],
    "rotated": [compress.Rotation(), compress.RTN(scheme="nvfp4a16")],
}
# Numbers of which an engine takes one for several layers.
FIXED = [
    ("fp8", {"per_tensor": True}),
    ("fp8", {"activations": "static"}),
    ("fp8", {"per_tensor": True, "activations": "static"}),
    ("w8a8", {"activations": "static"}),
    ("w8a8", {"activations": "static", "activation_grid": "asymmetric"}),
]
WIDE = {"hidden_size": 128, "intermediate_size": 128}
ALL = {"num_experts_per_tok": 4}  # no token is routed otherwise for a difference of rounding
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 64, "moe_intermediate_size": 128, "topk_group": 2}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: make_llama(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_key_value_heads=4),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **WIDE, vocab_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
        )
    ),
    "mixtral": lambda: mixtures.made("mixtral", **WIDE, **ALL, num_hidden_layers=1),
    "deepseek-v3": lambda: mixtures.made("deepseek-v3", **WIDE, **ALL, **LATENT),
    "qwen3-moe": lambda: mixtures.made(
        "qwen3-moe", **WIDE, **ALL, num_hidden_layers=1, head_dim=64, moe_intermediate_size=128
    ),
}
REFUSED_FAMILIES = {"gpt-oss": lambda: mixtures.made("gpt-oss", num_hidden_layers=1)}
NARROW = ("v_proj.weight", "up_proj.weight", "kv_a_proj_with_mqa.weight")
DENSE, MIXED = "llama", "mixtral"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Finds a model of a family, float32, whose fused parts have ranges far apart."""
    folder = tmp_path_factory.mktemp("fused")

    def find(family: str) -> Path:
        if not (folder / family).exists():
            model = (FAMILIES | REFUSED_FAMILIES)[family]()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name.endswith(NARROW):
                        p.mul_(0.1)
                    if name.endswith("experts.gate_up_proj"):
                        p[:, p.shape[1] // 2 :].mul_(0.1)
            model.save_pretrained(folder / family)
        return folder / family

    return find


def agree(out: Path, logits: bool) -> None:
    """Every layer of `compress.load` returns what vLLM's would for the same input. logits: all of them together, too,
    where no rounding of an input can make more of the last bit."""
    ours, theirs, ids = compress.load(out, torch.float32), model_in_vllm(out), tokens(2) % 90
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, layer in compressed_layers(ours):
        layer.register_forward_hook(lambda _, given, made, name=name: seen.update({name: (given[0], made)}))
    with torch.no_grad():
        said, expected = ours(ids).logits, theirs(ids).logits
        assert len(seen) >= 4
        for name, (x, made) in seen.items():
            wanted = theirs.get_submodule(name)(x)
            torch.testing.assert_close(made, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()), msg=name)
    if logits:
        torch.testing.assert_close(said, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def check(family: str, models: Callable[[str], Path], out: Path, what: Pass | list[Pass]) -> None:
    compress.quantize_for("vllm", models(family), what, output=out, calibration=tokens(4) % 90, verify=False)
    last = what[-1] if isinstance(what, list) else what
    agree(out, logits=getattr(last, "scheme", "a16").endswith("a16"))


CASES = each(SCHEMES, [*FAMILIES])
REST = [(scheme, family) for scheme in SCHEMES for family in FAMILIES if (scheme, family) not in CASES]


@pytest.mark.parametrize(
    ("scheme", "family"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_what_vllm_multiplies_by_is_what_was_decided(scheme, family, models, tmp_path):
    check(family, models, tmp_path / "out", compress.RTN(scheme=scheme))


@pytest.mark.parametrize(("family", "fixed"), [*((DENSE, f) for f in FIXED), *((MIXED, f) for f in FIXED[:3])])
def test_one_scale_of_what_vllm_has_one_for(family, fixed, models, tmp_path):
    scheme, options = fixed
    check(family, models, tmp_path / "out", compress.RTN(scheme=scheme, **options))


@pytest.mark.first
@pytest.mark.parametrize(("method", "family"), each([*METHODS], [DENSE, MIXED]))
def test_every_way_to_nvfp4_shares_its_global_scale(method, family, models, tmp_path):
    check(family, models, tmp_path / "out", METHODS[method])


Refused = tuple[str, list[Pass], str]
REFUSED: dict[str, Refused] = {
    "experts of gpt-oss": ("gpt-oss", [compress.RTN(scheme="w8a16", group_size=-1)], "compress export --to dense"),
    "fixed int8 inputs of experts": (
        MIXED,
        [compress.RTN(scheme="w8a8", activations="static")],
        "give activations=dynamic or --scheme fp8",
    ),
    "an int8 cache": (DENSE, [compress.RTN(scheme="fp8"), compress.KVCache(type="int8")], "give --kv-cache fp8:tensor"),
    "several schemes": (
        DENSE,
        [
            compress.but(compress.RTN(scheme="w4a16"), "*.k_proj"),
            compress.only(compress.RTN(scheme="w8a16"), "*.k_proj"),
        ],
        "give all of them one scheme",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_vllm_does_not_load_is_refused_with_the_alternative(what, models, tmp_path):
    family, passes, says = REFUSED[what]
    with pytest.raises(InputError, match=says.replace("*", r"\*")):
        compress.quantize_for("vllm", models(family), passes, output=tmp_path / "for", calibration=tokens())
    compress.quantize(models(family), passes, output=tmp_path / "out", calibration=tokens(12) % 90, verify=False)
    with pytest.raises(VLLMError):
        model_in_vllm(tmp_path / "out")


def test_a_checkpoint_of_several_global_scales_is_named(models, tmp_path):
    """Those of earlier versions: what `compress.load` reads from them is right."""
    out = tmp_path / "out"
    said = (
        "vLLM, SGLang and TensorRT-LLM compute something else: they take one weight_global_scale for model.layers.0."
        "mlp.gate_proj and up_proj, which differ (2 such groups, by up to 8 times)"
    )
    compress.quantize(models(DENSE), compress.RTN(scheme="nvfp4a16"), output=out, verify=False)
    assert "vLLM" not in command("inspect", out).out
    held = load_file(out / "model.safetensors")
    for name in ("self_attn.v_proj", "mlp.up_proj"):
        held[f"model.layers.0.{name}.weight_global_scale"] *= 8
    save_file(held, out / "model.safetensors", {"format": "pt"})
    assert said in command("inspect", out).out
