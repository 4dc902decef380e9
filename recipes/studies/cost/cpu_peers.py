"""One product of 4-bit weights on a CPU, ours beside other runtimes', every candidate in its turn in one process.

    python recipes/studies/cost/cpu_peers.py --ggml LIBRARY --onnx FOLDER --json FILE

LIBRARY: a shared library with ggml's C interface, such as xllamacpp.abi3.so of the package xllamacpp. FOLDER: where
`onnxruntime` and `onnx` are installed, in an environment of their own. Either may be left out. Times are CPU
milliseconds of one thread, the least of all rounds; the weight of a call is the one that was not used for longest. All
peers are given float32 inputs, as they want them; ours and torch's are given bfloat16, and float32 beside it.

Nothing is timed before its result is checked against the product of the dequantized weights: the error of rounding
inputs to int8 is allowed to peers that do so.

M tokens, N outputs, K inputs, groups of G inputs.
"""

import argparse
import ctypes
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu.layouts import lay_in_strips
from compress.kernels.layouts import words as pack
from compress.kernels.operators.words import words_linear
from compress.recipes.studies.cost.decode import declare
from compress.recipes.studies.figures import tell_times
from compress.recipes.studies.kernels.products import CACHE_BYTES, MAX_COPIES
from compress.recipes.studies.kernels.timing import Call, time_cpu

TOKENS = (1, 8, 64, 512)
# Relative error of a product whose inputs are rounded to int8, and its sums to bfloat16, stays below this; a wrong
# layout is at 1 or above.
WRONG = 0.03
FLOAT32 = 0  # of ggml_type
# {name: its number, bytes of a weight, whether ggml lays it out anew on an x86 CPU}
GGML_TYPES = {"Q4_0": (2, 18 / 32, True), "Q8_0": (8, 34 / 32, False)}


def codes_of(N: int, K: int, group: int) -> tuple[Tensor, Tensor]:
    """int8 codes of 4 bits [N, K] and float32 scales [N, K / group]."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (N, K), generator=generator, dtype=torch.int8)
    return codes, torch.rand(N, K // group, generator=generator) * 0.01 + 0.005


def ours(N: int, K: int, group: int, dtype: torch.dtype, int8_input: bool) -> tuple[Tensor, Callable[[], Any]]:
    """(The weight's values, a function that makes one more copy of the weight as a function of x)."""
    codes, scale = codes_of(N, K, group)
    planar = pack.to_planar(codes, scale.to(dtype), None, 4, dtype)
    input_group = 128 if int8_input else None

    def copy() -> Callable[[Tensor], Tensor]:
        laid = lay_in_strips(planar, K, int8_input)
        own = planar._replace(words=planar.words.clone()) if laid is None else laid
        return lambda x: words_linear(x, *own[:3], None, own.bits, own.group_size, input_group)

    return reference.dequantize(codes, scale.to(dtype)), copy


def dense(N: int, K: int, dtype: torch.dtype) -> tuple[Tensor, Callable[[], Any]]:
    """torch's product of numbers."""
    values = reference.dequantize(*codes_of(N, K, 128)).to(dtype)

    def copy() -> Callable[[Tensor], Tensor]:
        own = values.clone()
        return lambda x: torch.nn.functional.linear(x, own)

    return values, copy


def int4pack(N: int, K: int) -> tuple[Tensor, Callable[[], Any]]:
    """torch's own product of 4-bit weights."""
    codes, scale = codes_of(N, K, 128)
    scales = torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).contiguous().bfloat16()

    def copy() -> Callable[[Tensor], Tensor]:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes + 8).to(torch.int32), 2)
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 128, scales)

    return reference.dequantize(codes, scale.bfloat16()), copy


