"""compress: smaller PyTorch and Hugging Face models, with an honest account of what it cost.

import compress
result = compress.quantize("demo", compress.GPTQ(scheme="w4a16"), calibration="demo", output="out")
print(compress.evaluate("out", reference="demo", text="demo").kl_mean)

Importing it is cheap and changes nothing: a name is looked up in its module when it is first used, which is when torch
and transformers are imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compress.base.errors import CheckpointError as CheckpointError
from compress.base.errors import CompressError as CompressError
from compress.base.errors import InputError as InputError
from compress.base.version import VERSION

if TYPE_CHECKING:
    from compress.checkpoint.export.write import Exported as Exported
    from compress.checkpoint.export.write import export as export
    from compress.evaluation.document import Evaluation as Evaluation
    from compress.evaluation.evaluate import evaluate as evaluate
    from compress.evaluation.probes.asked import Probes as Probes
    from compress.evaluation.quality.classifiers import evaluate_classifier as evaluate_classifier
    from compress.evaluation.quality.encoders import evaluate_encoder as evaluate_encoder
    from compress.evaluation.reporting import report as report
    from compress.inference.layers.adapters import lora as lora
    from compress.inference.layers.linear import QuantLinear as QuantLinear
    from compress.inference.load.loading import load as load
    from compress.inference.load.quantizer import register as register
    from compress.inference.load.steps import compile_steps as compile_steps
    from compress.jobs.cache_logits import Cached as Cached
    from compress.jobs.cache_logits import cache_logits as cache_logits
    from compress.jobs.forecast.forecast import Forecast as Forecast
    from compress.jobs.forecast.forecast import plan as plan
    from compress.jobs.job import Result as Result
    from compress.jobs.on_codes import on_codes as on_codes
    from compress.jobs.qat_loop import Prepared as Prepared
    from compress.jobs.qat_loop import prepare_qat as prepare_qat
    from compress.jobs.quantize import quantize as quantize
    from compress.jobs.quantize_for import quantize_for as quantize_for
    from compress.jobs.verify import verify as verify
    from compress.model.batchnorm import BatchNormFolds as BatchNormFolds
    from compress.model.batchnorm import fold_batch_norm as fold_batch_norm
    from compress.model.split_experts import split_experts as split_experts
    from compress.model.splitting.split_layers import split_layers as split_layers
    from compress.onnx.in_memory import export_onnx as export_onnx
    from compress.passes.awq import AWQ as AWQ
    from compress.passes.binary import Binary as Binary
    from compress.passes.embeddings import Embeddings as Embeddings
    from compress.passes.gptq import GPTQ as GPTQ
    from compress.passes.k_quants import KQuants as KQuants
    from compress.passes.kv_cache import KVCache as KVCache
    from compress.passes.low_rank import LowRank as LowRank
    from compress.passes.lqs import LQS as LQS
    from compress.passes.magnitude import Magnitude as Magnitude
    from compress.passes.options.quantize import QuantizeWeights as QuantizeWeights
    from compress.passes.protocol.base import Pass as Pass
    from compress.passes.protocol.base import but as but
    from compress.passes.protocol.base import only as only
    from compress.passes.protocol.recipe import load_recipe as load_recipe
    from compress.passes.protocol.sites import Site as Site
    from compress.passes.reconstruct import Reconstruct as Reconstruct
    from compress.passes.rtn import RTN as RTN
    from compress.passes.smoothquant import SmoothQuant as SmoothQuant
    from compress.passes.sparsegpt import SparseGPT as SparseGPT
    from compress.passes.spqr import SpQR as SpQR
    from compress.passes.taylor import Taylor as Taylor
    from compress.passes.ternary import Ternary as Ternary
    from compress.passes.train import Train as Train
    from compress.passes.trellis import Trellis as Trellis
    from compress.passes.wanda import Wanda as Wanda
    from compress.passes.whole_model.rotate import Rotation as Rotation
    from compress.passes.whole_model.structure import Structure as Structure
    from compress.search.fit import FitResult as FitResult
    from compress.search.fit import fit as fit
    from compress.search.sweep import sweep as sweep
    from compress.search.sweep_rows import Sweep as Sweep
    from compress.solvers.statistics.input_statistics import ChannelNorm as ChannelNorm
    from compress.weights.decision import Decision as Decision
    from compress.weights.grid import Grid as Grid
    from compress.weights.grid import Quantized as Quantized
    from compress.weights.grid import fake_quantize as fake_quantize

__version__ = VERSION

# The module of each public name; the imports above (`as`: they are public) say the same to type checkers. No module
# may have a public name's name: importing it would replace the public name by the module.
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

__all__ = sorted({*_HOMES, "CheckpointError", "CompressError", "InputError", "__version__"})


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562) and keeps it as an ordinary attribute."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
