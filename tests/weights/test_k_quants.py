"""The bytes of K-quants: read by gguf-py to the same float32, bit for bit, and packed to what is unpacked."""

import numpy as np
import pytest
import torch

from compress.base.errors import CheckpointError
from compress.kernels.layouts.k_quants import BLOCK, K_QUANTS, pack_blocks, unpack_blocks
from compress.solvers.k_quants.fit import fit_blocks
from compress.solvers.k_quants.solve import nearest_blocks
from compress.weights.formats.k_quants import PART, KBlocks, KQuant
from compress.weights.levels import IQ4_NL

# Bytes of a super-block, and weights of a group: ggml's `block_q2_K` ... `block_q6_K`, `block_iq4_xs`.
SIZES = {"q2_k": (84, 16), "q3_k": (110, 16), "q4_k": (144, 32), "q5_k": (176, 32), "q6_k": (210, 16)}
SIZES |= {"iq4_xs": (136, 32)}
every_type = pytest.mark.parametrize("name", K_QUANTS)


def random_bytes(name: str, rows: int = 64, blocks: int = 3) -> torch.Tensor:
    shape = rows, blocks * K_QUANTS[name].size
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def by_gguf(name: str, blocks: torch.Tensor) -> torch.Tensor:
    gguf = pytest.importorskip("gguf", reason="gguf-py is what is compared with")
    with np.errstate(all="ignore"):  # d and dmin of random bytes are whatever float16 has
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name.upper()]))


@every_type
def test_layouts_are_ggmls(name):
    layout = K_QUANTS[name]
    assert (layout.size, layout.group) == SIZES[name]
    assert KQuant(type=name).bits_per_weight == 8 * layout.size / BLOCK


@every_type
def test_any_bytes_stand_for_what_gguf_reads(name):
    blocks = random_bytes(name)
    ours, theirs = KQuant(type=name).values({PART: blocks}), by_gguf(name, blocks)
    assert ours.dtype == torch.float32
    assert torch.equal(ours.isnan(), theirs.isnan())
    same = ours.view(torch.int32) == theirs.view(torch.int32)
    assert bool((same | ours.isnan()).all())


@every_type
def test_packing_is_the_inverse_of_unpacking(name):
    layout, blocks = K_QUANTS[name], random_bytes(name, blocks=1)
    fields = unpack_blocks(blocks, layout)
    assert fields.codes.max() < 2**layout.bits
    assert fields.scales.shape == (64, layout.groups)
    assert torch.equal(pack_blocks(fields, layout), blocks)


@every_type
def test_numbers_are_packed_to_what_stands_for_them(name):
    """From codes (of iq4_xs, levels), scales with signs, minima and steps, by the definition of the type."""
    format_, draw = KQuant(type=name), torch.Generator().manual_seed(2)
    layout, (least, most) = format_.layout, format_.scale_range
    codes = torch.randint(2**layout.bits, (4, 2 * BLOCK), generator=draw)
    if name == "iq4_xs":
        codes = torch.tensor(IQ4_NL.values)[codes]
    scales, minima = (torch.randint(low, most + 1, (4, 2 * layout.groups), generator=draw) for low in (least, 0))
    d, dmin = (torch.rand(4, 2, generator=draw).half().double() for _ in range(2))
    found = format_.packed(codes, scales, minima, d, dmin)
    assert found.shape == (4, 2 * BLOCK)

    of_group = torch.arange(2 * BLOCK) // layout.group
    of_block = torch.arange(2 * BLOCK) // BLOCK
    wanted = d[:, of_block] * scales[:, of_group] * (codes - format_.zero)
    if layout.has_minima:
        wanted = wanted - dmin[:, of_block] * minima[:, of_group]
    torch.testing.assert_close(found.dequantize().double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.rows(slice(1, 3)).dequantize(), found.dequantize()[1:3])


@every_type
def test_nearest_codes_follow_the_weight(name):
    """Errors of so many bits: a uniform code's step, over the range of a group, has a variance of a twelfth."""
    weight = torch.randn(8, 2 * BLOCK, generator=torch.Generator().manual_seed(3)) / 16
    weight[0, :BLOCK] = 0
    weight[1, :BLOCK] = 0.25  # no number but one
    weight[2] *= 1e-6  # steps below the normal numbers of float16
    found = nearest_blocks(weight, KQuant(type=name)).dequantize()
    assert torch.all(found[0, :BLOCK] == 0)
    assert torch.allclose(found[1, :BLOCK], weight[1, :BLOCK], rtol=2**-8)
    error = (found[3:] - weight[3:]).square().mean() / weight[3:].square().mean()
    range_of_normals = 4.2  # of 32 standard normal numbers, on average
    assert error < (range_of_normals / (2 ** KQuant(type=name).layout.bits - 1)) ** 2 / 12


@every_type
def test_costs_decide_what_is_near(name):
    """Weights that cost more have smaller errors than where all cost the same."""
    weight = torch.randn(16, BLOCK, generator=torch.Generator().manual_seed(4))
    cost = torch.ones(BLOCK)
    cost[::4] = 100.0
    same, weighed = (nearest_blocks(weight, KQuant(type=name), c).dequantize() for c in (None, cost))
    assert ((weighed - weight)[:, ::4]).square().sum() < ((same - weight)[:, ::4]).square().sum()


def test_a_fit_knows_its_own_error():
    format_ = KQuant(type="q4_k")
    weight = torch.randn(6, BLOCK, generator=torch.Generator().manual_seed(5))
    x = weight.view(6, format_.layout.groups, -1)
    error = (nearest_blocks(weight, format_).dequantize() - weight).square().sum(1)
    torch.testing.assert_close(fit_blocks(x, torch.ones_like(x), format_).error, error, rtol=1e-4, atol=0)


def test_steps_that_are_no_numbers_are_refused():
    format_ = KQuant(type="q5_k")
    blocks = torch.zeros(2, format_.layout.size, dtype=torch.uint8)
    format_.check({PART: blocks}, 2, BLOCK)
    blocks[1, 2:4] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(CheckpointError, match="weight_blocks holds values of dmin that are not finite"):
        format_.check({PART: blocks}, 2, BLOCK)


def test_what_does_not_fit_is_named():
    assert KQuant(type="q4_k").problem(8, 512) is None
    assert "has 576 inputs; super-blocks of 256 do not fit" in str(KQuant(type="q4_k").problem(8, 576))
    assert "has the type 'q7_k'; readable: q2_k, q3_k" in str(KQuant(type="q7_k").problem(8, 512))
    assert isinstance(KQuant(type="q6_k").read({PART: random_bytes("q6_k")}, 64, 768), KBlocks)
