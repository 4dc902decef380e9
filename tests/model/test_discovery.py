"""Folds found by numbers: which ones each family allows, why others are refused, and that the function stays."""

import pytest
import torch
from blocks import answer, block_calls, first_block, inputs, livelier
from combinations import every
from models import FAMILIES, GATED, build, tokens
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM

from compress.engine.residency import Local
from compress.model.calls import Call
from compress.model.edits.changes import undo
from compress.model.edits.folds import UNTOUCHED, apply
from compress.model.layers import find_stacks
from compress.model.structure.discovery import Finder, confirm, discover
from compress.model.structure.excerpt import TOKENS, short_call
from compress.model.structure.hollow_forward import codes, decode, exponents
from compress.model.structure.producers import repeated_parameters

QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
VALUE = {"self_attn.v_proj": ["self_attn.o_proj"]}
GATED_MLP = {"mlp.up_proj": ["mlp.down_proj"]}
LLAMA = {
    **VALUE,
    **GATED_MLP,
    "input_layernorm": QKV,
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
}
T5_SELF = {
    "layer.0.SelfAttention.v": ["layer.0.SelfAttention.o"],
    "layer.0.layer_norm": [f"layer.0.SelfAttention.{n}" for n in "qkv"],
}


def t5_mlp(i):
    mlp = f"layer.{i}.DenseReluDense"
    return {f"{mlp}.wi": [f"{mlp}.wo"], f"layer.{i}.layer_norm": [f"{mlp}.wi"]}


# What the blocks of each stack allow: producer -> consumers.
EXPECTED = {
    "llama": [LLAMA],
    "qwen2": [LLAMA],
    "qwen3": [LLAMA],
    "mistral": [LLAMA],
    "gemma": [LLAMA],
    "gemma2": [
        {
            **VALUE,
            **GATED_MLP,
            "input_layernorm": QKV,
            "pre_feedforward_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
        }
    ],
    "gpt2": [{"ln_1": ["attn.c_attn"], "attn.c_attn": ["attn.c_proj"], "ln_2": ["mlp.c_fc"]}],
    "opt": [
        {
            "self_attn.v_proj": ["self_attn.out_proj"],
            "self_attn_layer_norm": QKV,
            "fc1": ["fc2"],
            "final_layer_norm": ["fc1"],
        }
    ],
    "bert": [{"attention.self.value": ["attention.output.dense"]}],
    "t5": [
        {**T5_SELF, **t5_mlp(1)},
        {
            **T5_SELF,
            "layer.1.EncDecAttention.v": ["layer.1.EncDecAttention.o"],
            "layer.1.layer_norm": ["layer.1.EncDecAttention.q"],
            **t5_mlp(2),
        },
    ],
}