def onnx(N: int, K: int, group: int, level: int) -> tuple[Tensor, Callable[[], Any]]:
    """ONNX Runtime's MatMulNBits: 4-bit codes around 8, float32 scales."""
    library, made = import_module("onnxruntime"), import_module("onnx")
    helper, proto = made.helper, made.TensorProto
    codes, scale = codes_of(N, K, group)
    nibbles = (codes + 8).to(torch.uint8).view(N, K // group, group // 2, 2)
    packed = (nibbles[..., 0] | nibbles[..., 1] << 4).numpy()
    tensors = [
        helper.make_tensor("B", proto.UINT8, packed.shape, packed.tobytes(), raw=True),
        helper.make_tensor("scales", proto.FLOAT, [scale.numel()], scale.numpy().tobytes(), raw=True),
    ]
    sizes = {"K": K, "N": N, "bits": 4, "block_size": group, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["A", "B", "scales"], ["Y"], domain="com.microsoft", **sizes)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("A", proto.FLOAT, [None, K])],
        [helper.make_tensor_value_info("Y", proto.FLOAT, [None, N])],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    written = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = library.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3

    def copy() -> Callable[[Tensor], Tensor]:
        session = library.InferenceSession(written, options, providers=["CPUExecutionProvider"])
        return lambda x: torch.from_numpy(session.run(None, {"A": x.numpy()})[0])

    return reference.dequantize(codes, scale), copy


