"""compress: smaller PyTorch and Hugging Face models, with an honest account of what it cost.

import compress
result = compress.quantize("demo", compress.GPTQ(scheme="w4a16"), calibration="demo", output="out")
print(compress.evaluate("out", reference="demo", text="demo").kl_mean)

Importing it is cheap and changes nothing: a name is looked up in its module when it is first used, which is when torch
and transformers are imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compress.base.errors import CheckpointError, CompressError, InputError
from compress.base.version import VERSION

if TYPE_CHECKING:
    from compress.checkpoint.export.write import Exported, export
    from compress.evaluation.document import Evaluation
    from compress.evaluation.evaluate import evaluate
    from compress.evaluation.probes.asked import Probes
    from compress.evaluation.quality.classifiers import evaluate_classifier
    from compress.evaluation.quality.encoders import evaluate_encoder
    from compress.evaluation.reporting import report
    from compress.inference.layers.adapters import lora
    from compress.inference.layers.linear import QuantLinear
    from compress.inference.load.loading import load
    from compress.inference.load.quantizer import register
    from compress.inference.load.steps import compile_steps
    from compress.jobs.cache_logits import Cached, cache_logits
    from compress.jobs.forecast.forecast import Forecast, plan
    from compress.jobs.job import Result
    from compress.jobs.on_codes import on_codes
    from compress.jobs.qat_loop import Prepared, prepare_qat
    from compress.jobs.quantize import quantize
    from compress.jobs.quantize_for import quantize_for
    from compress.jobs.verify import verify
    from compress.model.batchnorm import BatchNormFolds, fold_batch_norm
    from compress.model.split_experts import split_experts
    from compress.model.splitting.split_layers import split_layers
    from compress.onnx.in_memory import export_onnx
    from compress.passes.awq import AWQ
    from compress.passes.binary import Binary
    from compress.passes.embeddings import Embeddings
    from compress.passes.gptq import GPTQ
    from compress.passes.k_quants import KQuants
    from compress.passes.kv_cache import KVCache
    from compress.passes.low_rank import LowRank
    from compress.passes.lqs import LQS
    from compress.passes.magnitude import Magnitude
    from compress.passes.options.quantize import QuantizeWeights
    from compress.passes.protocol.base import Pass, but, only
    from compress.passes.protocol.recipe import load_recipe
    from compress.passes.protocol.sites import Site
    from compress.passes.reconstruct import Reconstruct
    from compress.passes.rtn import RTN
    from compress.passes.smoothquant import SmoothQuant
    from compress.passes.sparsegpt import SparseGPT
    from compress.passes.spqr import SpQR
    from compress.passes.taylor import Taylor
    from compress.passes.ternary import Ternary
    from compress.passes.train import Train
    from compress.passes.trellis import Trellis
    from compress.passes.wanda import Wanda
    from compress.passes.whole_model.rotate import Rotation
    from compress.passes.whole_model.structure import Structure
    from compress.search.fit import FitResult, fit
    from compress.search.sweep import sweep
    from compress.search.sweep_rows import Sweep
    from compress.solvers.statistics.input_statistics import ChannelNorm
    from compress.weights.decision import Decision
    from compress.weights.grid import Grid, Quantized, fake_quantize

__version__ = VERSION

# The module of each public name; the imports above say the same to type checkers. No module may have a public name's
# name: importing it would replace the public name by the module.
_HOMES = {
    "AWQ": "compress.passes.awq",
    "GPTQ": "compress.passes.gptq",
    "LQS": "compress.passes.lqs",
    "Probes": "compress.evaluation.probes.asked",
    "RTN": "compress.passes.rtn",
    "Binary": "compress.passes.binary",
    "BatchNormFolds": "compress.model.batchnorm",
    "Cached": "compress.jobs.cache_logits",
    "ChannelNorm": "compress.solvers.statistics.input_statistics",
    "Decision": "compress.weights.decision",
    "Embeddings": "compress.passes.embeddings",
    "Evaluation": "compress.evaluation.document",
    "Exported": "compress.checkpoint.export.write",
    "FitResult": "compress.search.fit",
    "Forecast": "compress.jobs.forecast.forecast",
    "Grid": "compress.weights.grid",
    "KQuants": "compress.passes.k_quants",
    "KVCache": "compress.passes.kv_cache",
    "LowRank": "compress.passes.low_rank",
    "Magnitude": "compress.passes.magnitude",
    "Pass": "compress.passes.protocol.base",
    "Prepared": "compress.jobs.qat_loop",
    "QuantLinear": "compress.inference.layers.linear",
    "Quantized": "compress.weights.grid",
    "QuantizeWeights": "compress.passes.options.quantize",
    "Reconstruct": "compress.passes.reconstruct",
    "Result": "compress.jobs.job",
    "Rotation": "compress.passes.whole_model.rotate",
    "Site": "compress.passes.protocol.sites",
    "SmoothQuant": "compress.passes.smoothquant",
    "SparseGPT": "compress.passes.sparsegpt",
    "SpQR": "compress.passes.spqr",
    "Structure": "compress.passes.whole_model.structure",
    "Sweep": "compress.search.sweep_rows",
    "Taylor": "compress.passes.taylor",
    "Ternary": "compress.passes.ternary",
    "Train": "compress.passes.train",
    "Trellis": "compress.passes.trellis",
    "Wanda": "compress.passes.wanda",
    "but": "compress.passes.protocol.base",
    "cache_logits": "compress.jobs.cache_logits",
    "compile_steps": "compress.inference.load.steps",
    "evaluate": "compress.evaluation.evaluate",
    "evaluate_classifier": "compress.evaluation.quality.classifiers",
    "evaluate_encoder": "compress.evaluation.quality.encoders",
    "export": "compress.checkpoint.export.write",
    "export_onnx": "compress.onnx.in_memory",
    "fake_quantize": "compress.weights.grid",
    "fit": "compress.search.fit",
    "fold_batch_norm": "compress.model.batchnorm",
    "load": "compress.inference.load.loading",
    "load_recipe": "compress.passes.protocol.recipe",
    "lora": "compress.inference.layers.adapters",
    "on_codes": "compress.jobs.on_codes",
    "only": "compress.passes.protocol.base",
    "plan": "compress.jobs.forecast.forecast",
    "prepare_qat": "compress.jobs.qat_loop",
    "quantize": "compress.jobs.quantize",
    "quantize_for": "compress.jobs.quantize_for",
    "register": "compress.inference.load.quantizer",
    "report": "compress.evaluation.reporting",
    "split_experts": "compress.model.split_experts",
    "split_layers": "compress.model.splitting.split_layers",
    "sweep": "compress.search.sweep",
    "verify": "compress.jobs.verify",
}

__all__ = [
    "AWQ",
    "GPTQ",
    "LQS",
    "RTN",
    "BatchNormFolds",
    "Binary",
    "Cached",
    "ChannelNorm",
    "CheckpointError",
    "CompressError",
    "Decision",
    "Embeddings",
    "Evaluation",
    "Exported",
    "FitResult",
    "Forecast",
    "Grid",
    "InputError",
    "KQuants",
    "KVCache",
    "LowRank",
    "Magnitude",
    "Pass",
    "Prepared",
    "Probes",
    "QuantLinear",
    "QuantizeWeights",
    "Quantized",
    "Reconstruct",
    "Result",
    "Rotation",
    "Site",
    "SmoothQuant",
    "SpQR",
    "SparseGPT",
    "Structure",
    "Sweep",
    "Taylor",
    "Ternary",
    "Train",
    "Trellis",
    "Wanda",
    "__version__",
    "but",
    "cache_logits",
    "compile_steps",
    "evaluate",
    "evaluate_classifier",
    "evaluate_encoder",
    "export",
    "export_onnx",
    "fake_quantize",
    "fit",
    "fold_batch_norm",
    "load",
    "load_recipe",
    "lora",
    "on_codes",
    "only",
    "plan",
    "prepare_qat",
    "quantize",
    "quantize_for",
    "register",
    "report",
    "split_experts",
    "split_layers",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562) and keeps it as an ordinary attribute."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
