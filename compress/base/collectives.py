"""Data-parallel collectives that are no-ops in one process. No pass and no statistic asks how many ranks there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from compress.base.errors import CompressError, WriteError

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class RowShard:
    """This rank's rows (`Comm.rows_of`) of a tensor of `rows` rows."""

    part: Tensor
    rows: int
    comm: "Comm"

    def gathered(self, device: torch.device) -> Tensor:
        """All rows, on every rank. A collective."""
        shares = [self.comm.rows_of(self.rows, rank) for rank in range(self.comm.world)]
        return self.comm.gather_rows(self.part.to(device), [share.stop - share.start for share in shares])


class Comm:
    """Collectives over one process group (the default group when it is initialised, one process otherwise)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.active = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.rank = dist.get_rank(group) if self.active else 0
        self.world = dist.get_world_size(group) if self.active else 1

    @classmethod
    def alone(cls) -> "Comm":
        """The collectives of this process by itself, whatever others there are."""
        comm = cls.__new__(cls)
        comm.group, comm.active, comm.rank, comm.world = None, False, 0, 1
        return comm

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Reduce in place over the ranks and return the tensor."""
        if self.active:
            operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[reduction]
            dist.all_reduce(tensor, op=operation, group=self.group)
        return tensor

    def gather_rows(self, part: Tensor, lengths: Sequence[int]) -> Tensor:
        """Concatenate every rank's rows along dim 0, on every rank. lengths: the rows of each rank. Any dtype."""
        if not self.active:
            return part
        own, part = part.dtype, part.contiguous()
        if part.element_size() == 1:
            part = part.view(torch.uint8)  # collectives know no float8
        padded = part.new_zeros(max(lengths), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([each[:length] for each, length in zip(parts, lengths, strict=True)]).view(own)

    def rows_of(self, rows: int, rank: int | None = None) -> slice:
        """The contiguous rows of a [rows, ...] tensor that a rank works on (by default this rank)."""
        longest = -(-rows // self.world)
        start = min(rows, longest * (self.rank if rank is None else rank))
        return slice(start, min(rows, start + longest))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if not self.active:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def union(self, own: dict[str, T]) -> dict[str, T]:
        """The entries of all ranks' dictionaries, on every rank."""
        return {key: value for part in self.gather_objects(own) for key, value in part.items()}

    def fail_together(self, problem: str | WriteError | None) -> None:
        """Raise on every rank when any rank has a problem: its WriteError, or CompressError with its message. A rank
        that raised alone would leave the others waiting in a collective for ever."""
        first = next((p for p in self.gather_objects(problem) if p is not None), None)
        if first is not None:
            raise first if isinstance(first, WriteError) else CompressError(first)

    def barrier(self) -> None:
        if self.active:
            dist.barrier(group=self.group)

    def assign(self, costs: Mapping[str, float]) -> dict[str, int]:
        """{name: rank}: gives each task, the most expensive first, to the least loaded rank. Equal on every rank."""
        load = [0.0] * self.world
        owners: dict[str, int] = {}
        for name in sorted(costs, key=lambda n: (-costs[n], n)):
            owners[name] = load.index(min(load))
            load[owners[name]] += costs[name]
        return owners