class _Init(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """ggml's CPU backend, on one thread."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        p, size, words = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        declare(
            self.library,
            ("ggml_init", p, [_Init]),
            ("ggml_new_tensor_2d", p, [p, words, ctypes.c_int64, ctypes.c_int64]),
            ("ggml_mul_mat", p, [p, p, p]),
            ("ggml_new_graph", p, [p]),
            ("ggml_build_forward_expand", None, [p, p]),
            ("ggml_backend_cpu_init", p, []),
            ("ggml_backend_cpu_set_n_threads", None, [p, words]),
            ("ggml_backend_cpu_buffer_type", p, []),
            ("ggml_backend_alloc_ctx_tensors_from_buft", p, [p, p]),
            ("ggml_backend_tensor_set", None, [p, p, size, size]),
            ("ggml_backend_tensor_get", None, [p, p, size, size]),
            ("ggml_backend_graph_compute", words, [p, p]),
            ("ggml_backend_buft_name", ctypes.c_char_p, [p]),
            ("ggml_backend_get_device", p, [p]),
            ("ggml_backend_dev_backend_reg", p, [p]),
            ("ggml_backend_reg_get_proc_address", p, [p, ctypes.c_char_p]),
            ("ggml_quantize_chunk", size, [words, p, p, *[ctypes.c_int64] * 3, p]),
        )
        self.backend = self.library.ggml_backend_cpu_init()
        self.library.ggml_backend_cpu_set_n_threads(self.backend, 1)

    def _repacked(self) -> int:
        """The buffers whose weights are rearranged for this CPU, which llama.cpp uses where it can."""
        device = self.library.ggml_backend_get_device(self.backend)
        registry = self.library.ggml_backend_dev_backend_reg(device)
        address = self.library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        found = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        for each in found:
            if each is None:
                break
            if b"REPACK" in self.library.ggml_backend_buft_name(each):
                return int(each)
        raise RuntimeError("this ggml does not repack weights for this CPU")

    def product(self, kind: str, N: int, K: int) -> tuple[Tensor, Callable[[], Any]]:
        """A weight of a type of ggml, in groups of 32."""
        number, bytes_each, repacks = GGML_TYPES[kind]
        values = reference.dequantize(*codes_of(N, K, 32)).contiguous()
        packed = ctypes.create_string_buffer(int(N * K * bytes_each))
        self.library.ggml_quantize_chunk(number, values.data_ptr(), packed, 0, N, K, None)
        kept: list[Any] = []

        def copy() -> Callable[[Tensor], Tensor]:
            context = self.library.ggml_init(_Init(2**16, None, True))
            weight = self.library.ggml_new_tensor_2d(context, number, K, N)
            place = self._repacked() if repacks else self.library.ggml_backend_cpu_buffer_type()
            buffer = self.library.ggml_backend_alloc_ctx_tensors_from_buft(context, place)
            assert buffer, f"{kind} is not repacked"
            self.library.ggml_backend_tensor_set(weight, packed, 0, len(packed))
            kept.append(buffer)
            graphs: dict[int, tuple[int, int, int]] = {}
            return lambda x: self._multiply(weight, graphs, x, N)

        return values, copy

    def _multiply(self, weight: int, graphs: dict[int, tuple[int, int, int]], x: Tensor, N: int) -> Tensor:
        M, K = x.shape
        if M not in graphs:
            context = self.library.ggml_init(_Init(2**20, None, True))
            given = self.library.ggml_new_tensor_2d(context, FLOAT32, K, M)
            out = self.library.ggml_mul_mat(context, weight, given)
            graph = self.library.ggml_new_graph(context)
            self.library.ggml_build_forward_expand(graph, out)
            self.library.ggml_backend_alloc_ctx_tensors_from_buft(context, self.library.ggml_backend_cpu_buffer_type())
            graphs[M] = given, out, graph
        given, out, graph = graphs[M]
        self.library.ggml_backend_tensor_set(given, x.data_ptr(), 0, x.numel() * 4)
        failed = self.library.ggml_backend_graph_compute(self.backend, graph)
        assert not failed
        y = torch.empty(M, N)
        self.library.ggml_backend_tensor_get(out, y.data_ptr(), 0, y.numel() * 4)
        return y


# The dtype of the inputs, and a function that makes the weight: (its values, a function that copies it as one of x).
Candidate = tuple[torch.dtype, Callable[[], tuple[Tensor, Callable[[], Any]]]]


def candidates(N: int, K: int, ggml: Path | None, with_onnx: bool) -> dict[str, Candidate]:
    """{title: candidate}."""
    found: dict[str, Candidate] = {}
    for dtype, word in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        found[f"dense {word}"] = dtype, partial(dense, N, K, dtype)
        for group in (128, 32):
            found[f"w4a16 g{group} {word}"] = dtype, partial(ours, N, K, group, dtype, False)
            found[f"int8 inputs g{group} {word}"] = dtype, partial(ours, N, K, group, dtype, True)
    found["torch int4pack g128 bf16"] = torch.bfloat16, partial(int4pack, N, K)
    if with_onnx:
        for group, level in ((128, 4), (32, 4), (128, 1)):
            found[f"onnxruntime level {level} g{group}"] = torch.float32, partial(onnx, N, K, group, level)
    if ggml is not None:
        made = Ggml(ggml)
        found |= {f"llama.cpp {kind}": (torch.float32, partial(made.product, kind, N, K)) for kind in GGML_TYPES}
    return found


def measure(N: int, K: int, tokens: list[int], rounds: int, found: dict[str, Candidate]) -> dict[str, dict[int, Any]]:
    """{title: {M: CPU milliseconds of a product}}."""
    count = min(MAX_COPIES, max(2, -(-CACHE_BYTES // (N * K // 2))))
    made = {}
    for title, (dtype, build) in found.items():
        values, copy = build()
        made[title] = dtype, values, [copy() for _ in range(max(2, count // 4) if title.startswith("dense") else count)]
    results: dict[str, dict[int, Any]] = {title: {} for title in made}
    for M in tokens:
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        calls: dict[str, list[Call]] = {}
        for title, (dtype, values, copies) in made.items():
            given = x.to(dtype)
            truth = given.double() @ values.double().t()
            off = ((copies[0](given).double() - truth).norm() / truth.norm()).item()
            assert off < WRONG, f"{title}, {M} tokens: relative error {off:.3f}"
            calls[title] = [partial(copy, given) for copy in copies]
        for title, times in time_cpu(calls, rounds).items():
            results[title][M] = times["time_ms"]
        print(M, {title: round(ms[M], 3) for title, ms in results.items()}, flush=True)
    return results


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--ggml", type=Path, metavar="LIBRARY")
    told.add_argument("--onnx", type=Path, metavar="FOLDER")
    told.add_argument("--size", type=int, nargs=2, default=(4096, 4096), metavar=("N", "K"))
    told.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    told.add_argument("--rounds", type=int, default=30)
    told.add_argument("--only", nargs="+", default=[], help="parts of titles")
    told.add_argument("--json", type=Path, dest="file")
    asked = told.parse_args()
    torch.set_num_threads(1)
    if asked.onnx is not None:
        sys.path.append(str(asked.onnx))
    N, K = asked.size
    found = candidates(N, K, asked.ggml, asked.onnx is not None)
    if asked.only:
        found = {title: each for title, each in found.items() if any(part in title for part in asked.only)}
    tell_times({"N": N, "K": K, "ms": measure(N, K, asked.tokens, asked.rounds, found)}, asked.file)


if __name__ == "__main__":
    main()
