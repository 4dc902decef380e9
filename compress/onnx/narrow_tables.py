"""Keeps tables of 16-bit models in 16 bits: token embeddings, norms, biases, what is not compressed.

    Gather(float32 table)   =>   Cast(Gather(16-bit table))          rows are widened as they are read
    Node(float32 tensor)    =>   Node(Cast(16-bit tensor))           ONNX Runtime casts it once, as it loads

A tensor is kept in float16 or bfloat16 where all of its numbers are numbers of that type: nothing is rounded. Graphs
compute in float32 as before. What nodes with codes read (scales) stays, because they take constants alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

NODE_BYTES = 128  # about what a Cast takes in a file
LOOKUP, OF_CODES = "Gather", ("QuantizeLinear", "DequantizeLinear", "MatMulNBits", "MatMulInteger")


def narrow_tables(program: Any) -> None:
    """Change an `onnx_ir.Model` so, in place."""
    import onnx_ir as ir

    graph = program.graph
    outputs = {value.name for value in graph.outputs}
    for name, value in list(graph.initializers.items()):
        uses = list(value.uses())
        if value.dtype != ir.DataType.FLOAT or name in outputs or any(u.node.op_type in OF_CODES for u in uses):
            continue
        held = value.const_value.numpy()
        if held.nbytes // 2 <= NODE_BYTES * len(uses) or (found := in_16_bits(held)) is None:
            continue
        value.const_value = ir.tensor(found[1], dtype=ir.DataType[found[0]], name=name)
        value.dtype = ir.DataType[found[0]]
        for use in uses:
            _widen(graph, value, use)


def in_16_bits(held: NDArray[np.float32]) -> tuple[str, NDArray[Any]] | None:
    """(ONNX type, the same numbers in it), of two types of 16 bits; None where neither has all of them."""
    import ml_dtypes

    for kind, dtype in (("FLOAT16", np.float16), ("BFLOAT16", ml_dtypes.bfloat16)):
        with np.errstate(over="ignore"):
            found = held.astype(dtype)
        if np.array_equal(found.astype(np.float32), held):
            return kind, found
    return None


def _widen(graph: Any, value: Any, use: Any) -> None:
    """Put a Cast between a 16-bit tensor and a node that reads it, or behind one that looks rows up in it."""
    import onnx_ir as ir

    node = use.node
    rows = node.op_type == LOOKUP and use.idx == 0
    narrow = node.outputs[0] if rows else value
    readers = list(narrow.uses()) if rows else [use]
    cast = ir.node("Cast", [narrow], {"to": ir.DataType.FLOAT.value})
    wide = cast.outputs[0]
    wide.name, wide.shape, wide.dtype = f"{narrow.name}_float32_{node.name}", narrow.shape, ir.DataType.FLOAT
    if rows:
        narrow.dtype = value.dtype
        graph.insert_after(node, cast)
    else:
        graph.insert_before(node, cast)
    for reader in readers:
        reader.node.replace_input_with(reader.idx, wide)
