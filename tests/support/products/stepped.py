"""What kernels of a step compute, by torch: norms, products and attention of one token per sequence."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from compress.inference.steps.form import rotate_by_halves
from compress.inference.steps.parts import normalize
from compress.kernels.step_functions import Activation, Norm
from compress.kernels.triton.steps.attention import HeadStates
from compress.kernels.triton.steps.norms import RowNorm

ACTIVATIONS = {
    Activation.SILU: silu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    Activation.GELU: gelu,
    Activation.RELU: relu,
}
# Largest difference, relative to the largest number: sums of products in fp32, rounded a few times.
BOUND = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*size: int, seed: int = 0, like: Tensor) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(like)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    bound = BOUND[found.dtype] * float(expected.abs().max())
    assert float((found.double() - expected.double()).abs().max()) <= bound


def norm_of(variant: Norm, size: int, like: Tensor) -> RowNorm:
    weight = random(size, seed=5, like=like) * 0.1 + (0 if variant == Norm.RMS_PLUS_ONE else 1)
    return RowNorm(variant, weight, random(size, seed=6, like=like) if variant == Norm.LAYER else None, 1e-5)


def normed(x: Tensor, norm: RowNorm | None) -> Tensor:
    return x if norm is None else normalize(norm.variant, x, norm.weight, norm.bias, norm.epsilon)


def states_of(
    batch: int, heads: int, key_heads: int, sizes: tuple[int, int, int], head_norm: bool, like: Tensor
) -> HeadStates:
    """sizes: of a key, of a value, of what turns."""
    size, value_size, rotated = sizes
    of = enumerate((heads * size, key_heads * size, key_heads * value_size))
    angle = torch.rand(batch, rotated // 2, generator=torch.Generator().manual_seed(9)).repeat(1, 2) * 6
    turn = (angle.cos().to(like), angle.sin().to(like)) if rotated else None
    norm = norm_of(Norm.RMS, size, like) if head_norm else None
    return HeadStates(*(random(batch, width, seed=i, like=like) for i, width in of), norm, norm, turn)


def attended(
    states: HeadStates, keys: Tensor, values: Tensor, place: int, seen: slice, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(Result, key, value) of attention over the tokens `seen`, of which `place` is the new one."""
    batch, key_heads, _, size = keys.shape
    found = []
    for x, norm in ((states.query, states.query_norm), (states.key, states.key_norm)):
        x = normed(x.view(batch, -1, 1, size), norm)
        found.append(x if states.turn is None else rotate_by_halves(x, *(part[:, None] for part in states.turn)))
    keys, values = keys.clone(), values.clone()
    keys[:, :, place], values[:, :, place] = found[1][:, :, 0], states.value.view(batch, key_heads, -1)
    given = (found[0].float(), keys[:, :, seen].float(), values[:, :, seen].float())
    mask = None if mask is None else mask[:, None, None]
    out = scaled_dot_product_attention(*given, mask, scale=scale, enable_gqa=True)
    return out.to(keys.dtype).transpose(1, 2).flatten(1), keys[:, :, place], values[:, :, place]
