"""Exports a checkpoint as an ONNX graph: `model.onnx`, with its tensors in `model.onnx.data`.

onnx        compressed layers are MatMulNBits of ONNX Runtime, which round inputs to int8 in the product (level 4)
onnx-exact  the same, with inputs that are not rounded (level 0)
onnx-qdq    the same codes in standard operators, DequantizeLinear and MatMul, for any reader of ONNX

Layers of w8a8 are the same in all three: QuantizeLinear and DequantizeLinear around MatMul where the range of inputs is
fixed, and MatMulInteger where it is fitted to every token. Everything else computes in float32.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save_file

from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import note_losses, why_no_tables
from compress.checkpoint.export.place import Place
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import Source
from compress.onnx.graph import Form, graph_of, why_no_graph
from compress.onnx.readback import missing, read_back, reference, rounds, weight_sums
from compress.onnx.repacked import why_not
from compress.onnx.tracing import OPSET

GRAPH = "model.onnx"
TENSORS = f"{GRAPH}.data"
REFERENCE = "reference.safetensors"  # what verifying it compares with
# accuracy_level of MatMulNBits.
INT8_INPUTS, EXACT_INPUTS = 4, 0


class MatMulNBitsGraph(Exporter):
    """Codes of 2, 4 and 8 bits as ONNX Runtime multiplies them, and w8a8."""

    about = "an ONNX graph for ONNX Runtime: MatMulNBits with int8 inputs; codes of 2, 4 or 8 bits, and w8a8"
    kind = "onnx"
    form: ClassVar[Form] = Form(portable=False, level=INT8_INPUTS)

    @property
    def reads_back(self) -> bool:
        """True where onnxruntime is installed."""
        return missing() is None

    def why_not(self, checkpoint: Source) -> list[str]:
        """Integer codes in every compressed layer, no compressed embedding, a model of one graph, and the packages."""
        stored = stored_in(checkpoint)
        if not stored.layers:
            return ["it holds no codes"]
        if reasons := why_no_tables(checkpoint):
            return reasons
        for name, layer in stored.layers.items():
            if (reason := why_not(layer.scheme, self.form.portable)) is not None:
                return [f"{name} {reason}"]
        return self.why_not_model(checkpoint)

    def why_not_model(self, model: Source) -> list[str]:
        """A model of one graph, and the packages."""
        reason = why_no_graph(model)
        return [] if reason is None else [reason]

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Trace the graph and write it, with our outputs for a few tokens or images."""
        import onnx_ir

        note_losses(checkpoint, place)
        graph_made = graph_of(checkpoint, self.form)
        graph, tensors = place.file(GRAPH), place.file(TENSORS)
        onnx_ir.save(graph_made.program, graph, external_data=tensors.name)
        place.json("config.json", {k: v for k, v in checkpoint.config.items() if k != "quantization_config"})
        entry: dict[str, Any] = {"file": GRAPH, "opset": OPSET, "inputs": graph_made.inputs}
        entry["accuracy_level"] = None if self.form.portable else self.form.level
        entry |= {"layers": weight_sums(checkpoint, graph_made.names), "rounds": rounds(checkpoint)}
        expected = reference(checkpoint)
        if isinstance(expected, str):
            entry |= {"reference": None, "why": expected}
        else:
            tensors_held, moved = expected
            save_file(tensors_held, place.file(REFERENCE))
            entry |= {"reference": REFERENCE, "logits": graph_made.outputs[0] == "logits", "jitter": moved}
        if (line := missing()) is not None:
            place.note(f"nothing was compared: to run the graph {line}")
            return Written(len(graph_made.names), {"graph": entry, "verification": {"reader": f"not run: {line}"}})
        return Written(len(graph_made.names), {"graph": entry})

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the weights and outputs that ONNX Runtime computes with those decided. Raises CheckpointError."""
        return read_back(folder, record["graph"])


class ExactGraph(MatMulNBitsGraph):
    """The same, with inputs that are not rounded."""

    about = "the same, with inputs that are not rounded: slower, and closer"
    kind = "onnx-exact"
    form = Form(portable=False, level=EXACT_INPUTS)


class PortableGraph(MatMulNBitsGraph):
    """The same codes in standard operators."""

    about = "an ONNX graph of standard operators alone (DequantizeLinear, opset 21); codes of 4 or 8 bits, and w8a8"
    kind = "onnx-qdq"
    form = Form(portable=True, level=EXACT_INPUTS)
