"""Places of the tensors of a checkpoint in a GGUF file, for both directions.

gguf-py maps names of transformers to those of llama.cpp. Matrices of all experts are one tensor (`ffn_down_exps`,
[E, N, K]); rows of q and k, and values of norms, may lie there otherwise (`architectures`).
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.checkpoint.gguf.architectures import Architecture, kv_heads, rotated_rows
from compress.checkpoint.gguf.library import gguf

SUFFIXES = (".weight", ".bias")
HEAD = "lm_head.weight"
# llama.cpp holds these as float32 whatever their dimensions; a router of float16 would round its input.
WIDE = ("norm.weight", "ffn_gate_inp.weight", "_exps.bias")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
SUFFIXED = {"sinks": "sinks.weight", "e_score_correction_bias": "e_score_correction.bias"}


@dataclass(frozen=True)
class FilePlace:
    """The place of a checkpoint's tensor in a file. name: its name there. heads: those whose rows are rotated; None for
    rows in the same order. shift: what is added to its values. expert: the number of the expert that it is a part of.
    """

    name: str
    heads: int | None
    shift: float
    expert: int | None

    def rows(self, count: int) -> Tensor | None:
        """[count]: the row of the checkpoint that is each row of the file; None for the same order."""
        return None if self.heads is None else rotated_rows(count, self.heads)


def names_of(family: Architecture, config: Any) -> Any:
    """gguf-py's map of names for a family."""
    kind = gguf().MODEL_ARCH[family.name.upper().replace("-", "_")]
    return gguf().get_tensor_name_map(kind, config.num_hidden_layers)


def file_name(tensor: str, names: Any) -> str | None:
    """The name of a tensor in the file, that of all experts for one of an expert; None where it has none."""
    module, _, last = EXPERT.sub(".experts.", tensor).rpartition(".")
    found: str | None = names.get_name(f"{module}.{SUFFIXED.get(last, last)}", SUFFIXES)
    return found


def place_of(tensor: str, family: Architecture, config: Any, names: Any) -> FilePlace | None:
    """The place of a checkpoint's tensor; None where it has none. names: `names_of` the family."""
    name = file_name(tensor, names)
    if name is None:
        return None
    module = tensor.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": kv_heads(config)} if family.rotated else {}
    expert = EXPERT.search(tensor)
    shift = 1.0 if family.shifted and tensor.endswith("norm.weight") else 0.0
    return FilePlace(name, heads.get(module), shift, None if expert is None else int(expert[1]))
