"""A convolution as a linear map: lays out the input elements that every output multiplies.

    y[b, n, p] = sum_k W[n, k] patch[g(n), (b, p), k]        K = (C / groups) * prod(kernel),  M = B * positions

The weight [N, C / groups, *kernel] flattened to [N, K] has the columns in the order in which `patches` lays them out.
A grouped convolution is `groups` independent maps: rows [g N / groups, (g + 1) N / groups) multiply patches[g].
Shapes: B samples, C channels, S spatial sizes, N outputs, K inputs of one output, M rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Mode = Literal["constant", "reflect", "replicate", "circular"]
KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHUNK = 2**24  # elements of patches laid out at a time


@dataclass(frozen=True)
class Geometry:
    """The parameters of a convolution except its weight. padding: (before, after) of each spatial dimension; mode: the
    values that fill it."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    mode: Mode = "constant"


def is_convolution(module: nn.Module) -> bool:
    """True for a Conv1d, Conv2d or Conv3d that computes as torch does. A subclass may compute with another weight than
    the one it stores."""
    kind = next((kind for kind in KINDS if isinstance(module, kind)), None)
    if kind is None:
        return False
    same = all(getattr(type(module), name) is getattr(kind, name) for name in ("forward", "_conv_forward"))
    return same and isinstance(module._parameters.get("weight"), nn.Parameter)


def geometry_of(module: nn.Module) -> Geometry:
    """The geometry of a Conv1d, Conv2d or Conv3d."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    kernel, dilation = tuple(module.kernel_size), tuple(module.dilation)
    if module.padding == "valid":
        padding = tuple((0, 0) for _ in kernel)
    elif module.padding == "same":
        whole = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        padding = tuple((w // 2, w - w // 2) for w in whole)
    else:
        padding = tuple((int(p), int(p)) for p in module.padding)
    modes: dict[str, Mode] = {
        "zeros": "constant",
        "reflect": "reflect",
        "replicate": "replicate",
        "circular": "circular",
    }
    return Geometry(kernel, tuple(module.stride), padding, dilation, module.groups, modes[module.padding_mode])


def samples(x: Tensor, geometry: Geometry) -> Tensor:
    """A convolution's input as a batch [B, C, *S]; a single sample [C, *S], which torch allows, gets B = 1."""
    return x.unsqueeze(0) if x.ndim == len(geometry.kernel) + 1 else x


def elements(x: Tensor, geometry: Geometry) -> Tensor:
    """The input as rows of channels [B * prod(S), C]: every element once, even where the kernel overlaps or skips."""
    batch = samples(x, geometry)
    return batch.movedim(1, -1).reshape(-1, batch.shape[1])


def on_channels(x: Tensor, geometry: Geometry | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies `change` to a layer's input or output with its channels as the last dimension. geometry: None for a layer
    that is no convolution, whose channels are last already."""
    if geometry is None:
        return change(x)
    channel = -1 - len(geometry.kernel)
    return change(x.movedim(channel, -1)).movedim(-1, channel)


def on_samples(x: Tensor, geometry: Geometry | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies `change` to a layer's input or output with one row per token (linear layer, geometry None) or one flat
    row per sample (convolution)."""
    return change(x) if geometry is None else change(samples(x, geometry).flatten(1)).reshape(x.shape)


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """[groups, M, K]: the input elements that every output position multiplies, padding included. Any dtype."""
    batch, dims = samples(x, geometry), len(geometry.kernel)
    margins = [size for pair in reversed(geometry.padding) for size in pair]
    if any(margins):
        batch = pad(batch, margins, mode=geometry.mode)
    for i, (k, stride, d) in enumerate(zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)):
        batch = batch.unfold(2 + i, d * (k - 1) + 1, stride)[..., ::d]
    # [B, groups, C / groups, *positions, *kernel]
    grouped = batch.unflatten(1, (geometry.groups, -1))
    columns = grouped.shape[2] * grouped.shape[3 + dims :].numel()
    positions, window = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    return grouped.permute(1, 0, *positions, 2, *window).reshape(geometry.groups, -1, columns)


def patches_in_parts(x: Tensor, geometry: Geometry) -> Iterator[Tensor]:
    """`patches` of a few samples at a time, to bound memory (`CHUNK`)."""
    batch = samples(x, geometry)
    window = torch.Size(geometry.kernel).numel()
    each = max(1, CHUNK // max(1, batch[:1].numel() * window))
    for part in batch.split(each):
        yield patches(part, geometry)


def output_sizes(sizes: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """The spatial sizes of the output from those of the input."""
    g = geometry
    return tuple(
        (size + sum(margin) - d * (k - 1) - 1) // stride + 1
        for size, margin, d, k, stride in zip(sizes, g.padding, g.dilation, g.kernel, g.stride, strict=True)
    )
