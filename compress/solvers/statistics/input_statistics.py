"""Statistics that calibration can collect about the input of a layer.

Every statistic is a sum, a maximum or a minimum, so that batches and ranks combine in any order: `update` takes the
tokens of one micro-batch, `sync` is one collective per tensor, `result` is the finished value. Pad tokens are removed
before `update`. Shapes: M tokens, K channels (the layer's input features). To a convolution a token is a position of
its output and K are the elements of the patch that it sees there, of one group (`engine.walk.collect`); a statistic
that has `reads_elements` set counts each element of the input once instead, as rows of channels.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.base.collectives import Comm


class Statistic(Protocol):
    """A value accumulated over tokens. Made by a `StatisticFactory` for K channels on a device."""

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        """Count the tokens x. `reference`: the same tokens' input in the uncompressed model; None where that is not
        run."""
        ...

    def sync(self, comm: Comm) -> None:
        """Combine with the other ranks. Called once, after the last update, on every rank."""
        ...

    def result(self) -> Any:
        """The finished value."""
        ...


StatisticFactory = Callable[[int, torch.device], Statistic]


class TokenSample:
    """Up to `per_batch` tokens of every micro-batch, evenly spread over it, [tokens, K] in the dtype of x.

    A rank keeps its own sample: results computed from it are summed over the ranks.
    """

    def __init__(self, channels: int, device: torch.device, *, per_batch: int) -> None:
        self.per_batch = per_batch
        self.kept = [torch.empty(0, channels, device=device)]

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        if len(x_MK):
            self.kept.append(x_MK[:: -(-len(x_MK) // self.per_batch)].clone())

    def sync(self, comm: Comm) -> None:
        return

    def result(self) -> Tensor:
        return torch.cat([part for part in self.kept if len(part)] or self.kept)


class ChannelMean:
    """Mean of |x| (or of x) per channel [K], float32; summed in `dtype`."""

    def __init__(
        self, channels: int, device: torch.device, *, absolute: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        self.absolute = absolute
        self.total = torch.zeros(channels, dtype=dtype, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        x = x_MK.to(self.total.dtype)
        self.total += (x.abs() if self.absolute else x).sum(0)
        self.tokens += len(x)

    def sync(self, comm: Comm) -> None:
        comm.all_reduce(self.total)
        comm.all_reduce(self.tokens)

    def result(self) -> Tensor:
        return (self.total / self.tokens.clamp(min=1)).float()


class ChannelNorm:
    """Euclidean norm of x per channel over all tokens [K], float64: squares of large inputs are beyond float32."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.squares = torch.zeros(channels, dtype=torch.float64, device=device)

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        self.squares += x_MK.double().square().sum(0)

    def sync(self, comm: Comm) -> None:
        comm.all_reduce(self.squares)

    def result(self) -> Tensor:
        return self.squares.sqrt()


class MinMax:
    """(lowest, highest) x per channel, each [K], float32. Both are 0 where no token was seen; NaN where one was NaN."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.lowest = torch.full((channels,), float("inf"), device=device)
        self.highest = torch.full((channels,), float("-inf"), device=device)

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        if len(x_MK):
            self.lowest = torch.minimum(self.lowest, x_MK.amin(0).float())
            self.highest = torch.maximum(self.highest, x_MK.amax(0).float())

    def sync(self, comm: Comm) -> None:
        comm.all_reduce(self.lowest, "min")
        comm.all_reduce(self.highest, "max")

    def result(self) -> tuple[Tensor, Tensor]:
        unseen = self.lowest > self.highest
        return self.lowest.masked_fill(unseen, 0.0), self.highest.masked_fill(unseen, 0.0)
