"""Rotates channels: inserts an orthogonal matrix between a producer and its consumers; the function stays the same.

    y' = Q^T y        W_producer <- Q^T W_producer        W_consumer <- W_consumer Q        (W Q)(Q^T y) = W y

It spreads outliers over channels before they are rounded (QuIP, Chee et al. 2023; QuaRot, Ashkboos et al. 2024).
Only weights change: nothing is added to the model's computation. A whole matrix passes where the path is linear and
treats the channels alike: from the values of one head to the output projection. An activation, a gate or a norm's
weight in between lets only scales pass. A trial decides (`why_not`, and `widest` for the largest matrices).

Shapes: U channels that a consumer reads, in B blocks of D; the rotation is [D, D], the same for all, or [B, D, D].
A consumer may have several copies R of all channels (grouped-query attention: one per query head of a group).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError, InputError
from compress.model.calls import Call
from compress.model.edits.changes import DATA, Applied, change, changing
from compress.model.edits.folds import UNTOUCHED, Consumer, Fold, fold_entry, fold_parts, layer_at, numbers, read_fold
from compress.model.layers import is_linear
from compress.model.structure.excerpt import short_call, tried
from compress.model.structure.hollow_forward import HollowOutputs, hollow_forward
from compress.model.structure.producers import ROUNDING, Producer, distance
from compress.weights.rotations.orthogonal import random_orthogonal


@dataclass(frozen=True, eq=False)
class Rotate:
    """An edit: applies orthogonal matrices to the channels of a fold. Raises InputError for a matrix that is not
    orthogonal or of the wrong shape, and for a fold that takes no matrix."""

    kind: ClassVar[str] = "rotate"

    fold: Fold
    rotation: Tensor

    def __post_init__(self) -> None:
        for problem in unfit(self.fold):
            raise InputError(f"{self.fold.producer} cannot be rotated: {problem}")
        used, shape = int(self.fold.used().sum()), tuple(self.rotation.shape)
        size = shape[-1] if shape else 0
        fits = size > 0 and used % size == 0 and shape in ((size, size), (used // size, size, size))
        if not fits:
            raise InputError(
                f"{self.fold.producer} has {used} channels that are read; given: a rotation of shape {shape}; give "
                "[D, D] or [blocks, D, D], where the blocks have all channels"
            )
        working = self.rotation.double()
        error = (working.mT @ working - torch.eye(size, dtype=torch.float64, device=working.device)).abs().max()
        if not float(error) <= size * torch.finfo(self.rotation.dtype).eps:
            raise InputError(
                f"the rotation for {self.fold.producer} is not orthogonal: Q^T Q is off by {float(error):.1e}"
            )

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Rotate the weights of a block, in float32 or better."""
        producer = layer_at(module, self.fold.producer)
        used_U = self.fold.used().nonzero().flatten().to(producer.weight.device)
        with changing() as done:
            after = self._rows(producer.weight, used_U)
            done.append(change(producer.parameter, DATA, producer.stored(after)))
            bias = getattr(producer.module, "bias", None)
            if bias is not None:
                done.append(change(bias, DATA, self._rows(bias.data[:, None], used_U)[:, 0]))
            for consumer in self.fold.consumers:
                layer = layer_at(module, consumer.name)
                done.append(change(layer.parameter, DATA, layer.stored(self._inputs(layer.weight, consumer))))
        return Applied(tuple(done))

    def _blocks(self, weight: Tensor) -> Tensor:
        """The rotation [B, D, D] in the dtype of the computation."""
        size = self.rotation.shape[-1]
        working = torch.promote_types(weight.dtype, torch.float32)
        return self.rotation.to(weight.device, working).expand(int(self.fold.used().sum()) // size, size, size)

    def _rows(self, weight_NK: Tensor, used_U: Tensor) -> Tensor:
        blocks = self._blocks(weight_NK)
        rows_BDK = weight_NK[used_U].to(blocks.dtype).reshape(*blocks.shape[:2], -1)
        after = weight_NK.clone()
        after[used_U] = (blocks.mT @ rows_BDK).reshape(len(used_U), -1).to(weight_NK.dtype)
        return after

    def _inputs(self, weight_NK: Tensor, consumer: Consumer) -> Tensor:
        blocks = self._blocks(weight_NK)
        columns = copies(consumer).flatten().to(weight_NK.device)
        rows_RBND = weight_NK[:, columns].to(blocks.dtype).reshape(len(weight_NK), -1, *blocks.shape[:2])
        after = weight_NK.clone()
        rotated = rows_RBND.permute(1, 2, 0, 3) @ blocks
        after[:, columns] = rotated.permute(2, 0, 1, 3).reshape(len(weight_NK), -1).to(weight_NK.dtype)
        return after

    def entry(self) -> dict[str, Any]:
        return fold_entry(self.fold, self.kind)

    def parts(self) -> dict[str, Tensor]:
        return {"rotation": self.rotation.cpu().clone().contiguous(), **fold_parts(self.fold)}

    @classmethod
    def read(cls, entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> "Rotate":
        """The stored edit. Raises CheckpointError for an entry that is no such edit."""
        fold = read_fold(entry, parts)
        rotation = numbers(parts, "rotation", (None,) * parts["rotation"].ndim if "rotation" in parts else ())
        try:
            return cls(fold, rotation)
        except InputError as error:
            raise CheckpointError(str(error)) from None


def copies(consumer: Consumer) -> Tensor:
    """[R, U]: for each of the R copies of the channels, the consumer's inputs that read it, in the order of
    channels."""
    order = consumer.channel_of_K.argsort(stable=True)
    order = order[consumer.channel_of_K[order] != UNTOUCHED]
    channels = int(consumer.channel_of_K[order].unique().numel())
    return order.reshape(channels, -1).T


def unfit(fold: Fold) -> list[str]:
    """The reasons why a fold takes no matrix at all; empty where the path between its layers decides (`why_not`)."""
    if fold.kind != "linear":
        return ["a norm multiplies every channel by itself; its weight has no room for a matrix"]
    used = int(fold.used().sum())
    for consumer in fold.consumers:
        counts = consumer.channel_of_K[consumer.channel_of_K != UNTOUCHED].bincount()
        if counts[counts > 0].unique().numel() != 1 or int((counts > 0).sum()) != used:
            return [f"{consumer.name} does not read all of its channels equally often"]
    return []


def why_not(block: nn.Module, call: Call, fold: Fold, size: int) -> list[str]:
    """The reasons why orthogonal matrices of this size do not pass from a producer to its consumers; empty where they
    do.

    A hollow forward on a few tokens of the call rotates the producer's output and checks that the consumers' inputs are
    rotated.
    """
    problems = unfit(fold)
    used_U = fold.used().nonzero().flatten()
    if not problems and len(used_U) % size:
        problems = [f"{len(used_U)} channels do not fall into blocks of {size}"]
    if problems:
        return problems
    rotation = random_orthogonal(size, torch.Generator().manual_seed(0))

    def rotated(x: Tensor, columns: Tensor) -> Tensor:
        after = x.clone()
        after[..., columns] = (x[..., columns].unflatten(-1, (-1, size)) @ rotation.to(x)).flatten(-2)
        return after

    layers = {n: Producer(m, "linear", layer_at(block, n).shape[0]) for n, m in block.named_modules() if is_linear(m)}

    def forwards(exact: Call) -> tuple[HollowOutputs, HollowOutputs]:
        """As it is, and with the producer's output rotated."""
        base = hollow_forward(block, exact, layers)
        return base, hollow_forward(
            block, exact, layers, lambda name, y: rotated(y, used_U) if name == fold.producer else y
        )

    outputs = tried(block, [short_call(call)], forwards)
    if isinstance(outputs, str):
        return [f"the block does not run: {outputs}"]
    base, seen = outputs
    columns = {consumer.name: copies(consumer).flatten() for consumer in fold.consumers}
    for (name, index), x in base.inputs.items():
        expected = rotated(x, columns[name]) if name in columns else x
        off = distance([seen.inputs[name, index]], [expected])
        if off > ROUNDING:
            return [
                f"matrices of {size} channels do not pass to {name}, whose input is off by {off:.1e} of its largest"
            ]
    return []


def widest(block: nn.Module, call: Call, fold: Fold) -> int | None:
    """The largest size D of matrices that pass, at least 2; None where none pass."""
    used = int(fold.used().sum())
    sizes = [size for size in range(used, 1, -1) if used % size == 0]
    if not sizes or why_not(block, call, fold, sizes[-1]):  # blocks of larger matrices are matrices, too
        return None
    return next((size for size in sizes if not why_not(block, call, fold, size)), None)
