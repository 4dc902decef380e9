"""Adapters of peft beside layers on codes."""

import pytest
import torch
from models import build, tokens

import compress
from compress.base.errors import InputError
from compress.inference.layers.fused import FusedLinear
from compress.inference.layers.linear import QuantLinear

peft = pytest.importorskip("peft", reason="adapters are peft's")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks transformers for it
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    output = tmp_path_factory.mktemp("models") / "out"
    passes = [compress.Embeddings(scheme="w4a16", group_size=16), compress.RTN(group_size=16)]
    compress.quantize(build("qwen2"), passes, output=output, verify=False)
    return output


@pytest.mark.parametrize("fuse", [False, True])
def test_peft_without_our_layers_says_what_to_call(fuse, out):
    with pytest.raises(
        ValueError, match=r"(?s)Target module .* \(for adapters on codes call compress\.lora\(config\) first"
    ):
        peft.get_peft_model(compress.load(out, fuse=fuse), peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("fuse", "targets"), [(False, ["embed_tokens", "q_proj", "lm_head"]), (True, ["q_proj", "k_proj", "down_proj"])]
)
def test_adapters_train_beside_codes_and_are_saved_loaded_and_merged(fuse, targets, out, tmp_path):
    ids = tokens()
    base = compress.load(out, fuse=fuse)
    with torch.no_grad():
        untrained = base(input_ids=ids).logits
    codes = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, compress.lora(peft.LoraConfig(r=4, target_modules=targets)))
    assert torch.equal(model(input_ids=ids).logits, untrained)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * sum(isinstance(m, peft.tuners.lora.LoraLayer) for m in model.modules()) > 0
    optimizer = torch.optim.SGD(trained, 0.5)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None for p in trained)
        optimizer.step()
        if len(losses) > 1:  # B begins at zero, so A's first gradient is zero
            assert all(p.grad.abs().max() > 0 for p in trained)
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.save_pretrained(tmp_path / "adapter")
        config = compress.lora(peft.LoraConfig.from_pretrained(tmp_path / "adapter"))
        again = peft.PeftModel.from_pretrained(compress.load(out, fuse=fuse), tmp_path / "adapter", config=config)
        assert torch.equal(again(input_ids=ids).logits, expected)
        kept = again.unload().state_dict()
        assert set(kept) == set(codes)
        assert all(torch.equal(kept[name], value) for name, value in codes.items())

        with pytest.raises(InputError, match=r"model\.dequantize\(\) before merging, or begin with load\(dequantize"):
            model.merge_and_unload()
        model.dequantize()
        assert [p for p in model.parameters() if p.requires_grad] == trained
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
        merged = model.merge_and_unload()
        assert not any(isinstance(m, QuantLinear | FusedLinear | peft.tuners.lora.LoraLayer) for m in merged.modules())
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_gradients_pass_through_rounded_inputs_to_earlier_adapters(tmp_path):
    compress.quantize(build("llama"), compress.RTN(scheme="w8a8"), output=tmp_path / "out", verify=False)
    config = compress.lora(peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[0]))
    model = peft.get_peft_model(compress.load(tmp_path / "out"), config)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    grads = {name: p.grad.abs().max() for name, p in model.named_parameters() if p.requires_grad}
    assert all(value > 0 for name, value in grads.items() if "lora_B" in name)


def test_an_adapter_on_what_is_prepared_for_training_is_merged_into_what_is_trained(tmp_path):
    """Merged at once, as an adapter from a file is, or after forwards; into a linear layer and a table."""
    ids, latent = tokens(), "model.layers.1.mlp.down_proj.weight"
    model = build("llama")
    passes = [compress.RTN(scheme="w8a16", group_size=16), compress.Embeddings(scheme="w8a16", group_size=16)]
    prepared = compress.prepare_qat(model, passes, scales="fitted")
    parameter = model.get_parameter(latent)
    assert parameter is dict(model.named_parameters())[latent]
    for target, called in (("down_proj", False), ("down_proj", True), ("embed_tokens", True)):
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False))
        with pytest.raises(InputError, match=rf"{target} is an adapter of peft; call merge_and_unload"):
            prepared.convert()
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                p.mul_(0.6 if "lora_" in name else 1)  # as large as a weight, and many steps of its grid
            before = model(input_ids=ids).logits if called else None
        names = {n.replace("base_layer.", ""): p.detach().clone() for n, p in model.named_parameters()}
        deltas = {n: m.get_delta_weight("default") for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
        assert adapted.merge_and_unload() is model
        for name, delta in deltas.items():
            assert torch.equal(model.get_parameter(f"{name}.weight"), names[f"{name}.weight"] + delta), name
        if called:
            after = model(input_ids=ids).logits
            moved = (before - plain_logits(model, names, ids)).square().mean()
            assert (before - after).square().mean() < 0.01 * moved
    assert model.get_parameter(latent) is parameter
    with torch.no_grad():
        seen = model(input_ids=ids).logits
    prepared.convert(tmp_path / "out")
    assert torch.equal(compress.load(tmp_path / "out", dequantize=True)(input_ids=ids).logits, seen)


def test_learned_scales_are_fitted_to_what_a_merge_has_changed():
    """peft freezes them; they would clip what an adapter adds."""
    ids, model = tokens(), build("llama")
    prepared = compress.prepare_qat(model, compress.RTN(scheme="w8a16", group_size=16))
    config = peft.LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        before = adapted(input_ids=ids).logits
        adapted.merge_and_unload()
        clipped = model(input_ids=ids).logits
        with pytest.raises(InputError, match=r"down_proj was changed and not trained .* call fit_scales\(\)"):
            prepared.convert()
        prepared.fit_scales()
        fitted = model(input_ids=ids).logits
        assert (before - fitted).square().mean() < 0.01 * (before - clipped).square().mean()
        prepared.convert()
        assert torch.equal(model(input_ids=ids).logits, fitted)


def plain_logits(model, values, ids):
    """The logits of a prepared model with other values of its parameters."""
    with torch.no_grad():
        return torch.func.functional_call(model, {n: values[n] for n, _ in model.named_parameters()}, ids).logits


def test_a_copy_in_the_place_of_a_layer_is_not_converted():
    model = build("llama")
    prepared = compress.prepare_qat(model, compress.RTN(group_size=16))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["down_proj"])
    peft.get_peft_model(model, config).merge_and_unload()
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.down_proj is not the module any more that was prepared"):
        prepared.convert()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: peft.LoraConfig(use_dora=True), "use_dora"),
        (lambda: peft.LoraConfig(init_lora_weights="pissa"), "init_lora_weights='pissa'; allowed on codes"),
        (lambda: peft.LoraConfig(bias="all"), "bias='all'"),
        (lambda: peft.IA3Config(), "a IA3Config is no peft.LoraConfig"),
        (lambda: peft.LoraConfig(target_modules="all-linear"), "name the layers"),
    ],
)
def test_what_needs_dense_weights_is_refused(config, message):
    with pytest.raises(InputError, match=message) as raised:
        compress.lora(config())
    assert "load(dequantize=True)" in str(raised.value) or "name the layers" in message
