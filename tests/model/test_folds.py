"""Folding scales into weights: what is divided, what is multiplied, and that it can be undone."""

import pytest
import torch
from combinations import every
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.base.errors import InputError
from compress.model.edits.changes import undo
from compress.model.edits.folds import (
    UNTOUCHED,
    Consumer,
    Fold,
    apply,
    divided_norm,
    reduce_scales,
    spread_scales,
    usable_scales,
)

GROUPED = torch.tensor([0, 1, 0, 1, 2, UNTOUCHED])  # two query heads of two channels on one value head, and others


def test_consumer_values_merge_to_the_channels_they_come_from():
    values_K = torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0, 100.0])
    assert reduce_scales(values_K, GROUPED, 4, "max", empty=0.0).tolist() == [3, 5, 7, 0]
    assert reduce_scales(values_K, GROUPED, 4, "mean").tolist() == [2, 3.5, 7, 1]


def test_several_consumers_merge_as_one_long_one():
    first, second = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 2.0])
    same, crossed = torch.tensor([0, 1]), torch.tensor([1, 0])
    merged = reduce_scales(torch.cat([first, second]), torch.cat([same, crossed]), 2, "max")
    assert merged.tolist() == [2, 4]


def test_scales_spread_to_the_inputs_that_read_them():
    assert spread_scales(torch.tensor([2.0, 3.0, 5.0]), GROUPED).tolist() == [2, 3, 2, 3, 5, 1]


def test_what_cannot_be_a_scale_becomes_one():
    broken = torch.tensor([2.0, 0.0, -1.0, float("inf"), float("nan"), 1e-30])
    assert usable_scales(broken).tolist() == pytest.approx([2, 1, 1, 1, 1, 1e-30])


class RMS(nn.Module):
    """x / rms(x) times w, or times 1 + w."""

    def __init__(self, channels, plus_one):
        super().__init__()
        self.weight, self.plus_one = nn.Parameter(torch.rand(channels) - 0.3), plus_one

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight + self.plus_one)


class Pair(nn.Module):
    """A producer of 8 channels, two layers on it."""

    def __init__(self, producer, consumer=lambda: nn.Linear(8, 5)):
        super().__init__()
        self.producer, self.a, self.b = producer, consumer(), nn.Linear(8, 3)

    def forward(self, x):
        y = self.producer(x)
        return torch.cat([self.a(y), self.b(y.flip(-1))], -1)


def layer_norm():
    norm = nn.LayerNorm(8)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(8) + 0.1)
        norm.bias.copy_(torch.randn(8))
    return norm


def conv1d(outputs, inputs):
    layer = Conv1D(outputs, inputs)
    with torch.no_grad():
        layer.bias.copy_(torch.randn(outputs))
    return layer


PRODUCERS = {
    "layer norm": ("norm", layer_norm),
    "rms norm": ("norm", lambda: RMS(8, 0)),
    "1 + w": ("norm_plus_one", lambda: RMS(8, 1)),
    "linear": ("linear", lambda: nn.Linear(8, 8)),
    "linear without bias": ("linear", lambda: nn.Linear(8, 8, bias=False)),
    "conv1d": ("linear", lambda: conv1d(8, 8)),
}


def pair(name, consumer=lambda: nn.Linear(8, 5)):
    torch.manual_seed(0)
    kind, make = PRODUCERS[name]
    straight = torch.arange(8)
    fold = Fold("producer", kind, 8, (Consumer("a", straight), Consumer("b", straight.flip(0))))
    return Pair(make(), consumer), fold


