"""compress: smaller PyTorch and Hugging Face models, with an honest account of what it cost.

import compress
result = compress.quantize("demo", compress.GPTQ(scheme="w4a16"), calibration="demo", output="out")
print(compress.evaluate("out", reference="demo", text="demo").kl_mean)

Importing it is cheap and changes nothing: a name is looked up in its module when it is first used, which is when torch
and transformers are imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compress.errors import CheckpointError, CompressError, InputError
from compress.version import VERSION

if TYPE_CHECKING:
    from compress.api import quantize
    from compress.budget import Allocation, allocate
    from compress.caching import Cached, cache_logits
    from compress.candidates import grid_of_candidates
    from compress.checkpoint.exported import Exported, export_dense
    from compress.checkpoint.exported24 import export_sparse24
    from compress.evaluation.classifiers import evaluate_classifier
    from compress.evaluation.document import Evaluation
    from compress.evaluation.encoders import evaluate_encoder
    from compress.evaluation.evaluate import evaluate
    from compress.job import Result
    from compress.model.batchnorm import BatchNormFolds, fold_batch_norm
    from compress.passes.awq import AWQ
    from compress.passes.base import Pass
    from compress.passes.binary import Binary
    from compress.passes.candidate import Candidate
    from compress.passes.embeddings import Embeddings
    from compress.passes.gptq import GPTQ
    from compress.passes.kv_cache import KVCache
    from compress.passes.low_rank import LowRank
    from compress.passes.lqs import LQS
    from compress.passes.magnitude import Magnitude
    from compress.passes.reconstruct import Reconstruct
    from compress.passes.rtn import RTN
    from compress.passes.smoothquant import SmoothQuant
    from compress.passes.sparsegpt import SparseGPT
    from compress.passes.spqr import SpQR
    from compress.passes.structure import Structure
    from compress.passes.taylor import Taylor
    from compress.passes.ternary import Ternary
    from compress.passes.train import Train
    from compress.passes.wanda import Wanda
    from compress.passes.where import but, only
    from compress.qat import Prepared, prepare_qat
    from compress.recipe import load_recipe
    from compress.runtime.adapters import lora
    from compress.runtime.linear import QuantLinear
    from compress.runtime.loading import load, register
    from compress.runtime.steps import compile_steps
    from compress.sensitivity import measure_sensitivity
    from compress.trials.rows import Sweep
    from compress.trials.sweep import sweep
    from compress.trials.within import Mixed, quantize_within
    from compress.verification import verify
    from compress.weights.grid import Grid, Quantized, fake_quantize

__version__ = VERSION

# Where each name lives; the imports above say the same to type checkers. No module is called like a public name: its
# import would put the module in the name's place.
_HOMES = {
    "AWQ": "compress.passes.awq",
    "GPTQ": "compress.passes.gptq",
    "LQS": "compress.passes.lqs",
    "RTN": "compress.passes.rtn",
    "Allocation": "compress.budget",
    "Binary": "compress.passes.binary",
    "BatchNormFolds": "compress.model.batchnorm",
    "Cached": "compress.caching",
    "Candidate": "compress.passes.candidate",
    "Embeddings": "compress.passes.embeddings",
    "Evaluation": "compress.evaluation.document",
    "Exported": "compress.checkpoint.exported",
    "Grid": "compress.weights.grid",
    "KVCache": "compress.passes.kv_cache",
    "LowRank": "compress.passes.low_rank",
    "Magnitude": "compress.passes.magnitude",
    "Mixed": "compress.trials.within",
    "Pass": "compress.passes.base",
    "Prepared": "compress.qat",
    "QuantLinear": "compress.runtime.linear",
    "Quantized": "compress.weights.grid",
    "Reconstruct": "compress.passes.reconstruct",
    "Result": "compress.job",
    "SmoothQuant": "compress.passes.smoothquant",
    "SparseGPT": "compress.passes.sparsegpt",
    "SpQR": "compress.passes.spqr",
    "Structure": "compress.passes.structure",
    "Sweep": "compress.trials.rows",
    "Taylor": "compress.passes.taylor",
    "Ternary": "compress.passes.ternary",
    "Train": "compress.passes.train",
    "Wanda": "compress.passes.wanda",
    "allocate": "compress.budget",
    "but": "compress.passes.where",
    "cache_logits": "compress.caching",
    "compile_steps": "compress.runtime.steps",
    "evaluate": "compress.evaluation.evaluate",
    "evaluate_classifier": "compress.evaluation.classifiers",
    "evaluate_encoder": "compress.evaluation.encoders",
    "export_dense": "compress.checkpoint.exported",
    "export_sparse24": "compress.checkpoint.exported24",
    "fake_quantize": "compress.weights.grid",
    "fold_batch_norm": "compress.model.batchnorm",
    "grid_of_candidates": "compress.candidates",
    "load": "compress.runtime.loading",
    "load_recipe": "compress.recipe",
    "lora": "compress.runtime.adapters",
    "measure_sensitivity": "compress.sensitivity",
    "only": "compress.passes.where",
    "prepare_qat": "compress.qat",
    "quantize": "compress.api",
    "quantize_within": "compress.trials.within",
    "register": "compress.runtime.loading",
    "sweep": "compress.trials.sweep",
    "verify": "compress.verification",
}

__all__ = [
    "AWQ",
    "GPTQ",
    "LQS",
    "RTN",
    "Allocation",
    "BatchNormFolds",
    "Binary",
    "Cached",
    "Candidate",
    "CheckpointError",
    "CompressError",
    "Embeddings",
    "Evaluation",
    "Exported",
    "Grid",
    "InputError",
    "KVCache",
    "LowRank",
    "Magnitude",
    "Mixed",
    "Pass",
    "Prepared",
    "QuantLinear",
    "Quantized",
    "Reconstruct",
    "Result",
    "SmoothQuant",
    "SpQR",
    "SparseGPT",
    "Structure",
    "Sweep",
    "Taylor",
    "Ternary",
    "Train",
    "Wanda",
    "__version__",
    "allocate",
    "but",
    "cache_logits",
    "compile_steps",
    "evaluate",
    "evaluate_classifier",
    "evaluate_encoder",
    "export_dense",
    "export_sparse24",
    "fake_quantize",
    "fold_batch_norm",
    "grid_of_candidates",
    "load",
    "load_recipe",
    "lora",
    "measure_sensitivity",
    "only",
    "prepare_qat",
    "quantize",
    "quantize_within",
    "register",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    """A public name on its first use (PEP 562); afterwards it is an ordinary attribute."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
