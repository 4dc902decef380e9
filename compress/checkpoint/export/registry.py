"""Ways to write a checkpoint, by the word of `compress export --to`. A new one is a file beside this one and a line.

An exporter of another project registers itself by a line like `EXPORTERS["mine"] = "my_module:Mine"`, in a module that
`--plugin` names.
"""

import importlib
from typing import TYPE_CHECKING

from compress.base.errors import InputError, one_of

if TYPE_CHECKING:
    from compress.checkpoint.export.exporter import Exporter

# {word: place of the class}, imported (with torch) only when used, so that a wrong word is refused at once.
EXPORTERS = {
    "dense": "compress.checkpoint.export.dense:DenseLayout",
    "gptq": "compress.checkpoint.export.gptq_awq:GPTQLayout",
    "awq": "compress.checkpoint.export.gptq_awq:AWQLayout",
    "bitsandbytes": "compress.checkpoint.export.bitsandbytes:BitsandbytesLayout",
    "mlx": "compress.checkpoint.export.mlx:MLXLayout",
    "modelopt": "compress.checkpoint.export.modelopt:ModelOptLayout",
    "gguf": "compress.checkpoint.export.gguf.exporter:GGUFLayout",
    "onnx": "compress.onnx.exporters:MatMulNBitsGraph",
    "onnx-exact": "compress.onnx.exporters:ExactGraph",
    "onnx-qdq": "compress.onnx.exporters:PortableGraph",
    "sparse24": "compress.checkpoint.export.sparse24:TwoOfFour",
}


def exporter_named(word: str, /, **options: str) -> "Exporter":
    """The exporter of a word, with options that its class names (`Exporter.options`). Raises InputError for an unknown
    word; the message names the likeliest one; and for an option that it has not."""
    module, _, kind = EXPORTERS[one_of("export", word, EXPORTERS)].partition(":")
    made: type[Exporter] = getattr(importlib.import_module(module), kind)
    for option in options:
        if option not in made.options:
            raise InputError(f"--to {word} takes no {option}; drop --{option}")
    exporter: Exporter = made(**options)
    return exporter
