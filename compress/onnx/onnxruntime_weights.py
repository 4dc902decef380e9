"""The weights that ONNX Runtime computes with, layer by layer: the nodes of a graph, run one at a time."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.onnx.layers import LAYER, MIDDLE

FOLDER = "session.model_external_initializers_file_folder_path"
NBITS, DEQUANTIZE, INTEGER = "MatMulNBits", "DequantizeLinear", "MatMulInteger"
# Columns that are read of a layer whose node only multiplies: all, or so many, at even distances.
COLUMNS = 1024
PROVIDERS = ("CPUExecutionProvider",)
QUIET = 3  # errors alone


def read_columns(inputs: int) -> NDArray[np.int64]:
    """Columns of a weight that are read."""
    found: NDArray[np.int64] = np.unique(np.linspace(0, inputs - 1, min(inputs, COLUMNS)).round().astype(np.int64))
    return found


def session(graph: Path, level: int | None = None) -> Any:
    """An onnxruntime session on a CPU. level: of accuracy of all products in blocks, in a graph that is run node by
    node, with nothing fused; None: as the file says, and as fast as it can."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = QUIET
    if level is None:
        return onnxruntime.InferenceSession(str(graph), options, providers=PROVIDERS)
    model = onnx.load(str(graph), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == NBITS:
            _at_level(node, level)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(FOLDER, str(graph.parent.resolve()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=PROVIDERS)


def _at_level(node: Any, level: int) -> None:
    for attribute in node.attribute:
        if attribute.name == "accuracy_level":
            attribute.i = level


def layer_weights(graph: Path, names: Iterable[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(Layer in the graph, its weight [N, C] as ONNX Runtime reads it, in the columns `read_columns`), for each of
    `names`."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = {prop.value: node for node in model.graph.node for prop in node.metadata_props if prop.key == LAYER}
    casts = [node for node in model.graph.node if node.op_type == "Cast" and node.input[0] in initializers]
    factors = {
        **initializers,
        **{node.output[0]: initializers[node.input[0]] for node in casts},
    }  # of `graph_edits.narrow_tables`
    for layer in names:
        node = nodes[layer]
        own = [_load(initializers[name], graph.parent) for name in dict.fromkeys(node.input) if name in initializers]
        scale = _load(_factor(model, node, factors), graph.parent) if node.op_type == INTEGER else None
        yield layer, _read_weight(model, node, own, scale)


def _factor(model: Any, node: Any, held: Mapping[str, Any]) -> Any:
    """The initializer by which the result of an integer product is multiplied last."""
    (reader,) = (each for each in model.graph.node if node.output[0] in each.input)
    last = [name for name in reader.input if name in held]
    return held[last[0]] if reader.op_type == "Mul" and last else _factor(model, reader, held)


def _load(tensor: Any, folder: Path) -> Any:
    """A copy of an initializer, with its data from the file beside the graph."""
    import onnx
    from onnx.external_data_helper import load_external_data_for_tensor

    own = onnx.TensorProto.FromString(tensor.SerializeToString())
    if own.data_location == onnx.TensorProto.EXTERNAL:
        load_external_data_for_tensor(own, str(folder))
        own.data_location = onnx.TensorProto.DEFAULT
        del own.external_data[:]
    return own


def _read_weight(model: Any, node: Any, own: list[Any], scale: Any) -> NDArray[np.float32]:
    """The weight in a node with these tensors. Nodes that only multiply are given rows of the identity."""
    from onnx import numpy_helper

    if node.op_type == DEQUANTIZE:
        whole: NDArray[np.float32] = _alone(model, node, own, None)
        whole = whole.T if whole.ndim == 2 else whole.reshape(len(whole), -1)  # [K, N], or a convolution's
        return whole[:, read_columns(whole.shape[1])]
    integer = node.op_type == INTEGER
    inputs = own[0].dims[0] if integer else next(a.i for a in node.attribute if a.name == "K")
    columns = read_columns(inputs)
    rows = np.full((len(columns), inputs), MIDDLE if integer else 0, np.uint8 if integer else np.float32)
    rows[np.arange(len(columns)), columns] += 1
    if integer:
        codes = _alone(model, node, own, rows).T.astype(np.float32)
        found: NDArray[np.float32] = codes * numpy_helper.to_array(scale).astype(np.float32)[:, None]
        return found
    _at_level(node, 0)
    return _alone(model, node, own, rows).T


def _alone(model: Any, node: Any, tensors: list[Any], x: NDArray[Any] | None) -> NDArray[Any]:
    """The output of a node with these tensors and this input."""
    import onnxruntime
    from onnx import TensorProto, helper

    name, kind = node.input[0], TensorProto.INT32 if node.op_type == INTEGER else TensorProto.FLOAT
    inputs = []
    if x is not None:
        inputs = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)]
    outputs = [helper.make_tensor_value_info(node.output[0], kind, None)]
    made = helper.make_graph([node], "layer", inputs, outputs, tensors)
    whole = helper.make_model(made, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = QUIET
    opened = onnxruntime.InferenceSession(whole.SerializeToString(), options, providers=PROVIDERS)
    found: NDArray[Any] = opened.run(None, {} if x is None else {name: x})[0]
    return found
