"""Changes of a finished graph: tensors between convolutions stay in integers, tables of 16-bit models in 16 bits.

What a convolution reads is rounded; what else reads the same tensor later, like a shortcut, gets the rounded one, too.
Behind nodes that only move numbers, which lie on the grid already, they are rounded again, which changes nothing:

    x -> Q -> DQ -> Conv                x -> Q -> DQ -> Conv
    x -> Slice -> Add           =>            DQ -> Slice -> Q -> DQ -> Add

ONNX Runtime fuses a node with DequantizeLinear before and QuantizeLinear behind it to one on integers.

    Gather(float32 table)   =>   Cast(Gather(16-bit table))          rows are widened as they are read
    Node(float32 tensor)    =>   Node(Cast(16-bit tensor))           ONNX Runtime casts it once, as it loads

A tensor is kept in float16 or bfloat16 where all of its numbers are numbers of that type: nothing is rounded. Graphs
compute in float32 as before. What nodes with codes read (scales) stays, because they take constants alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
CONVOLUTION = "Conv"
# Of one tensor, of which they drop, repeat or move numbers. Pad adds zeros, which every grid has.
MOVING = ("Slice", "Pad", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "MaxPool")
NODE_BYTES = 128  # about what a Cast takes in a file
LOOKUP, OF_CODES = "Gather", ("QuantizeLinear", "DequantizeLinear", "MatMulNBits", "MatMulInteger")


def keep_integers(program: Any) -> None:
    """Change an `onnx_ir.Model` so, in place."""
    graph = program.graph
    for node in list(graph):
        if node.op_type == QUANTIZE and any(
            use.node.op_type == CONVOLUTION for back in _readers(node) for use in back.outputs[0].uses()
        ):
            _share(graph, node)
    for node in list(graph):
        if node.op_type in MOVING and _moves_only(node):
            _round_again(graph, node)


def _readers(node: Any) -> list[Any]:
    return [use.node for use in node.outputs[0].uses() if use.node.op_type == DEQUANTIZE]


def _share(graph: Any, node: Any) -> None:
    """Give all later readers of a rounded tensor the rounded one, those that round it again among them."""
    order = {each: place for place, each in enumerate(graph)}
    if node not in order or not (backs := _readers(node)):
        return
    rounded, source = backs[0].outputs[0], node.inputs[0]
    for use in list(source.uses()):
        if order[use.node] <= order[node]:
            continue
        if use.node.op_type == QUANTIZE and _grid(use.node) == _grid(node):
            for back in _readers(use.node):
                for again in list(back.outputs[0].uses()):
                    again.node.replace_input_with(again.idx, rounded)
        use.node.replace_input_with(use.idx, rounded)


def _grid(node: Any) -> tuple[float, int]:
    """The scale and the zero point of a QuantizeLinear or DequantizeLinear of a tensor."""
    scale, zero = (value.const_value.numpy() for value in node.inputs[1:3])
    return float(scale), int(zero)


def _moves_only(node: Any) -> bool:
    """True for a node of `MOVING` on a tensor that was rounded as a whole, which adds nothing but zeros."""
    before = node.inputs[0].producer()
    if before is None or before.op_type != DEQUANTIZE or before.inputs[1].const_value.numpy().ndim:
        return False
    if node.op_type != "Pad":
        return True
    mode, filled = node.attributes.get("mode"), node.inputs[2] if len(node.inputs) > 2 else None
    constant = mode is None or mode.as_string() == "constant"
    if not constant or filled is None:
        return constant
    value = filled.const_value
    return value is not None and not np.any(value.numpy())


def _round_again(graph: Any, node: Any) -> None:
    """Put QuantizeLinear and DequantizeLinear of the input's grid behind a node."""
    import onnx_ir as ir

    grid, moved = node.inputs[0].producer().inputs[1:3], node.outputs[0]
    uses = list(moved.uses())
    codes = ir.node(QUANTIZE, [moved, *grid])
    back = ir.node(DEQUANTIZE, [codes.outputs[0], *grid])
    codes.outputs[0].name, back.outputs[0].name = f"{moved.name}_codes", f"{moved.name}_rounded"
    back.outputs[0].shape, back.outputs[0].type = moved.shape, moved.type
    graph.insert_after(node, [codes, back])
    for use in uses:
        use.node.replace_input_with(use.idx, back.outputs[0])


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
