"""What can be removed from which model, what goes with it, what refuses to, and what transformers makes of the rest."""

import pytest
import torch
import vision
from blocks import answer, block_calls, first_block, inputs, livelier
from models import FAMILIES, GATED, build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from compress.base.errors import InputError
from compress.model.calls import Call
from compress.model.edits.configuration_search import configure, facts_of, unread_of
from compress.model.edits.drop_blocks import Drop
from compress.model.edits.keep_channels import Keep
from compress.model.layers import find_stacks
from compress.model.structure.couplings import find_couplings, why_not
from compress.model.structure.dependence import NONE, join_parts, take_apart
from compress.model.structure.discovery import discover
from compress.model.structure.rotate import Rotate, copies, widest
from compress.model.structure.rotate import why_not as why_not_rotate

GATED_MLP = (64, {"mlp.gate_proj": 1, "mlp.up_proj": 1}, ["mlp.down_proj"])
GROUPED_HEADS = (
    2,
    {f"self_attn.{n}_proj": size for n, size in zip("qkv", (16, 8, 8), strict=True)},
    ["self_attn.o_proj"],
)
LLAMA = [GATED_MLP, GROUPED_HEADS]
# Of the first block: groups, rows of each producer that one group has, consumers.
EXPECTED = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2"), LLAMA),
    "gpt2": [(128, {"mlp.c_fc": 1}, ["mlp.c_proj"]), (4, {"attn.c_attn": 24}, ["attn.c_proj"])],
    "opt": [
        (64, {"fc1": 1}, ["fc2"]),
        (4, {f"self_attn.{n}_proj": 8 for n in "qkv"}, ["self_attn.out_proj"]),
    ],
    "bert": [
        (64, {"intermediate.dense": 1}, ["output.dense"]),
        (4, {f"attention.self.{n}": 8 for n in ("query", "key", "value")}, ["attention.output.dense"]),
    ],
    # Its first block adds a table of biases per head, which is no layer.
    "t5": [(64, {"layer.1.DenseReluDense.wi": 1}, ["layer.1.DenseReluDense.wo"])],
}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family_can_lose_these_channels_and_heads(kind):
    block, call = first_block(kind)
    before = {name: (value.data_ptr(), value.clone()) for name, value in block.state_dict().items()}
    facts = facts_of(block)
    result = find_couplings(block, call)
    found = [(c.groups, c.sizes, [m.name for m in c.consumers]) for c in result.found]
    assert sorted(found, key=str) == sorted(EXPECTED[kind], key=str)
    said = {line.split(":")[0] for line in result.rejected}
    layers = {name for name, module in block.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    assert said == layers - {name for _, sizes, _ in found for name in sizes}
    assert facts_of(block) == facts
    for name, value in block.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])


def test_a_group_of_query_heads_goes_with_its_key_and_value_head():
    (heads,) = [c for c in find_couplings(*first_block("llama")).found if c.groups == 2]
    groups = {m.name[-6:-5]: m.group_of.tolist() for m in (*heads.producers, *heads.consumers)}
    assert groups == {n: [0] * half + [1] * half for n, half in zip("qkvo", (16, 8, 8, 16), strict=True)}


def test_couplings_of_one_block_are_checked_on_the_next():
    model, batch = livelier(build("llama")), inputs("llama")
    calls = block_calls(model, batch)
    (first, second) = find_stacks(model)[0].blocks
    couplings = find_couplings(first[1], calls[first[0]]).found
    assert [why_not(second[1], calls[second[0]], coupling) for coupling in couplings] == [[], []]
    second[1].mlp.act_fn = nn.Softmax(-1)
    second[1].self_attn.v_proj.register_forward_hook(lambda _, args, y: y + y.mean(-1, keepdim=True))
    for coupling in couplings:
        (said,) = why_not(second[1], calls[second[0]], coupling)
        assert said.startswith("cut, what the block computes is off by")


def test_a_call_that_cannot_be_shortened_is_taken_as_it_is():
    """As many tokens as a head has channels: cutting one cuts the other, and what is left does not run."""
    torch.manual_seed(0)
    model = livelier(LlamaForCausalLM(LlamaConfig(**{**GATED, "head_dim": 32})).eval())
    calls = block_calls(model, inputs("llama", length=32))
    (first, second) = find_stacks(model)[0].blocks
    couplings = find_couplings(first[1], calls[first[0]]).found
    assert {c.groups for c in couplings} == {2, 64}
    assert [why_not(second[1], calls[second[0]], coupling) for coupling in couplings] == [[], []]


