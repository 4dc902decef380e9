"""What every edit promises: undone to the bit, the same bits from what was stored, and the function that it says."""

import copy
import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import vision
from blocks import answer, block_calls, inputs, livelier
from models import build
from safetensors.torch import load, save
from torch import nn

from compress.base.errors import CheckpointError
from compress.model.calls import Call
from compress.model.edits.changes import undo
from compress.model.edits.configuration_search import facts_of
from compress.model.edits.drop_blocks import Drop
from compress.model.edits.folds import Scale
from compress.model.edits.keep_channels import Keep
from compress.model.known_edits import EDITS, read_edit
from compress.model.layers import find_stacks
from compress.model.online_rotation import RotateOnline
from compress.model.structure.couplings import find_couplings
from compress.model.structure.discovery import discover
from compress.model.structure.orders import find_orders
from compress.model.structure.rotate import Rotate
from compress.weights.rotations.orthogonal import hadamard_rotation, random_orthogonal

STEPS = 64  # of the dtype's precision, of the largest output: a few roundings a layer, two layers deep


@dataclass
class Case:
    """An edit of a module of a model, and the model's answer."""

    model: nn.Module
    place: str
    edit: Any
    answer: Callable[[nn.Module], torch.Tensor]

    def apply(self, model=None):
        return self.edit.apply((model or self.model).get_submodule(self.place))


def generator():
    return torch.Generator().manual_seed(5)


def fold_of(kind, producer, dtype):
    model, batch = livelier(build(kind)).to(dtype), inputs(kind)
    ((name, block), *_) = find_stacks(model)[0].blocks
    (fold,) = [f for f in discover(block, block_calls(model, batch)[name]).folds if f.producer == producer]
    return model, name, fold, lambda m: answer(m, batch)


def scale(kind, producer, dtype):
    model, name, fold, ask = fold_of(kind, producer, dtype)
    return Case(model, name, Scale(fold, torch.rand(fold.channels, generator=generator()) * 2 + 0.5), ask)


def rotate(kind, producer, dtype, blocks=1):
    model, name, fold, ask = fold_of(kind, producer, dtype)
    one = hadamard_rotation(8, generator()).matrix() if blocks == 1 else None
    many = torch.stack([random_orthogonal(8, generator()) for _ in range(blocks)])
    return Case(model, name, Rotate(fold, many if one is None else one), ask)


def rotate_online(kind, layer, dtype, block):
    model, batch = livelier(build(kind)).to(dtype), inputs(kind)
    ((name, _), *_) = find_stacks(model)[0].blocks
    return Case(model, name, RotateOnline(layer, block), lambda m: answer(m, batch))


def coupled(kind, producer, dtype):
    if kind in ("plain", "separable"):
        model, name = vision.Classifier(kind).eval().to(dtype), ""
        randomize_norms(model)
        x = torch.randn(3, 1, 12, 12, generator=generator()).to(dtype)
        call = Call((x,), {}, None, None)

        def ask(m):
            with torch.no_grad():
                return m(x)
    else:
        model, batch = livelier(build(kind)).to(dtype), inputs(kind)
        ((name, _), *_) = find_stacks(model)[0].blocks
        call, ask = block_calls(model, batch)[name], lambda m: answer(m, batch)
    found = find_couplings(model.get_submodule(name), call).found
    (coupling,) = [c for c in found if producer in c.sizes]
    kept = torch.arange(coupling.groups - 1) if coupling.groups < 8 else torch.arange(1, coupling.groups, 3)
    return Case(model, name, Keep(coupling, kept), ask)


def permute(kind, reader, dtype):
    model, batch = livelier(build(kind)).to(dtype), inputs(kind)
    ((name, block), *_) = find_stacks(model)[0].blocks
    call = block_calls(model, batch)[name]
    found = find_orders(block, call, discover(block, call).folds).found
    (places, *_) = [places for places in found if reader in places.consumers]
    order = torch.randperm(places.consumers[reader].shape[1], generator=generator())
    return Case(model, name, places.permuted(order), lambda m: answer(m, batch))


