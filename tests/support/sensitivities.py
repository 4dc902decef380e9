"""Sensitivities of models in memory, of token ids as data."""

from collections.abc import Sequence

import torch

from compress.checkpoint.sensitivity import Sensitivity
from compress.jobs.calibration_data import calibration_data
from compress.jobs.model_source import find_model
from compress.jobs.request import Request
from compress.search.candidate import Candidate
from compress.search.sensitivity import open_study


def measure_sensitivity(
    model: torch.nn.Module | str, candidates: Sequence[Candidate], *, calibration: torch.Tensor, text: torch.Tensor
) -> Sensitivity:
    """The sensitivities of a model to candidates. text: held-out rows."""
    found = find_model(model, None, False)
    data = calibration_data(Request(model=model, calibration=calibration), found, "measuring")
    return open_study(found, data, text).measure(candidates)