@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("consumer", [lambda: nn.Linear(8, 5), lambda: conv1d(5, 8)], ids=["linear", "conv1d"])
def test_a_fold_keeps_the_function_and_undo_restores_the_bits(name, consumer):
    block, fold = pair(name, consumer)
    x, scale_C = torch.randn(6, 8), torch.rand(8) * 4 + 0.1
    before = {key: value.clone() for key, value in block.state_dict().items()}
    expected, inner = block(x), block.producer(x)
    applied = apply(block, fold, scale_C)
    torch.testing.assert_close(block.producer(x), inner / scale_C, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(applied.scale_C, scale_C, rtol=1e-5, atol=0)
    undo(applied)
    assert all(torch.equal(before[key], value) for key, value in block.state_dict().items())


def test_powers_of_two_keep_every_bit():
    block, fold = pair("layer norm")
    x = torch.randn(6, 8)
    expected = block(x)
    apply(block, fold, 2.0 ** torch.arange(-4, 4))
    assert torch.equal(block(x), expected)


def test_channels_that_nobody_reads_stay_as_they_are():
    block = nn.ModuleDict({"p": nn.Linear(4, 6), "c": nn.Linear(3, 2)})
    rows, bias = block["p"].weight.clone(), block["p"].bias.clone()
    fold = Fold("p", "linear", 6, (Consumer("c", torch.tensor([4, 5, UNTOUCHED])),))
    columns = block["c"].weight.clone()
    applied = apply(block, fold, torch.full((6,), 2.0))
    assert applied.scale_C.tolist() == [1, 1, 1, 1, 2, 2]
    assert torch.equal(block["p"].weight[:4], rows[:4])
    assert torch.equal(block["p"].weight[4:], rows[4:] / 2)
    assert torch.equal(block["p"].bias, torch.cat([bias[:4], bias[4:] / 2]))
    assert torch.equal(block["c"].weight, columns * torch.tensor([2.0, 2.0, 1.0]))


@every("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_not_positive_and_finite_are_refused(bad):
    block, fold = pair("layer norm")
    scale_C = torch.ones(8)
    scale_C[3] = bad
    with pytest.raises(InputError, match="usable_scales"):
        apply(block, fold, scale_C)
    with pytest.raises(InputError, match="8 channels"):
        apply(block, fold, torch.ones(7))


@every("name", ["layer norm", "rms norm", "1 + w"])
def test_rounding_of_a_norm_is_carried_into_its_consumers(name):
    block, fold = pair(name)
    with torch.no_grad():
        for parameter in block.producer.parameters():  # what a bfloat16 model opened in float32 holds
            parameter.copy_(parameter.bfloat16())
        if hasattr(block.producer, "bias") and block.producer.bias is not None:
            block.producer.bias.zero_()
    x, scale_C = torch.randn(6, 8), torch.rand(8) * 4 + 0.1
    expected = block(x)
    applied = apply(block, fold, scale_C, {"producer.weight": torch.bfloat16})
    weight = block.producer.weight.data
    assert torch.equal(weight, weight.bfloat16().float())
    assert not torch.equal(applied.scale_C, scale_C)
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)


def test_a_channel_that_rounding_would_wipe_out_stays_as_it_was():
    weight_C, scale_C = torch.tensor([-0.5, 0.25, 0.0]), torch.tensor([1e4, 2.0, 3.0])
    new_C, real_C = divided_norm(weight_C, scale_C, True, torch.bfloat16)  # 0.5e-4 - 1 is -1 in bfloat16
    assert new_C[0] == weight_C[0]
    assert real_C[0] == 1
    new_C, real_C = divided_norm(weight_C, scale_C, False, torch.bfloat16)
    assert new_C[2] == 0  # a dead channel has nothing to divide
    assert real_C[2] == 1
    assert (new_C * real_C).tolist() == pytest.approx(weight_C.tolist())


def test_half_precision_weights_are_scaled_in_float32():
    block, fold = pair("linear")
    block.to(torch.float16)
    weight_NK, scale_C = block.a.weight.data.clone(), torch.full((8,), 1.001)  # 1 in float16's neighbourhood
    apply(block, fold, scale_C)
    assert block.a.weight.dtype == torch.float16
    assert torch.equal(block.a.weight.data, (weight_NK.float() * 1.001).half())


def test_folds_with_the_same_maps_are_equal():
    _, one = pair("linear")
    _, two = pair("linear")
    assert one == two
    other = Fold("producer", "linear", 8, (Consumer("a", torch.zeros(8, dtype=torch.int64)), one.consumers[1]))
    assert one != other
    assert len({one.consumers[0], two.consumers[0]}) == 1
