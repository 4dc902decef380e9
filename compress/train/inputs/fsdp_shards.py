"""The shards of FSDP2, before and after they are trained."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module) -> None:
    """Make a model's parameters the shards that are trained; nothing happens to one that is not sharded.

    A root that has run keeps its full parameters, which nobody trains. And of units that have not run yet FSDP looks at
    the parameters, by the names of attributes, which are something else once layers round or prune: it does so now.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
            unit.reshard()