def randomize_norms(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                tensor.copy_(torch.rand(tensor.shape, generator=generator()) + 0.5)


def drop(kind, dtype):
    model, batch = livelier(build(kind)).to(dtype), inputs(kind)
    return Case(model, "", Drop(find_stacks(model)[0].name, (0,)), lambda m: answer(m, batch))


SAME = {
    "scale a norm of llama": lambda d: scale("llama", "input_layernorm", d),
    "scale the values of llama": lambda d: scale("llama", "self_attn.v_proj", d),
    "scale a norm of 1 + w": lambda d: scale("gemma", "input_layernorm", d),
    "scale a fused layer of gpt2": lambda d: scale("gpt2", "attn.c_attn", d),
    "rotate the values of llama": lambda d: rotate("llama", "self_attn.v_proj", d),
    "rotate each head of llama": lambda d: rotate("llama", "self_attn.v_proj", d, 2),
    "rotate a fused layer of gpt2": lambda d: rotate("gpt2", "attn.c_attn", d, 4),
    "rotate the values of opt": lambda d: rotate("opt", "self_attn.v_proj", d),
    "permute the channels of llama": lambda d: permute("llama", "mlp.down_proj", d),
    "permute the values of a head of llama": lambda d: permute("llama", "self_attn.o_proj", d),
    "permute the channels of gpt2": lambda d: permute("gpt2", "mlp.c_proj", d),
    "permute the values of a head of gpt2": lambda d: permute("gpt2", "attn.c_proj", d),
    "permute the channels of opt": lambda d: permute("opt", "fc2", d),
    "permute the channels of bert": lambda d: permute("bert", "output.dense", d),
    "rotate the inputs of llama's down_proj": lambda d: rotate_online("llama", "mlp.down_proj", d, 64),
    "rotate the inputs of gpt2's projection": lambda d: rotate_online("gpt2", "mlp.c_proj", d, 16),
    "rotate the values of bert": lambda d: rotate("bert", "attention.self.value", d),
}
KEPT = {
    "channels of llama": lambda d: coupled("llama", "mlp.gate_proj", d),
    "heads of llama": lambda d: coupled("llama", "self_attn.k_proj", d),
    "heads of qwen3": lambda d: coupled("qwen3", "self_attn.q_proj", d),
    "channels of gpt2": lambda d: coupled("gpt2", "mlp.c_fc", d),
    "heads of gpt2": lambda d: coupled("gpt2", "attn.c_attn", d),
    "channels of opt": lambda d: coupled("opt", "fc1", d),
    "heads of opt": lambda d: coupled("opt", "self_attn.q_proj", d),
    "channels of bert": lambda d: coupled("bert", "intermediate.dense", d),
    "heads of bert": lambda d: coupled("bert", "attention.self.key", d),
    "a convolution and its norm": lambda d: coupled("plain", "features.3", d),
    "a convolution and a depthwise one": lambda d: coupled("separable", "features.0", d),
}
DROPPED = {
    f"a block of {kind}": lambda d, kind=kind: drop(kind, d) for kind in ("llama", "gemma2", "gpt2", "opt", "bert")
}
ALL = {**SAME, **KEPT, **DROPPED}


def bits(model):
    """All that there is to a model: tensors, attributes of modules, its configuration."""
    config = getattr(model, "config", None)
    return dict(model.state_dict()), facts_of(model), None if config is None else config.to_dict()


def assert_same_bits(model, expected):
    tensors, facts, config = bits(model)
    assert tensors.keys() == expected[0].keys()
    assert all(torch.equal(value, expected[0][name]) for name, value in tensors.items())
    assert facts == expected[1]
    assert config == expected[2]


def assert_close(found, expected):
    assert (found - expected).abs().max() <= STEPS * torch.finfo(found.dtype).eps * expected.abs().max()


@pytest.mark.parametrize("name", ALL)
def test_undone_to_the_bit(name):
    case = ALL[name](torch.float32)
    before = copy.deepcopy(bits(case.model))
    pointers = [p.data_ptr() for p in case.model.parameters()]
    applied = case.apply()
    assert applied.changes
    undo(applied)
    assert_same_bits(case.model, before)
    assert [p.data_ptr() for p in case.model.parameters()] == pointers


@pytest.mark.parametrize("name", [name for name in SAME if "the inputs of" not in name])
def test_what_was_stored_gives_the_same_bits(name):
    case = ALL[name](torch.bfloat16)
    other = copy.deepcopy(case.model)
    case.apply()
    stored = json.loads(json.dumps(case.edit.entry())), load(save(case.edit.parts()))
    again = read_edit(*stored)
    assert type(again) is EDITS[case.edit.kind]
    again.apply(other.get_submodule(case.place))
    assert_same_bits(other, bits(case.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAME)
def test_the_function_stays(name, dtype):
    case = SAME[name](dtype)
    before = case.answer(case.model)
    assert any(not torch.equal(change.before, change.after) for change in case.apply().changes)
    assert_close(case.answer(case.model), before)


@contextmanager
def zeroed(case):
    """The channels that an edit is to remove read as zeros by those that read them."""

    def hook(gone):
        def zero(module, args):
            x = args[0].clone()
            if isinstance(module, nn.Conv2d):
                x[:, gone] = 0
            else:
                x[..., gone] = 0
            return (x, *args[1:])

        return zero

    handles = []
    for member in case.edit.coupling.consumers:
        gone = ~torch.isin(torch.arange(len(member.group_of)), case.edit.staying(member))
        assert gone.any()
        module = case.model.get_submodule(case.place).get_submodule(member.name)
        handles.append(module.register_forward_pre_hook(hook(gone)))
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_computes_as_if_the_rest_were_zero(name):
    case = KEPT[name](torch.float32)
    before, size = case.answer(case.model), sum(p.numel() for p in case.model.parameters())
    with zeroed(case):
        expected = case.answer(case.model)
    assert not torch.equal(before, expected)
    case.apply()
    assert_close(case.answer(case.model), expected)
    assert sum(p.numel() for p in case.model.parameters()) < size


@pytest.mark.parametrize("name", DROPPED)
def test_dropped_blocks_are_skipped(name):
    case = DROPPED[name](torch.float32)

    def skip(_, args, kwargs, output):
        x = args[0] if args else kwargs["hidden_states"]
        return x if isinstance(output, torch.Tensor) else (x, *output[1:])

    handle = find_stacks(case.model)[0].blocks[0][1].register_forward_hook(skip, with_kwargs=True)
    expected = case.answer(case.model)
    handle.remove()
    case.apply()
    assert torch.equal(case.answer(case.model), expected)
    assert len(find_stacks(case.model)[0].blocks) == 1


ONE_EACH = {
    "scale": lambda: scale("llama", "self_attn.v_proj", torch.float32),
    "rotate": lambda: rotate("llama", "self_attn.v_proj", torch.float32),
    "permute": lambda: permute("llama", "mlp.down_proj", torch.float32),
}


@pytest.mark.parametrize("kind", EDITS)
def test_what_is_wrong_with_something_stored_is_named(kind):
    edit = ONE_EACH[kind]().edit
    entry, parts = edit.entry(), edit.parts()
    for key in entry:
        with pytest.raises(CheckpointError, match=key):
            read_edit({k: v for k, v in entry.items() if k != key}, parts)
        with pytest.raises(CheckpointError, match=key):
            read_edit({**entry, key: 1.5}, parts)
    for name, part in parts.items():
        for wrong in (None, part[:0].bool(), part[None]):
            others = {k: v for k, v in parts.items() if k != name} | ({} if wrong is None else {name: wrong})
            with pytest.raises(CheckpointError, match=f"{name}|rotation"):
                read_edit(entry, others)


def test_an_unknown_kind_is_named():
    with pytest.raises(CheckpointError, match="unknown edit 'rotat'; did you mean 'rotate'"):
        read_edit({"edit": "rotat"}, {})


def test_every_kind_of_edit_is_in_the_list():
    assert set(EDITS) == set(ONE_EACH)