# --- models of our own ---------------------------------------------------------------------------------------------


def sizes_of(model, x):
    result = find_couplings(model.eval(), Call((x,), {}, None, None))
    return {name: c.groups for c in result.found for name in c.sizes}, dict(r.split(": ", 1) for r in result.rejected)


def test_convolutions_go_with_their_norms_and_depthwise_ones():
    result = find_couplings(vision.Classifier("separable").eval(), Call((torch.randn(2, 1, 12, 12),), {}, None, None))
    found = {tuple(c.sizes): [m.name for m in c.between] for c in result.found}
    assert found == {
        ("features.0",): ["features.1", "features.3", "features.4"],
        ("features.6",): ["features.7", "features.9", "features.10"],
        ("features.12",): ["features.13"],
    }


def test_a_residual_sum_ties_all_that_write_into_it():
    found, said = sizes_of(vision.ResNet20(), torch.randn(2, 3, 16, 16))
    assert {found[f"layer{i}.{j}.conv1"] for i in (1, 2) for j in range(3)} == {16, 32}
    assert {found[f"layer1.{j}.conv1"] for j in range(3)} == {16}
    assert found["conv1"] == found["layer1.2.conv2"] == 16
    assert said == {"linear": "reaches the block's output, or what cannot be cut, without passing a layer"}


class Net(nn.Module):
    def __init__(self, middle, first=None, width=24):
        super().__init__()
        self.a = first or nn.Linear(8, width)
        self.middle = middle
        self.b = nn.Linear(width, 8)

    def forward(self, x):
        return self.b(self.middle(self.a(x)))


class Flip(nn.Module):
    def forward(self, x):
        return x.flip(-1).square()


class Triples(nn.Module):
    """Mixes three channels at a time, in four groups beside each other; no half of 24 is a multiple of them."""

    def forward(self, x):
        return x.unflatten(-1, (-1, 3)).softmax(-1).flatten(-2) + x


@pytest.mark.parametrize(
    ("middle", "groups"),
    [(Flip(), 24), (Triples(), 8), (nn.ReLU(), 24), (nn.Sequential(nn.GELU(), nn.BatchNorm1d(24)), 24)],
)
def test_channels_are_found_whatever_happens_to_them(middle, groups):
    model = Net(middle)
    assert sizes_of(model, torch.randn(6, 8))[0] == {"a": groups}


def test_what_mixes_all_channels_refuses_them():
    found, said = sizes_of(Net(nn.LayerNorm(24)), torch.randn(6, 8))
    assert not found
    assert said["a"] == "no layer reads it, or all of its channels hang together"


def test_grouped_and_shared_and_uncalled_layers_refuse():
    found, said = sizes_of(vision.net(), vision.calibration()[0]["x"])
    assert not found
    assert said["grouped"] == "is a grouped convolution"
    tied = Net(nn.ReLU())
    tied.c = nn.Linear(8, 24)
    tied.c.weight = tied.a.weight
    found, said = sizes_of(tied, torch.randn(6, 8))
    assert not found
    assert said["a"] == "shares a parameter with another module"
    idle = Net(nn.ReLU())
    idle.c = nn.Linear(24, 8)
    found, said = sizes_of(idle, torch.randn(6, 8))
    assert not found
    assert said["a"] == "c was never called during the probe and may read it, too"


def test_a_weight_that_is_read_without_a_call_refuses():
    class Functional(Net):
        def forward(self, x):
            return super().forward(x) + nn.functional.linear(x, self.a.weight[:8])

    found, said = sizes_of(Functional(nn.ReLU(), nn.Linear(8, 9), 9), torch.randn(6, 8))
    assert not found
    assert said["a"].startswith("cut, the block does not run") or said["a"].startswith("cut, what the block")


def test_a_block_that_fails_has_no_couplings():
    result = find_couplings(Net(nn.ReLU()), Call((torch.randn(3, 5),), {}, None, None))
    assert result.found == ()
    assert result.rejected[0].startswith("no couplings: RuntimeError: ")


