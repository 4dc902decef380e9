"""The result of restructuring a model, by one pass or several: what is recorded, said and undone."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from compress.base.errors import CompressError
from compress.model.edits.changes import Applied, undo
from compress.model.tensors import size_of

MIB = 2**20


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, and the bytes that its tensors take in a checkpoint."""

    parameters: int
    bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSize":
        """The size of a model. Tensors that it shares count once."""
        return cls(*size_of(model))

    def said(self, before: "ModelSize") -> str:
        """Words for what is left of a model of another size."""
        return (
            f"{self.parameters} of {before.parameters} parameters ({self.parameters / before.parameters:.1%}), "
            f"{self.bytes / MIB:.2f} of {before.bytes / MIB:.2f} MiB"
        )


@dataclass
class Restructured:
    """A model that was edited as a whole: the entry of compress.json, notes for the user, and changes to undo."""

    record: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changes: list[Applied] = field(default_factory=list)

    def undo(self) -> None:
        """Make the model what it was, bit for bit."""
        while self.changes:
            undo(self.changes.pop())

    def begin(self, before: ModelSize, after: ModelSize) -> None:
        """Enter the sizes before a pass and after it; of several passes the first and the last count."""
        self.record.setdefault("before", vars(before))
        self.record["after"] = vars(after)
        for key in ("dropped", "cut"):
            self.record.setdefault(key, [])

    def finish(self, model: nn.Module, config: dict[str, Any], foreseen: ModelSize) -> None:
        """Enter what has changed of a configuration. Raises CompressError for a model of another size than foreseen."""
        left = ModelSize.of(model)
        if left != foreseen:
            raise CompressError(f"what is left is {left}; foreseen was {foreseen}")
        earlier, now = self.record.get("config", {}), config_of(model)
        was = {key: earlier[key][0] if key in earlier else config.get(key) for key in now}
        self.record["config"] = {key: [was[key], new] for key, new in now.items() if was[key] != new}

    @property
    def fingerprint(self) -> str:
        """The fingerprint of what was changed; a resumed run must have changed the same."""
        went = [self.record["dropped"], [(cut["block"], cut["cut"], cut["removed"]) for cut in self.record["cut"]]]
        if "hidden" in self.record:
            went.append(self.record["hidden"]["removed"])
        if "edits" in self.record:
            went.append(self.record["edits"])
        return hashlib.sha256(json.dumps(went).encode()).hexdigest()


def config_of(model: nn.Module) -> dict[str, Any]:
    """A model's configuration as it is now; nothing for a model without one."""
    config = getattr(model, "config", None)
    return json.loads(config.to_json_string(use_diff=False)) if isinstance(config, PretrainedConfig) else {}
