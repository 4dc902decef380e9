"""The shards of FSDP2, before and after they are trained."""

from math import prod

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard


def copies(tensor: Tensor) -> int:
    """The number of ranks that hold the same shard of a tensor: the replicas (HSDP), 1 without any."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in sizes if not isinstance(placement, Shard))


def reshard(model: nn.Module) -> None:
    """Make a model's parameters the shards that are trained; nothing happens to one that is not sharded.

    A root that has run keeps its full parameters, which nobody trains. And of units that have not run yet FSDP looks at
    the parameters, by the names of attributes, which are something else once layers round or prune: it does so now.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
            unit.reshard()