def test_parts_are_told_apart_by_what_they_reach():
    """Random bipartite graphs: the parts are their connected components."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        inputs_, channels, parts = (int(torch.randint(2, 40, (), generator=generator)) for _ in range(3))
        of_K = torch.randint(parts, (inputs_,), generator=generator)
        of_C = torch.randint(parts, (channels,), generator=generator)
        edges = of_K[:, None] == of_C

        part_K, part_C = take_apart(inputs_, lambda k, e=edges: e[k].any(0), lambda c, e=edges: e[:, c].any(1))
        read, used = edges.any(1), edges.any(0)
        assert torch.equal(part_K == NONE, ~read)
        assert torch.equal(part_C == NONE, ~used)
        both = read[:, None] & used
        assert torch.equal((part_K[:, None] == part_C) & both, edges)


def test_channels_that_any_reader_ties_are_joined():
    parts = [torch.tensor([0, 0, 1, NONE, 2]), torch.tensor([NONE, 4, 4, 5, NONE])]
    assert join_parts(parts, 5).tolist() == [0, 0, 0, 3, 4]


# --- what transformers makes of it -----------------------------------------------------------------------------------


def cut(model, batch, groups):
    """Half of the groups of the coupling that has so many, in every block."""
    calls, unread, done = block_calls(model, batch), [], []
    for name, block in find_stacks(model)[0].blocks:
        (coupling,) = [c for c in find_couplings(block, calls[name]).found if c.groups == groups]
        unread += unread_of(name, coupling)
        done.append(Keep(coupling, torch.arange(0, groups, 2)).apply(block))
    return unread, done


@pytest.mark.parametrize(
    ("kind", "groups", "fields"),
    [
        ("llama", 64, {"intermediate_size": 32}),
        ("llama", 2, {"num_attention_heads": 2, "num_key_value_heads": 1}),
        ("gemma2", 2, {"num_attention_heads": 2, "num_key_value_heads": 1}),
        ("gpt2", 128, {"n_inner": 64}),
        ("opt", 64, {"ffn_dim": 32}),
        ("bert", 64, {"intermediate_size": 32}),
    ],
)
def test_a_cut_model_loads_again_and_computes_the_same(kind, groups, fields, tmp_path):
    model, batch = livelier(build(kind)), inputs(kind)
    before = model.config.to_dict()
    unread, _ = cut(model, batch, groups)
    configure(model, unread)
    after = model.config.to_dict()
    assert {key: value for key, value in after.items() if before.get(key) != value} == fields
    model.save_pretrained(tmp_path)
    assert torch.equal(answer(type(model).from_pretrained(tmp_path), batch), answer(model, batch))


@pytest.mark.parametrize(("kind", "groups"), [("opt", 4), ("bert", 4), ("gpt2", 4)])
def test_heads_whose_size_no_configuration_says_are_refused(kind, groups):
    model, batch = livelier(build(kind)), inputs(kind)
    unread, _ = cut(model, batch, groups)
    before = model.config.to_dict()
    with pytest.raises(InputError, match=r"no configuration of \w+ describes the edited model: .* is .*, and would be"):
        configure(model, unread)
    assert model.config.to_dict() == before


def test_blocks_that_are_cut_differently_are_refused():
    model, batch = livelier(build("llama")), inputs("llama")
    name, block = find_stacks(model)[0].blocks[0]
    (coupling,) = [c for c in find_couplings(block, block_calls(model, batch)[name]).found if c.groups == 64]
    Keep(coupling, torch.arange(32)).apply(block)
    with pytest.raises(InputError, match=r"the shape of model\.layers\.0\.mlp\.down_proj\.weight is \(32, 32\)"):
        configure(model, unread_of(name, coupling))


def test_what_a_model_that_was_edited_alike_says_is_tried_first_and_where_it_is_wrong_the_search_goes_on(monkeypatch):
    made = []
    monkeypatch.setattr(LlamaForCausalLM, "post_init", lambda model: made.append(model.config.intermediate_size))
    alike = LlamaForCausalLM(LlamaConfig(**{**GATED, "intermediate_size": 32}))
    wrong = LlamaForCausalLM(LlamaConfig(**{**GATED, "intermediate_size": 48}))
    for like, tried in ((alike, [32, 32]), (wrong, [48, 64])):
        model, batch = livelier(build("llama")), inputs("llama")
        unread, _ = cut(model, batch, 64)
        made.clear()
        configure(model, unread, like=like)
        assert model.config.intermediate_size == 32
        assert made[:2] == tried
        assert (len(made) == 2) == (like is alike)  # one to try, one to write


def test_a_model_without_a_configuration_needs_none():
    assert configure(Net(nn.ReLU())).changes == ()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "opt", "bert"])
def test_a_model_with_fewer_blocks_loads_again(kind, tmp_path):
    model, batch = livelier(build(kind)), inputs(kind)
    Drop(find_stacks(model)[0].name, (0,)).apply(model)
    assert model.config.num_hidden_layers == 1
    assert len(getattr(model.config, "layer_types", [0])) == 1
    model.save_pretrained(tmp_path)
    assert torch.equal(answer(type(model).from_pretrained(tmp_path), batch), answer(model, batch))


def test_blocks_that_cannot_be_dropped_are_refused_and_nothing_is_changed():
    model = build("t5")  # its first block has the table of positions that all others use
    facts = facts_of(model)
    for stack, indices, said in [
        ("encoder.block", (0,), "no configuration of T5ForConditionalGeneration describes"),
        ("encoder.block", (2,), r"blocks to drop of encoder.block: \[2\]; it has 2: give each once, from 0 to 1"),
        ("encoder.block", (0, 1), "and leave one"),
        ("encoder.block", (1, 1), "give each once"),
        ("encoder.layers", (0,), "has no list of blocks 'encoder.layers'"),
    ]:
        with pytest.raises(InputError, match=said):
            Drop(stack, indices).apply(model)
        assert facts_of(model) == facts
    Drop("decoder.block", (1,)).apply(model)
    assert (model.config.num_layers, model.config.num_decoder_layers) == (2, 1)


# --- rotations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "producer", "size"),
    [
        ("llama", "self_attn.v_proj", 8),
        ("gpt2", "attn.c_attn", 8),
        ("bert", "attention.self.value", 8),
        ("llama", "mlp.up_proj", None),
        ("opt", "fc1", None),
        ("llama", "input_layernorm", None),
    ],
)
def test_matrices_pass_within_a_head_and_nowhere_else(kind, producer, size):
    block, call = first_block(kind)
    (fold,) = [f for f in discover(block, call).folds if f.producer == producer]
    assert widest(block, call, fold) == size


def test_why_a_rotation_does_not_pass():
    block, call = first_block("llama")
    folds = {f.producer: f for f in discover(block, call).folds}
    (said,) = why_not_rotate(block, call, folds["mlp.up_proj"], 8)
    assert said.startswith("matrices of 8 channels do not pass to mlp.down_proj, whose input is off by")
    assert why_not_rotate(block, call, folds["self_attn.v_proj"], 5) == ["16 channels do not fall into blocks of 5"]
    (said,) = why_not_rotate(block, call, folds["input_layernorm"], 8)
    assert said.startswith("a norm multiplies every channel by itself")
    with pytest.raises(InputError, match="input_layernorm cannot be rotated: a norm multiplies"):
        Rotate(folds["input_layernorm"], torch.eye(8))
    with pytest.raises(InputError, match=r"has 16 channels that are read; given: a rotation of shape \(5, 5\)"):
        Rotate(folds["self_attn.v_proj"], torch.eye(5))
    with pytest.raises(InputError, match=r"not orthogonal: Q\^T Q is off by 3\.0e"):
        Rotate(folds["self_attn.v_proj"], 2 * torch.eye(8))


def test_grouped_heads_are_copies_of_their_value_head():
    block, call = first_block("llama")
    (fold,) = [f for f in discover(block, call).folds if f.producer == "self_attn.v_proj"]
    heads = torch.arange(32).view(2, 2, 8)  # groups, heads of a group
    assert torch.equal(copies(fold.consumers[0]), heads.transpose(0, 1).reshape(2, 16))


@pytest.mark.parametrize("kept", [[], [1, 0], [0, 0], [-1], [2]])
def test_groups_that_are_not_there_are_refused(kept):
    (heads,) = [c for c in find_couplings(*first_block("llama")).found if c.groups == 2]
    with pytest.raises(InputError, match="give at least one, each once and in order, from 0 to 1"):
        Keep(heads, torch.tensor(kept, dtype=torch.int64))


def test_a_block_of_other_widths_is_refused_before_anything_is_changed():
    block, call = first_block("llama")
    (mlp,) = [c for c in find_couplings(block, call).found if c.groups == 64]
    Keep(mlp, torch.arange(5)).apply(block)
    facts = facts_of(block)
    with pytest.raises(InputError, match=r"mlp\.gate_proj has 5 channels; the edit is for 64"):
        Keep(mlp, torch.arange(5)).apply(block)
    assert facts_of(block) == facts
