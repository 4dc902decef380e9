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
    from compress.adapters import lora
    from compress.api import Result, quantize
    from compress.batchnorm import BatchNormFolds, fold_batch_norm
    from compress.evaluation.evaluate import Evaluation, evaluate
    from compress.grid import Grid, Quantized, fake_quantize
    from compress.loading import load, register
    from compress.nn import QuantLinear
    from compress.passes.awq import AWQ
    from compress.passes.base import Pass, but, only
    from compress.passes.embeddings import Embeddings
    from compress.passes.gptq import GPTQ
    from compress.passes.kv_cache import KVCache
    from compress.passes.rtn import RTN
    from compress.passes.smoothquant import SmoothQuant
    from compress.recipe import load_recipe
    from compress.verification import verify

__version__ = VERSION

# Where each name lives; the imports above say the same to type checkers. No module is called like a public name: its
# import would put the module in the name's place.
_HOMES = {
    "AWQ": "compress.passes.awq",
    "GPTQ": "compress.passes.gptq",
    "RTN": "compress.passes.rtn",
    "BatchNormFolds": "compress.batchnorm",
    "Embeddings": "compress.passes.embeddings",
    "Evaluation": "compress.evaluation.evaluate",
    "Grid": "compress.grid",
    "KVCache": "compress.passes.kv_cache",
    "Pass": "compress.passes.base",
    "QuantLinear": "compress.nn",
    "Quantized": "compress.grid",
    "Result": "compress.api",
    "SmoothQuant": "compress.passes.smoothquant",
    "but": "compress.passes.base",
    "evaluate": "compress.evaluation.evaluate",
    "fake_quantize": "compress.grid",
    "fold_batch_norm": "compress.batchnorm",
    "load": "compress.loading",
    "load_recipe": "compress.recipe",
    "lora": "compress.adapters",
    "only": "compress.passes.base",
    "quantize": "compress.api",
    "register": "compress.loading",
    "verify": "compress.verification",
}

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
    "register",
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
