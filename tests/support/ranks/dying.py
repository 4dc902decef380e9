"""A pass that kills the process of rank 1 in the second block: for recipes, as `dying:Dying`."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from compress import RTN
from compress.passes.protocol.sites import Site
from compress.weights.decision import Decision


@dataclass(frozen=True, kw_only=True)
class Dying(RTN):
    """RTN, until it is killed; in one process it is plain RTN."""

    name: ClassVar[str] = "dying"

    def apply(self, site: Site) -> Mapping[str, Decision]:
        if os.environ.get("RANK") == "1" and any("layers.1." in name for name in site.weights):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().apply(site)


@dataclass(frozen=True, kw_only=True)
class DyingNode(RTN):
    """RTN, until the second torchrun is killed with its process: a machine that is lost."""

    name: ClassVar[str] = "dying-node"

    def apply(self, site: Site) -> Mapping[str, Decision]:
        if os.environ.get("GROUP_RANK") == "1" and any("layers.1." in name for name in site.weights):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().apply(site)
