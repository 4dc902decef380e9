"""The results of a benchmark as they grow, and their file.

    {"format": 1, "what": "linears" | "model", "complete": true,
     "command", "date", "commit", "modified", "device", "device_type", "threads", "load", "versions", "cuda",
     "device_peak_bytes": the most that tensors took on a GPU (null on a CPU),
     "settings": {..., "rounds": n, "quoted": "median" | "minimum"},
     "notes": [...], "failures": [...],
     "results": [{...} with figures, or with "skipped": why]}

Results are in `speed.models` (model) and in recipes/studies/kernels/products.py (linears). While the work goes on they
are in FILE.partial, which becomes FILE at the end: FILE is never half a report.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from compress.checkpoint.files import write_named
from compress.evaluation.provenance import timing_origin

FORMAT = 1
# Load average up to which a CPU counts as idle.
IDLE = 0.5


@dataclass
class SpeedReport:
    """Grows during the work; `file` is its destination."""

    what: Literal["linears", "model"]
    device: torch.device
    settings: dict[str, Any]
    file: Path | None = None
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    more: ClassVar[tuple[str, ...]] = ()  # fields of the content that a subclass adds

    def __post_init__(self) -> None:
        self.facts = timing_origin(self.device)
        load = self.facts["load"]
        if self.device.type == "cpu" and load is not None and load > IDLE:
            self.notes.append(f"the machine was busy (load {load:.1f}) when this began: do not quote these figures")
        self.settings["quoted"] = "median" if self.device.type == "cuda" else "minimum"

    def content(self) -> dict[str, Any]:
        """The content of the file."""
        names = ("settings", *self.more, "notes", "failures", "results")
        head = {"format": FORMAT, "what": self.what, "complete": self.complete}
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        whole = head | self.facts | {"device_peak_bytes": peak} | {name: getattr(self, name) for name in names}
        found = _finite(whole)
        assert isinstance(found, dict)
        return found

    def keep(self) -> None:
        """Write the results so far beside the file."""
        if self.file is not None:
            write_named(self._partial(), json.dumps(self.content(), indent=1, allow_nan=False) + "\n")

    def finish(self) -> None:
        """Complete the file."""
        self.complete = True
        self.keep()
        if self.file is not None:
            self._partial().replace(self.file)

    def complaint(self) -> str:
        """The first failure, and the number of all."""
        more = f" ({len(self.failures)} in all)" if len(self.failures) > 1 else ""
        return f"wrong or failed, and not timed: {self.failures[0]}{more}"

    def _partial(self) -> Path:
        assert self.file is not None
        return self.file.with_name(self.file.name + ".partial")


def _finite(value: Any) -> Any:
    """A copy with null for every number that JSON cannot express."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
