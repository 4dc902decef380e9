"""Shows layers behind those that a configuration counts as dense, where they are float8 in blocks.

    model.layers.61.mlp.experts.0.up_proj.weight             F8_E4M3 [N, K]
    model.layers.61.mlp.experts.0.up_proj.weight_scale_inv   F32 [N / 128, K / 128]

DeepSeek-V3 and R1 have their head that predicts several tokens there, with experts of its own. transformers has no
place for it; a run keeps it, as numbers of the model's dtype, for its output has no other float8 of that kind.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.read.views import View, ViewedFiles
from compress.checkpoint.read.weight_files import DTYPES, WeightFiles
from compress.kernels.operators.fp8_blocks import dequantized

SCALES = "_scale_inv"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def dense_behind(files: WeightFiles, config: Mapping[str, Any]) -> WeightFiles:
    """The files with these layers dense; the files themselves where there are none."""
    count, said = config.get("num_hidden_layers"), config.get("dtype", config.get("torch_dtype"))
    dtype = next((name for name, each in DTYPES.items() if str(each) == f"torch.{said}"), "BF16")
    hidden: set[str] = set()
    views: dict[str, View] = {}
    for scales in files:
        name, layer = scales.removesuffix(SCALES), LAYER.search(scales)
        if name != scales and name in files and isinstance(count, int) and layer is not None and int(layer[1]) >= count:
            hidden |= {name, scales}
            views[name] = View((files.headers[name][0], dtype), (name, scales), partial(_values, DTYPES[dtype]))
    return ViewedFiles(files, hidden, views) if views else files


def _values(dtype: torch.dtype, codes_NK: Tensor, scale_GG: Tensor) -> Tensor:
    """[N, K] the values of codes with a scale for each block."""
    return dequantized(codes_NK, scale_GG, slice(0, len(codes_NK))).to(dtype)
