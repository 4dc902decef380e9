"""Mixtures of experts of transformers: taken apart, compressed from the tokens that are routed to them, loaded."""

import json

import pytest
import torch
import transformers
from commands import DRIFT_GPTQ, command
from safetensors.torch import load_file

import compress
from compress.model.experts import Calibration, Experts, calibrating
from compress.model.experts_apart import split_experts
from compress.model.layers import is_linear

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
# Family -> (class of the model, settings beside SIZES, the name of an expert's last layer, layers of a run). In turn:
# names of the hub, names of its own, a shared expert with a gate, one from the second block on, stored joined,
# transposed and interleaved with biases, rows sorted by expert, without a gate.
FAMILIES = {
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16}, "down_proj", 32),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, "w2", 32),
    "qwen2-moe": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "down_proj",
        38,
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "down_proj",
        28,
    ),
    "olmoe": ("Olmoe", {"num_experts": 4}, "down_proj", 32),
    "granite": ("GraniteMoe", {"num_local_experts": 4}, "down_proj", 32),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 16}, "down_proj", 32),
    "llama4": (
        "Llama4",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "head_dim": 16},
        "down_proj",
        38,
    ),
}


def made(family: str) -> torch.nn.Module:
    """A random model of a family, float32, computing experts one after the other."""
    kind, settings, _, _ = FAMILIES[family]
    torch.manual_seed(0)
    name = "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config"
    config = getattr(transformers, name)(**{**SIZES, **settings}, experts_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, p in model.named_parameters():
        if "experts" in name or "bias" in name:
            torch.nn.init.normal_(p, 0, 0.2)
    return model


def tokens(rows: int = 6, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_a_family_are_decided_stored_and_loaded(family, tmp_path):
    model, x = made(family), tokens(2)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(x).logits
        apart = split_experts(model)
        assert torch.allclose(model(x).logits, expected, atol=1e-5)
        # What statistics see besides changes no output; nor does the routing that the other model has.
        seen = Calibration()
        with calibrating(seen):
            assert torch.allclose(model(x).logits, expected, atol=1e-5)
        with calibrating(Calibration({m: (r + 1) % 4 for m, r in seen.routes.items()}, reference=True)):
            assert torch.allclose(model(x).logits, expected, atol=1e-5)
    _, _, last, layers = FAMILIES[family]
    gptq = compress.GPTQ(scheme="w4a16", group_size=16, **DRIFT_GPTQ)
    out = tmp_path / "out"
    made_of = compress.quantize(tmp_path / "model", gptq, calibration=tokens(), output=out, batch_size=2, verify=False)
    assert len(made_of.record.layers) == layers
    assert not [name for name, why in made_of.record.left_alone.items() if "expert" in name and "gate" not in why]
    stored = load_file(out / "model.safetensors")
    assert f"{apart[-1]}.3.{last}.weight_packed" in stored
    with torch.no_grad():
        packed, dense = (compress.load(out, dequantize=dequantize)(x).logits for dequantize in (False, True))
    assert torch.allclose(packed, dense, atol=1e-4)
    assert 0 < float((dense - expected).abs().mean()) < 0.5 * float(expected.abs().mean())


def test_an_expert_that_no_token_reaches_is_decided_by_tokens_of_the_others(tmp_path):
    model = made("mixtral")
    for block in model.model.layers:
        block.mlp.gate.weight.data[3] = 0
        block.mlp.gate.weight.data[:3] = block.mlp.gate.weight.data[:3].abs()
    model.model.embed_tokens.weight.data.abs_()
    model.save_pretrained(tmp_path / "model")
    torch.save(tokens(), tmp_path / "tokens.pt")
    words = ["--method", "gptq", "--group-size", 16, "--calibration", tmp_path / "tokens.pt", "--output"]
    ran = command("quantize", tmp_path / "model", *words, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "experts got no token" in ran.out
    losses = compress.quantize(
        tmp_path / "model", compress.GPTQ(scheme="w4a16", group_size=16), calibration=tokens(), verify=False
    ).record.layers
    never = [layer for layer in losses if layer.figures.get("routed_tokens") == 0]
    assert never
    assert all(layer.figures["loss"] <= layer.figures["rtn_loss"] for layer in never)


def test_the_original_is_shown_the_tokens_that_the_compressed_model_routes_to_an_expert():
    torch.manual_seed(0)
    model = made("qwen3-moe")
    name = split_experts(model)[0]
    experts = model.get_submodule(name)
    assert isinstance(experts, Experts)
    x, weights = torch.randn(24, 32), torch.full((24, 2), 0.5)
    here, elsewhere = torch.tensor([[0, 1], [2, 3]]).repeat(12, 1), torch.tensor([[0, 3], [1, 2]]).repeat(12, 1)
    rows: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    routes: dict[torch.nn.Module, torch.Tensor] = {}
    for reference, index in ((False, here), (True, elsewhere)):
        calibration = Calibration(routes, reference)

        def note(_module, args, reference=reference, calibration=calibration):
            rows[reference].append(args[0][: len(calibration.weight_M)].clone())

        hook = experts.get_submodule("2.gate_proj").register_forward_pre_hook(note)
        with torch.no_grad(), calibrating(calibration):
            experts(x, index, weights)
        hook.remove()
    (own,), (other,) = rows.values()
    assert torch.equal(own, other)
    assert {tuple(row.tolist()) for row in x[1::2]} <= {tuple(row.tolist()) for row in own}


class Product(torch.nn.Linear):
    """A linear layer in other words."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Scores(torch.nn.Linear):
    """A router."""

    def forward(self, x):
        return super().forward(x).softmax(-1), self.weight


class Doubled(torch.nn.Linear):
    """More than a product."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_is_a_linear_layer_if_it_computes_the_product_and_no_more():
    found = {kind: is_linear(kind(8, 4)) for kind in (torch.nn.Linear, Product, Scores, Doubled)}
    assert found == {torch.nn.Linear: True, Product: True, Scores: False, Doubled: False}


def test_a_configuration_may_name_many_layers_by_their_places(tmp_path):
    model = made("llama4")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["moe_layers"] = [*range(100)]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert compress.load(tmp_path).config.moe_layers == [*range(100)]
