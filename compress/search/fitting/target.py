"""The target of `fit`: a size, bits per weight, a KL or a loss on held-out text."""

import math
import re
from dataclasses import dataclass

from scipy.special import stdtrit

from compress.base.errors import InputError
from compress.evaluation.document import Evaluation
from compress.search.budget import Budget, parse_budget

SURE = 0.95  # one-sided, by Student's t over windows
WORDS = "--size 85MB, --bits 3.4 (or --size 3.4bpw), --kl 0.05 or --task-loss 1%"


@dataclass(frozen=True)
class FitTarget:
    """One of these is set. budget: of bytes, or of bits per weight. kl: the most, in nats per token. task_loss: the
    most by which the loss (mean negative log-likelihood) may rise, as a share of the original's."""

    budget: Budget | None = None
    kl: float | None = None
    task_loss: float | None = None

    @property
    def limit(self) -> float:
        """The most that a loss may be."""
        limit = self.kl if self.task_loss is None else self.task_loss
        assert limit is not None
        return limit

    def measured(self, found: Evaluation) -> tuple[float, float]:
        """(The figure that the target limits, and how far above it the mean of all such text is, at most, with a
        certainty of 95 %; 0 where no error is known)."""
        (text,) = found.texts
        figure, unit = text.figures["kl_mean"], 1.0
        if self.task_loss is not None:
            figure, unit = text.figures["log_perplexity_ratio"], math.log(text.figures["reference_perplexity"].value)
        beyond = float(stdtrit(max(1, text.windows - 1), SURE))
        return figure.value / unit, beyond * (figure.error or 0.0) / unit

    def is_met(self, found: Evaluation) -> bool:
        """True where the figure is within the limit on all such text, with a certainty of 95 %."""
        value, margin = self.measured(found)
        return value + margin <= self.limit

    def __str__(self) -> str:
        if self.budget is not None:
            return str(self.budget)
        return f"KL {self.kl:g}" if self.task_loss is None else f"{self.task_loss:.4g} more loss"


def fit_target(
    size: str | None = None, bits: float | None = None, kl: float | None = None, task_loss: str | float | None = None
) -> FitTarget:
    """The target in words and numbers. Raises InputError unless exactly one is given, and for one that cannot be."""
    given = [value for value in (size, bits, kl, task_loss) if value is not None]
    if len(given) != 1:
        raise InputError(f"{len(given)} targets given; give one: {WORDS}")
    if size is not None:
        return FitTarget(parse_budget(size))
    if bits is not None:
        if not 0 < bits < math.inf:
            raise InputError(f"bits {bits}; allowed: above 0, bits per weight of the compressed layers, like 3.4")
        return FitTarget(Budget(bits_per_weight=bits))
    if kl is not None:
        if not 0 < kl < math.inf:
            raise InputError(f"kl {kl}; allowed: above 0, nats per token (0.02 is close to the original)")
        return FitTarget(kl=kl)
    return FitTarget(task_loss=_share(task_loss))


def _share(given: str | float | None) -> float:
    """A share, from 1% or 0.01. Raises InputError."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(%?)", str(given).strip())
    share = 0.0 if found is None else float(found[1]) / (100 if found[2] else 1)
    if not 0 < share < 1:
        raise InputError(f"task loss {given!r}; allowed: above 0, below 100%: by how much the loss may rise, like 1%")
    return share
