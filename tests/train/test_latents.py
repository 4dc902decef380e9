"""Where weights begin to be trained: within the codes that were decided, near the original."""

import torch
from combinations import every
from commands import make_llama
from models import strong, tokens

import compress
from compress.model.layers import Layer
from compress.train.rounding.latents import PARTS, ROOM, TOGETHER, places_of, start_weight
from compress.weights.decision import Decision
from compress.weights.formats.sparse import sparse
from compress.weights.grid import Grid, Quantized, encode, grouped, quantize
from compress.weights.matrix import Weight

GROUPED = {"granularity": "group", "group_size": 8}
GRIDS = [
    Grid(bits=2, signed_scale=True, **GROUPED),
    Grid(bits=4, symmetric=False, **GROUPED),
    Grid(bits=2, narrow=True, **GROUPED),
    Grid(bits=8, granularity="tensor"),
]


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))


@every(["grid", "dtype"], [(grid, dtype) for grid in GRIDS for dtype in (torch.float32, torch.bfloat16)])
def test_a_weight_begins_at_the_original_or_as_near_as_its_code_lets_it(grid, dtype):
    original = numbers(0)
    for moved, room in (
        (quantize(original, grid, dtype), ROOM),
        (quantize(original + numbers(1), grid, dtype), TOGETHER),
    ):
        _check(original, moved, room)


def _check(original: torch.Tensor, moved: Quantized, room: float) -> None:
    grid = moved.grid
    latent = start_weight(Decision(moved), places_of(Decision(moved), original), torch.float32)
    scale = moved.scale.float().reshape(*grouped(latent, grid).shape[:-1], 1)
    zero = 0 if moved.zero_point is None else moved.zero_point.float().reshape(scale.shape)
    codes = grouped(moved.codes.float(), grid)
    assert torch.equal(encode(grouped(latent, grid), scale, torch.zeros_like(scale) + zero, grid), codes)
    off = (grouped(original, grid) / scale + zero - codes).clamp(-room, room)
    expected = ((codes - zero + off) * scale).reshape(latent.shape)
    assert ((latent - expected).abs() <= scale.abs().max() * ROOM / PARTS).all()


def test_masks_and_other_terms_are_left_to_themselves():
    original, kept = numbers(0), numbers(3) > 0
    codes = quantize(original * kept, GRIDS[0], torch.float32)
    pruned = Decision(codes, kept=kept)
    assert not start_weight(pruned, places_of(pruned, original), torch.float32)[~kept].any()
    other = sparse(original, original > 1)
    summed = Decision(Weight((quantize(original - other.dequantize(), GRIDS[0], torch.float32), other)))
    latent = start_weight(summed, places_of(summed, original), torch.float32)
    assert (latent - original).norm() < 0.7 * (summed.weight.dequantize() - original).norm()


WITHOUT_ROOM = [
    Grid(bits=1, type="sign", **GROUPED),
    Grid(bits=8, granularity="channel", type="float"),
    Grid(bits=4, type="normal", **GROUPED),
    Grid(bits=4, type="nonlinear", **GROUPED),
]


@every("grid", WITHOUT_ROOM)
def test_signs_floats_and_levels_have_no_room(grid):
    assert places_of(Decision(quantize(numbers(0), grid, torch.float32)), numbers(0)) is None


@every("dtype", [torch.float32, torch.bfloat16])
def test_a_model_begins_near_the_original_with_the_codes_that_were_decided(dtype):
    """8 bits of a model of 16-bit numbers, which cannot tell where in its code a weight lies, among them."""
    for options in ({"scheme": "w8a16"}, {"scheme": "w3a16", "grid": "asymmetric"}):
        passes = [compress.SmoothQuant(scheme="w4a8", rounding="none"), compress.GPTQ(group_size=16, **options)]
        decided = compress.quantize(strong(dtype=dtype), passes, calibration=tokens(4), restore=False).model
        prepared = compress.prepare_qat(strong(dtype=dtype), passes, calibration=tokens(4))
        nearer = 0
        for layer, theirs in zip(prepared.layers, _layers(decided, prepared.layers), strict=True):
            assert torch.equal(layer.module.rounded_weight.to(dtype), theirs.weight)
            nearer += not torch.equal(layer.weight, layer.module.rounded_weight)
        assert nearer == len(prepared.layers)


@every("scheme", ["nf4a16", "iq4_nl", "mxfp4", "nvfp4", "mxfp8", "fp8-block"])
def test_a_model_begins_as_it_was_decided(scheme):
    """Codes that stand for levels, and inputs rounded in groups of a token."""
    of_scheme, ids, sizes = compress.RTN(scheme=scheme), tokens(4), {"hidden_size": 256, "intermediate_size": 256}
    decided = compress.quantize(make_llama(**sizes), of_scheme, calibration=ids).model
    prepared = compress.prepare_qat(make_llama(**sizes), of_scheme, calibration=ids)
    with torch.no_grad():
        seen, expected = (model(input_ids=ids).logits for model in (prepared.model, decided))
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


def _layers(model: torch.nn.Module, like: list[Layer]) -> list[torch.nn.Module]:
    return [model.get_submodule(layer.name) for layer in like]
