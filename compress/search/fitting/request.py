"""The request to `fit`: a model, a target (a size, bits per weight, a KL or a loss on held-out text), and texts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from scipy.special import stdtrit
from torch import Tensor

from compress.base.errors import InputError
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.pretrained import tokenizer_of
from compress.data.text import load_tokens
from compress.evaluation.document import Evaluation
from compress.jobs.calibration_data import RunData, calibration_data
from compress.jobs.forecast.forecast import Forecast, plan
from compress.jobs.model_source import FoundModel, find_model
from compress.jobs.request import Request
from compress.passes.protocol.base import Pass
from compress.search.budget import Budget, parse_budget
from compress.search.texts import Texts, in_rows

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


HELD_OUT = 32  # windows, at most
LEAST = 4  # windows of calibration data for each held-out window, at least


@dataclass(frozen=True)
class FitData:
    """request: with calibration data, read as `read`. rows: held-out token ids [windows, length], of `source`."""

    request: Request
    read: RunData
    rows: Tensor
    source: str

    @property
    def windows(self) -> tuple[int, int]:
        """(Number, tokens) of the windows of calibration data."""
        assert self.read.tokens is not None
        count, length = self.read.tokens.ids.shape
        return count, length

    @property
    def texts(self) -> Texts:
        """Calibration data and held-out rows, as recipes are run with them."""
        asked = self.request
        assert isinstance(asked.calibration, str | Tensor)
        sizes = (asked.samples, asked.length, None, None, asked.batch_size, asked.bos)
        return Texts(asked.calibration, self.rows, None, *sizes)


@dataclass(frozen=True)
class FitRequest:
    """A model and calibration data, a target and held-out text (None: the last windows of the calibration data)."""

    asked: Request
    target: FitTarget
    text: str | Tensor | None = None

    @property
    def model(self) -> str:
        """The model's directory, hub id or name, as it was given."""
        return str(self.asked.model)

    @property
    def shared(self) -> dict[str, Any]:
        """The arguments that reading and measuring models has in common."""
        return {"device": self.asked.device, "trust_remote_code": self.asked.trust_remote_code}

    @cached_property
    def found(self) -> FoundModel:
        """The model, of which no weight has been read."""
        return find_model(self.model, **self.shared)

    @property
    def name(self) -> str:
        """The model's, as a person calls it."""
        assert self.found.source is not None
        return portable(self.found.source.name)

    def plan(self, passes: Pass | Sequence[Pass], samples: int | None = None, length: int | None = None) -> Forecast:
        """The forecast of a run of these passes on the model. samples, length: as in `compress.plan`."""
        how: dict[str, Any] = {"ignore": self.asked.ignore, "trust_remote_code": self.asked.trust_remote_code}
        return plan(self.model, passes, samples=samples, length=length, **how)

    @cached_property
    def data(self) -> FitData:
        """The texts, read. Raises InputError for data that is not of tokens, or too little of it."""
        asked, text = self.asked, self.text
        read = calibration_data(asked, self.found, "fit")
        tokens = read.tokens
        if tokens is None:
            raise InputError("fit measures next tokens: give calibration text or token ids, not images or batches")
        if text is not None:
            how: dict[str, Any] = {"length": asked.length, "bos": None if in_rows(text) else asked.bos}
            most = min(HELD_OUT, len(text)) if isinstance(text, Tensor) else HELD_OUT
            tokenizer = partial(tokenizer_of, self.found.source)
            rows = load_tokens(text, tokenizer, self.found.config, what="held-out", samples=most, **how)
            return FitData(asked, read, rows.ids, rows.source)
        if tokens.mask is not None:
            raise InputError(
                f"{tokens.source} makes windows with padding, of which none are held out; give --text TEXT"
            )
        count = min(HELD_OUT, len(tokens.ids) // (LEAST + 1))
        if count < 2:
            raise InputError(
                f"calibration has {len(tokens.ids)} windows, of which a fifth is held out: give {2 * (LEAST + 1)} or "
                "more, or --text TEXT"
            )
        rest = replace(asked, calibration=tokens.ids[:-count], samples=None, length=None, bos=None)
        source = f"{portable(tokens.source)}, held out"
        return FitData(rest, calibration_data(rest, self.found, "fit"), tokens.ids[-count:], source)
