"""The options of pruning during training, and of penalties that shrink weights."""

from dataclasses import dataclass
from typing import Literal, get_args

from compress.base.errors import InputError, check_idle, one_of
from compress.weights.masks import Pattern, parse_pattern

Per = Literal["row", "layer", "model"]
Groups = Literal["outputs", "inputs"]
# Without a final share of zeros these have no effect.
OF_PRUNING = ("prune_per", "prune_from", "prune_until", "prune_every")


@dataclass(frozen=True, kw_only=True)
class SparsityOptions:
    """The options of sparsity during training: the share of zeros, the weights they may take, their schedule, and
    penalties."""

    sparsity: float = 0.0
    """0 to 1, below 1: share of weights that are zero in the end, the smallest, ever more of them; 0: none."""

    pattern: str = ""
    """N:M, like 2:4, or nothing: instead of a share, N of every M inputs in a row stay in the end."""

    prune_per: Per = "layer"
    """Scope in which the smallest weights are sought: each output, each layer, or all layers together."""

    prune_from: float = 0.0
    """0 to 1: share of the steps after which the first weights become zero."""

    prune_until: float = 0.75
    """0 to 1: share of the steps after which there are as many zeros as asked for; the rest recovers."""

    prune_every: int = 10
    """1 or more: steps between two updates of the masks."""

    l1: float = 0.0
    """0 or more: weight of the sum of all absolute values of the layers, added to the loss."""

    group_lasso: float = 0.0
    """0 or more: weight of the sum of the groups' lengths, each times the root of its size, added to the loss."""

    lasso_groups: Groups = "outputs"
    """Groups that group_lasso draws to zero as a whole: all weights of an output, or all of an input (channel)."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the pass that these are options of
        one_of("prune_per", self.prune_per, get_args(Per))
        one_of("lasso_groups", self.lasso_groups, get_args(Groups))
        if not 0 <= self.sparsity < 1:
            raise InputError(f"sparsity {self.sparsity}; allowed: 0 or more, below 1; 0 prunes nothing")
        if not 0 <= self.prune_from <= self.prune_until <= 1:
            raise InputError(
                f"prune_from {self.prune_from}, prune_until {self.prune_until}; allowed: shares of the steps, 0 to 1, "
                "the first not above the second"
            )
        if self.prune_every < 1:
            raise InputError(f"prune_every {self.prune_every}; allowed: 1 or more steps")
        for name in ("l1", "group_lasso"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} {getattr(self, name)}; allowed: 0 or more")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse options that contradict each other, or have no effect without another."""
        pattern = self.final_pattern
        if pattern is not None and self.sparsity not in (0, pattern.sparsity):
            raise InputError(
                f"pattern {self.pattern} makes {pattern.sparsity:.4g} of weights zero, not sparsity {self.sparsity}; "
                "give one"
            )
        if pattern is not None and self.prune_per != self._default("prune_per"):
            raise InputError(f"prune_per {self.prune_per} has no say in pattern {self.pattern}; leave one out")
        idle = [name for name in OF_PRUNING if getattr(self, name) != self._default(name)]
        if idle and not self.prunes:
            raise InputError(
                f"{idle[0]} is of pruning, which nothing asks for; give sparsity or pattern, or leave it out"
            )
        check_idle(self, {"lasso_groups": ["group_lasso"]})

    @classmethod
    def _default(cls, name: str) -> object:
        return cls.__dataclass_fields__[name].default

    @property
    def final_pattern(self) -> Pattern | None:
        """The pattern, if there is one."""
        return parse_pattern(self.pattern) if self.pattern else None

    @property
    def prunes(self) -> bool:
        """True where weights are pruned for good."""
        return bool(self.pattern or self.sparsity)

    @property
    def shrinks(self) -> bool:
        """True where there is a penalty."""
        return bool(self.l1 or self.group_lasso)
