"""What `compress evaluate --json` holds: the figures, and what is needed to quote them.

{"model", "reference", "recipe": {"passes": [...]} | null,       null: not written by this tool
 "protocol", "perplexity", ..., "standard_errors": {figure: error}, "text", "text_sha256", ...,     `Evaluation`
 "command", "date", "commit", "modified", "device", "device_type", "threads", "versions", "cuda"}
"""

from dataclasses import asdict
from typing import Any

import torch

from compress.checkpoint.files import RECORD
from compress.checkpoint.manifest import read_record
from compress.checkpoint.source import find_source
from compress.evaluation.evaluate import Evaluation
from compress.evaluation.quality import PROTOCOL
from compress.kernels.measure.provenance import origin
from compress.version import VERSION


def report(model: str, reference: str | None, recipe: Any, found: Evaluation, device: torch.device) -> dict[str, Any]:
    """The figures of a model with their circumstances; `model` and `reference` as they were given."""
    facts = origin(device)
    return {
        "model": model,
        "reference": reference,
        "recipe": recipe,
        "protocol": PROTOCOL,
        **asdict(found),
        **facts,
        "versions": {"compress": VERSION, **facts["versions"]},
    }


def recipe_of(model: str) -> Any:
    """The recipe of a checkpoint, every option spelled out; None where no run of this tool has written it."""
    record = find_source(model).path / RECORD
    identity = read_record(record.parent).get("identity") if record.exists() else None
    return identity.get("recipe") if isinstance(identity, dict) else None