def names(folds):
    return {fold.producer: sorted(c.name for c in fold.consumers) for fold in folds}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family_allows_these_folds_and_none_changes_its_answer(kind):
    model, batch = livelier(build(kind)), inputs(kind)
    expected = answer(model, batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls, finder, applied = block_calls(model, batch), Finder(), []
    generator = torch.Generator().manual_seed(0)
    plus_one = kind.startswith("gemma")
    for stack, folds in zip(find_stacks(model), EXPECTED[kind], strict=True):
        for i, (name, block) in enumerate(stack.blocks):
            found = finder.find(block, calls[name])
            assert names(found.folds) == {key: sorted(value) for key, value in folds.items()}
            assert found.forwards == 2 + plus_one
            if i > 0 and kind != "t5":  # only the first T5 block holds the table of relative positions
                assert found.probes == 0
            assert all((fold.kind == "norm_plus_one") == (plus_one and "norm" in fold.producer) for fold in found.folds)
            for fold in found.folds:
                applied.append(apply(block, fold, torch.rand(fold.channels, generator=generator) * 4 + 0.1))
    changed = [n for n, value in model.state_dict().items() if not torch.equal(value, before[n])]
    assert len(changed) >= 2 * sum(len(folds) for folds in EXPECTED[kind])
    assert (answer(model, batch) - expected).abs().max() < 1e-4 * expected.abs().max()
    for done in reversed(applied):
        undo(done)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def only_fold(found, producer):
    (fold,) = [f for f in found.folds if f.producer == producer]
    return fold


def maps(found, producer):
    return [c.channel_of_K.tolist() for c in only_fold(found, producer).consumers]


def test_a_value_head_serves_its_group_of_query_heads():
    found = discover(*first_block("llama"))
    heads, group, size = 4, 2, 8
    expected = [(head // group) * size + i for head in range(heads) for i in range(size)]
    assert maps(found, "self_attn.v_proj") == [expected]
    assert maps(found, "mlp.up_proj") == [list(range(64))]
    assert maps(found, "input_layernorm") == [list(range(32))] * 3


def test_only_the_value_rows_of_a_fused_layer_are_folded():
    fold = only_fold(discover(*first_block("gpt2")), "attn.c_attn")
    assert [c.channel_of_K.tolist() for c in fold.consumers] == [list(range(64, 96))]
    assert fold.used().tolist() == [False] * 64 + [True] * 32


def test_fused_layers_with_fewer_value_heads_and_with_a_gate():
    torch.manual_seed(0)
    model = livelier(Phi3ForCausalLM(Phi3Config(**GATED, pad_token_id=0)).eval())
    found = discover(*first_block("phi3", model))
    assert maps(found, "self_attn.qkv_proj") == [[48 + (j // 16) * 8 + j % 8 for j in range(32)]]
    assert maps(found, "mlp.gate_up_proj") == [list(range(64, 128))]


REASONS = {
    "llama": {
        "self_attn.q_proj": "enters self_attn.o_proj as more than a scale",
        "self_attn.o_proj": "feeds the norm post_attention_layernorm",
        "mlp.gate_proj": "enters mlp.down_proj as more than a scale",
        "mlp.down_proj": "reaches the block's output",
    },
    "qwen3": {"self_attn.q_norm": "enters self_attn.o_proj", "self_attn.q_proj": "feeds the norm self_attn.q_norm"},
    "gemma2": {
        "post_attention_layernorm": "feeds the norm pre_feedforward_layernorm",
        "post_feedforward_layernorm": "reaches the block's output",
    },
    "gpt2": {"mlp.c_fc": "enters mlp.c_proj as more than a scale"},
    "bert": {
        "attention.output.LayerNorm": "feeds the norm output.LayerNorm",
        "output.LayerNorm": "reaches the block's",
    },
}


@every("kind", sorted(REASONS))
def test_every_producer_without_a_fold_has_a_reason(kind):
    block, call = first_block(kind)
    found = discover(block, call)
    said = dict(line.split(": ", 1) for line in found.rejected)
    for producer, reason in REASONS[kind].items():
        assert said[producer].startswith(reason)
    producers = {n for n, m in block.named_modules() if n and getattr(m, "weight", None) is not None}
    assert set(said) | set(names(found.folds)) == producers


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_other_dtypes_give_the_same_folds_and_keep_their_weights(kind, dtype):
    model = livelier(build(kind)).to(dtype)
    block, call = first_block(kind, model)
    before = {name: (value.data_ptr(), value.clone()) for name, value in block.state_dict().items()}
    assert names(discover(block, call).folds) == {key: sorted(value) for key, value in EXPECTED[kind][0].items()}
    for name, value in block.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])


# --- blocks of our own ---------------------------------------------------------------------------------------------


def own(block, *shape, seed=0):
    return block.eval(), Call((torch.randn(*shape, generator=torch.Generator().manual_seed(seed)),), {}, 0, None)


def linear(inputs_, outputs_):
    return nn.Linear(inputs_, outputs_)


class Mixer(nn.Module):
    """Attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(16, 16) for _ in range(4))

    def forward(self, x):
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Parallel(nn.Module):
    """Attention and MLP side by side on one norm, as in Falcon and GPT-J. tap: the residual takes the norm, too."""

    def __init__(self, activation, tap=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(16), Mixer()
        self.fc1, self.fc2, self.activation, self.tap = linear(16, 24), linear(24, 16), activation, tap

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y) + self.fc2(self.activation(self.fc1(y)))
        return x + 1e-6 * y if self.tap else x


def test_all_readers_of_a_shared_norm_are_in_one_fold():
    found = discover(*own(Parallel(nn.functional.gelu), 2, 12, 16))
    assert names(found.folds) == {
        "norm": ["attention.k", "attention.q", "attention.v", "fc1"],
        "attention.v": ["attention.o"],
    }


def test_a_faint_tap_of_the_residual_refuses_the_norm():
    found = discover(*own(Parallel(nn.functional.gelu, tap=True), 2, 12, 16))
    assert "norm" not in names(found.folds)
    assert "norm: reaches the block's output without passing a linear layer" in found.rejected


@pytest.mark.parametrize(
    ("activation", "folds"),
    [
        (nn.ReLU(inplace=True), True),
        (nn.LeakyReLU(0.1), True),
        (nn.PReLU(), True),
        (nn.Identity(), True),
        (nn.ELU(), False),  # linear for what is positive
        (nn.GELU(), False),
        (nn.Hardtanh(-100, 100), False),  # linear for what is small
        (lambda x: torch.relu(x).square(), False),  # scaled, by the square
        (lambda x: x.roll(1, -1), True),
        (lambda x: x + x.roll(1, -1), False),
    ],
    ids=["relu", "leaky", "prelu", "none", "elu", "gelu", "clamp", "squared relu", "roll", "mix"],
)
def test_only_activations_that_pass_a_scale_on_allow_a_fold(activation, folds):
    found = discover(*own(Parallel(activation), 2, 12, 16))
    assert ("fc1" in names(found.folds)) == folds


class Permuted(nn.Module):
    """Half of what `second` reads is `first`, crosswise and twice; the rest comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other, self.second = linear(8, 4), linear(8, 3), linear(11, 2)

    def forward(self, x):
        y = self.first(x)
        return self.second(torch.cat([y.flip(-1), self.other(x), y * 2], -1))


def test_channel_maps_of_permuted_repeated_and_joined_inputs():
    found = discover(*own(Permuted(), 10, 8))
    none = UNTOUCHED
    assert maps(found, "first") == [[3, 2, 1, 0, none, none, none, 0, 1, 2, 3]]
    assert maps(found, "other") == [[none] * 4 + [0, 1, 2] + [none] * 4]


class Experts(nn.Module):
    """A router, the best of several gated experts for each token, and one that is never chosen."""

    def __init__(self, dead=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.router = nn.RMSNorm(16), linear(16, 4)
        self.gate, self.up, self.down = (
            nn.ModuleList(linear(*size) for _ in range(5 if dead else 4)) for size in ((16, 8), (16, 8), (8, 16))
        )

    def forward(self, x):
        y = self.norm(x).flatten(0, 1)
        weight, best = self.router(y).softmax(-1).max(-1)
        out = torch.zeros_like(y)
        for i in range(4):
            rows = (best == i).nonzero()[:, 0]
            if len(rows):
                part = nn.functional.silu(self.gate[i](y[rows])) * self.up[i](y[rows])
                out[rows] = self.down[i](part) * weight[rows, None]
        return x + out.reshape(x.shape)


def test_a_router_and_all_experts_read_the_norm():
    found = discover(*own(Experts(), 2, 40, 16))
    everyone = ["router", *(f"{name}.{i}" for name in ("gate", "up") for i in range(4))]
    assert names(found.folds) == {"norm": sorted(everyone), **{f"up.{i}": [f"down.{i}"] for i in range(4)}}
    assert "router: decides which layers are called" in found.rejected or any(
        line.startswith("router: enters") for line in found.rejected
    )


def test_an_expert_that_was_never_seen_refuses_what_it_might_read():
    found = discover(*own(Experts(dead=True), 2, 40, 16))
    assert found.folds == ()
    assert any(line.startswith("norm -> ") and "gate.4 was never called" in line for line in found.rejected)
    assert "up.4: never called during the probe" in found.rejected


class Sandwich(nn.Module):
    """A layer behind another, which may be the same one."""

    def __init__(self, tied) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b, self.c = nn.LayerNorm(8), linear(8, 8), linear(8, 8), linear(8, 8)
        if tied:
            self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.tanh(self.a(self.norm(x))))))


def test_shared_weights_are_refused():
    assert names(discover(*own(Sandwich(False), 12, 8)).folds) == {"norm": ["a"], "b": ["c"]}
    found = discover(*own(Sandwich(True), 12, 8))
    assert found.folds == ()
    assert "norm -> a: a shares a parameter with another module" in found.rejected
    block, call = own(Sandwich(False), 12, 8)
    assert names(discover(block, call, shared={id(block.norm.weight)}).folds) == {"b": ["c"]}


def test_shared_parameters_are_found_however_they_are_shared():
    block, twice = Sandwich(True), Sandwich(False)
    assert repeated_parameters(block) == {id(block.a.weight)}
    assert repeated_parameters(nn.ModuleList([twice, twice])) == {id(p) for p in twice.parameters()}
    assert repeated_parameters(twice) == set()


class Functional(nn.Module):
    """Uses a layer's weight behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = linear(8, 8), linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x)) + x @ self.a.weight.abs()


def test_what_hollow_forwards_cannot_see_the_last_forward_does():
    found = discover(*own(Functional(), 12, 8))
    assert found.folds == ()
    assert any(line.startswith("a -> b: the block's output changes by") for line in found.rejected)


class Broken(nn.Module):
    def __init__(self, problem) -> None:
        super().__init__()
        self.a, self.b, self.problem, self.seen = linear(8, 8), linear(8, 8), problem, 0

    def forward(self, x):
        self.seen += 1
        y = self.b(self.a(x))
        if self.problem == "raises" and self.seen > 3:
            raise KeyError("on the way")
        if self.problem == "counts":
            return self.b(y * self.seen)
        return y / 0 if self.problem == "infinite" else y


@pytest.mark.parametrize(("problem", "said"), [("raises", "on the way"), ("counts", "twice"), ("infinite", "finite")])
def test_a_block_that_cannot_be_probed_has_no_folds_and_is_left_as_it_was(problem, said):
    block, call = own(Broken(problem), 12, 8)
    block.train()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    found = discover(block, call)
    assert found.folds == ()
    (line,) = found.rejected
    assert line.startswith("no folds: ")
    assert said in line
    assert block.training
    assert "forward" not in block.a.__dict__
    assert all(torch.equal(before[name], value) for name, value in block.state_dict().items())


def test_dropout_is_off_and_random_blocks_draw_the_same_numbers():
    class Noisy(Sandwich):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training) + torch.rand_like(x))

    block, call = own(Noisy(False), 12, 8)
    block.train()
    state = torch.get_rng_state()
    assert names(discover(block, call).folds) == {"norm": ["a"], "b": ["c"]}
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fold_that_does_not_hold_for_another_block_is_dropped():
    block, call = own(Parallel(nn.functional.relu), 2, 12, 16)
    folds = discover(block, call).folds
    assert confirm(block, call, folds).folds == folds
    other = Parallel(nn.functional.gelu)
    found = confirm(*own(other, 2, 12, 16), folds)
    assert names(found.folds) == {key: value for key, value in names(folds).items() if key != "fc1"}
    assert found.probes == 0
    assert any(line.startswith("fc1 -> fc2: ") for line in found.rejected)


# --- micro-batches -------------------------------------------------------------------------------------------------


def test_a_short_call_keeps_a_few_tokens_of_one_sample():
    block, call = first_block("gemma2", batch={"input_ids": tokens(5, 40)})
    cut = short_call(call)
    assert cut.hidden.shape == (1, TOKENS, 32)
    shapes = {name: value.shape for name, value in cut.kwargs.items() if isinstance(value, torch.Tensor)}
    assert all(40 not in shape for shape in shapes.values())
    with torch.no_grad():
        whole, part = block(*call.args, **call.kwargs), block(*cut.args, **cut.kwargs)
    torch.testing.assert_close(part, whole[:1, :TOKENS])


def test_a_short_call_starts_at_the_first_real_token_of_the_fullest_sample():
    hidden, mask = torch.randn(3, 40, 8), torch.zeros(3, 40, dtype=torch.bool)
    mask[0, 30:], mask[1, 10:], mask[2, 35:] = True, True, True
    cut = short_call(Call((hidden,), {"row": torch.arange(40)}, 0, mask))
    assert torch.equal(cut.hidden, hidden[1:2, 10:26])
    assert torch.equal(cut.kwargs["row"], torch.arange(10, 26))


def test_a_call_that_cannot_be_cut_is_used_whole():
    class Fixed(Sandwich):
        def forward(self, x):
            return super().forward(x.reshape(2, 40, 8))

    assert names(discover(*own(Fixed(False), 2, 40, 8)).folds) == {"norm": ["a"], "b": ["c"]}
    short = Call((torch.randn(1, 5, 8),), {}, 0, None)
    assert short_call(short) is short


def test_padding_does_not_disturb():
    ids = torch.cat([torch.zeros(3, 6, dtype=torch.int64), tokens(3, 14)], 1)
    mask = torch.cat([torch.zeros(3, 6), torch.ones(3, 14)], 1).to(torch.int64)
    batch = {"input_ids": ids, "attention_mask": mask}
    assert names(discover(*first_block("llama", batch=batch)).folds) == {k: sorted(v) for k, v in LLAMA.items()}


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2"])
def test_folds_of_an_opened_bfloat16_block_are_kept_with_norms_that_need_no_more_rounding(kind):
    model = livelier(build(kind)).to(torch.bfloat16)
    exact = livelier(build(kind)).to(torch.bfloat16).float()
    batch = inputs(kind)
    expected = answer(exact, batch)
    (name, block), *_ = find_stacks(model)[0].blocks
    call = block_calls(model, batch)[name]
    with Local(torch.device("cpu"), torch.float32).open(block) as opened:
        folds = discover(opened.block, call).folds
        for fold in folds:
            scale_C = torch.rand(fold.channels, generator=torch.Generator().manual_seed(0)) + 0.5
            apply(opened.block, fold, scale_C, opened.dtypes)
        working = {n: p.data.clone() for n, p in block.named_parameters()}
    exact.get_submodule(name).load_state_dict(working)
    assert (answer(exact, batch) - expected).abs().max() < 1e-4 * expected.abs().max()
    for n, p in block.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p.data, working[n].bfloat16())
    weights = [f"{fold.producer}.weight" for fold in folds if fold.kind != "linear"]
    assert len(weights) == 2
    assert all(torch.equal(working[n], working[n].bfloat16().float()) for n in weights)


def test_a_whole_model_is_a_block_too():
    model = livelier(build("t5"))
    call = Call((), inputs("t5"), None, None)
    found = names(discover(model, call).folds)
    for stack, folds in zip(find_stacks(model), EXPECTED["t5"], strict=True):
        for name, _ in stack.blocks:
            for producer, consumers in folds.items():
                assert found[f"{name}.{producer}"] == sorted(f"{name}.{c}" for c in consumers)
    # A model returns what its encoder returned; the decoder's last norm feeds the tied head.
    assert "encoder.final_layer_norm" not in found
    assert "decoder.final_layer_norm" not in found


# --- numbers -------------------------------------------------------------------------------------------------------


@every("channels", [1, 2, 3, 96, 97, 4096, 9217])
def test_channel_numbers_survive_being_written_as_exponents(channels):
    written = codes(channels)
    assert len(written) == (1 if channels <= 96 else 2 if channels <= 96**2 else 3)
    assert max(int(code.max()) for code in written) <= 96
    order = torch.randperm(channels, generator=torch.Generator().manual_seed(0))
    read = [torch.cat([code[order], torch.zeros(1, dtype=torch.int64)]) for code in written]
    found = decode(read, channels)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [*order.tolist(), UNTOUCHED]
    assert decode([torch.full_like(r, 200) for r in read], channels) is None


def test_exponents_are_exact_or_none():
    x = torch.tensor([[1.5, -3.0, 0.0], [2.5, 7.0, 1e-20]])
    scaled = exponents(x, x * torch.tensor([4.0, 0.5, 2.0**70]))
    assert isinstance(scaled, torch.Tensor)
    assert scaled.tolist() == [2, -1, 70]
    assert exponents(x, x * 3) is None
    assert exponents(x, x * torch.tensor([[2.0], [4.0]])) is None  # another factor for each token
    assert exponents(x, -x) is None
    assert exponents(x * torch.tensor([1.0, 1.0, 0.0]), x * torch.tensor([1.0, 1.0, 0.0])) is None  # a dead channel
    assert exponents(x, x * float("nan")) is None
