"""compress: smaller PyTorch and Hugging Face models, with an honest account of what it cost.

import compress
result = compress.quantize("demo", compress.GPTQ(scheme="w4a16"), calibration="demo", output="out")
print(compress.evaluate("out", reference="demo", text="demo").kl_mean)
"""

from compress.api import Result, quantize
from compress.batchnorm import BatchNormFolds, fold_batch_norm
from compress.errors import CheckpointError, CompressError, InputError
from compress.evaluation.evaluate import Evaluation, evaluate
from compress.grid import Grid, Quantized, fake_quantize
from compress.loading import load, register
from compress.lora import lora
from compress.nn import QuantLinear
from compress.passes.awq import AWQ
from compress.passes.base import Pass, but, only
from compress.passes.embeddings import Embeddings
from compress.passes.gptq import GPTQ
from compress.passes.kv_cache import KVCache
from compress.passes.rtn import RTN
from compress.passes.smoothquant import SmoothQuant
from compress.recipe import load_recipe
from compress.verify import verify
from compress.version import VERSION

__version__ = VERSION
register()

__all__ = [
    "AWQ",
    "GPTQ",
    "RTN",
    "BatchNormFolds",
    "CheckpointError",
    "CompressError",
    "Embeddings",
    "Evaluation",
    "Grid",
    "InputError",
    "KVCache",
    "Pass",
    "QuantLinear",
    "Quantized",
    "Result",
    "SmoothQuant",
    "__version__",
    "but",
    "evaluate",
    "fake_quantize",
    "fold_batch_norm",
    "load",
    "load_recipe",
    "lora",
    "only",
    "quantize",
    "verify",
]
