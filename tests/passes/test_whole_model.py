"""Passes of somebody else that edit the whole model: channels or a block go, the hidden state is rotated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers
from blocks import answer
from commands import command, make_llama, save
from models import build, strong, tokens
from torch import Tensor, nn

import compress
from compress.base.errors import InputError
from compress.model.edits.changes import DATA, Applied, change, changing
from compress.model.edits.drop_blocks import Drop
from compress.model.edits.keep_channels import Keep
from compress.passes.protocol.base import Pass
from compress.passes.protocol.model_view import Whole
from compress.passes.protocol.stages import Restructure, Stage

BATCH = {"input_ids": tokens(3, 12, seed=9)}


@dataclass(frozen=True, kw_only=True)
class EveryOther(Pass):
    """Every other channel of each MLP goes."""

    name: ClassVar[str] = "every-other"

    first: int = 0
    """0 or 1: the first channel that stays."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Restructure(self.edits, keeps_zeros=True),)

    def edits(self, whole: Whole) -> Iterator[tuple[str, Keep]]:
        for name, couplings in whole.couplings().items():
            for coupling in couplings:
                if set(coupling.sizes.values()) == {1}:
                    yield name, Keep(coupling, torch.arange(self.first, coupling.groups, 2))


@dataclass(frozen=True, kw_only=True)
class Shorter(Pass):
    """The last block goes."""

    name: ClassVar[str] = "shorter"
    removes_nothing: bool = False

    @property
    def stages(self) -> tuple[Stage, ...]:
        edits = (("", Drop("model.layers", (1,))),)
        return (Restructure(lambda whole: edits, removes=not self.removes_nothing, keeps_zeros=True),)


@dataclass(frozen=True)
class RotateStream:
    """An edit of a Llama: Q for its hidden state, with the weights of norms folded into what reads them."""

    seed: int

    def apply(self, model: nn.Module, stored_dtypes: object = None) -> Applied:
        body = model.model
        q, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(self.seed)))
        q = q.to(body.norm.weight)
        reading = [(body.norm, [model.lm_head])]
        with changing() as done:
            done.append(change(body.embed_tokens.weight, DATA, body.embed_tokens.weight.data @ q))
            for block in body.layers:
                attention, mlp = block.self_attn, block.mlp
                reading.append((block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
                reading.append((block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
                for layer in (attention.o_proj, mlp.down_proj):
                    done.append(change(layer.weight, DATA, q.T @ layer.weight.data))
            for norm, layers in reading:
                for layer in layers:
                    done.append(change(layer.weight, DATA, (layer.weight.data * norm.weight.data) @ q))
                done.append(change(norm.weight, DATA, torch.ones_like(norm.weight.data)))
        return Applied(tuple(done))

    def entry(self) -> dict[str, object]:
        return {"edit": "rotate-stream", "seed": self.seed}

    def parts(self) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Rotated(Pass):
    """The hidden state is rotated."""

    name: ClassVar[str] = "rotated"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Restructure(lambda whole: [("", RotateStream(3))], removes=False),)


def llama() -> nn.Module:
    model = strong("llama")
    for norm in (m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"):
        norm.weight.data = torch.rand(32) + 0.5
    return model


def test_channels_by_another_rule_end_to_end(tmp_path):
    model = save(make_llama(), tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(f"passes: [{__name__}:EveryOther: {{first: 1}}, rtn: {{scheme: w8a16}}]")
    out = tmp_path / "out"
    run = command("quantize", model, "--recipe", tmp_path / "recipe.yaml", "--output", out, "--verify")
    assert run.code == 0, run.err
    assert "every-other: " in run.err
    assert "parameters left, as foreseen" in run.out
    left = compress.load(out)
    assert left.config.intermediate_size == 48
    for name, layer in dict(make_llama().named_modules()).items():
        if name.endswith(("gate_proj", "down_proj")):
            kept = layer.weight[1::2] if name.endswith("gate_proj") else layer.weight[:, 1::2]
            torch.testing.assert_close(left.get_submodule(name).dequantize(), kept, atol=0.01, rtol=0)


def test_a_block_and_channels_go_one_pass_after_the_other(tmp_path):
    result = compress.quantize(
        str(save(llama(), tmp_path / "model")), (Shorter(), EveryOther()), output=tmp_path / "out"
    )
    cut = result.record.structure
    assert [each["edit"] for each in cut["edits"]] == ["drop", "keep"]
    assert cut["config"]["num_hidden_layers"] == [2, 1]
    assert cut["config"]["intermediate_size"] == [64, 32]
    expected = llama()
    expected.model.layers = expected.model.layers[:1]
    expected.model.layers[0].mlp.down_proj.weight.data[:, 1::2] = 0
    left = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(left.model.layers) == 1
    assert left.model.layers[0].mlp.up_proj.out_features == 32
    torch.testing.assert_close(answer(left, BATCH), answer(expected, BATCH))


def test_a_rotation_keeps_the_function_and_changes_what_is_rounded(tmp_path):
    before = answer(llama(), BATCH)
    compress.quantize(str(save(llama(), tmp_path / "model")), Rotated(), output=tmp_path / "out")
    left = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(answer(left, BATCH), before, atol=1e-3, rtol=1e-3)
    moved = left.model.layers[0].mlp.up_proj.weight - llama().model.layers[0].mlp.up_proj.weight
    assert moved.norm() > llama().model.layers[0].mlp.up_proj.weight.norm()


def test_a_model_in_memory_is_as_before_when_a_later_pass_is_refused():
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match="shorter says that all shapes stay, and leaves"):
        compress.quantize(model, (EveryOther(), Shorter(removes_nothing=True)))
    assert model.config.intermediate_size == model.model.layers[0].mlp.up_proj.out_features == 64
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("passes", "options", "said"),
    [
        ((compress.RTN(), Shorter()), {}, "shorter changes the shapes .* put it first"),
        ((compress.RTN(), Rotated()), {}, "rotated changes the weights that other passes decide about; put it first"),
        ((compress.only(Rotated(), "*.0.*"),), {}, "rotated edits the whole model; leave `only` and `but` out"),
        ((Rotated(),), {"ignore": ["*.0.mlp.up_proj"]}, r"rotated changes model\.layers\.0\.mlp\.up_proj, which is to"),
        ((EveryOther(),), {"ignore": ["*.mlp.*"]}, "every-other finds nothing to edit in LlamaForCausalLM"),
        ((EveryOther(), compress.RTN(group_size=64)), {}, "group size 64"),
    ],
)
def test_what_cannot_be_is_refused(passes, options, said):
    with pytest.raises(InputError, match=said):
        compress.quantize(build("llama"), passes, **options)


def test_a_rotation_of_a_pruned_model_is_refused():
    model = build("llama")
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        layer.weight.data[:, ::2] = 0
    with pytest.raises(InputError, match=r"comes pruned .* and rotated keeps no zeros; leave that pass out, or let go"):
        compress.quantize(model, Rotated())
