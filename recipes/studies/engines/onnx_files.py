"""The models of `onnx_check`, and the files that we and ONNX Runtime's quantizers make of each."""

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

import compress
from compress.checkpoint.read.pretrained import load_tokenizer, read_config
from compress.checkpoint.read.source import find_source
from compress.data.text import load_tokens
from compress.onnx.tracing import trace_module, trace_pretrained
from compress.passes.protocol.base import Pass
from compress.recipes.studies.engines.resnet20 import read_resnet20

Feed = dict[str, NDArray[Any]]
BLOCK = 32
BATCH = 16
CACHE = ("key", "value")
STATIC: dict[str, Any] = {"scheme": "w8a8", "activations": "static", "activation_grid": "asymmetric"}
W4: dict[str, Any] = {"scheme": "w4a16", "group_size": BLOCK}


@dataclass(frozen=True)
class Case:
    """A model, and how to make files of it. kind: decoder, encoder or cnn. traced: makes its graph in float32. ours:
    makes ours in a folder, {title: file, or the reason why there is none}. held_out, calibration: inputs. timed: {name:
    inputs to time}."""

    name: str
    kind: str
    traced: Callable[[], Any]
    ours: Callable[[Path], dict[str, Path | str]]
    held_out: Sequence[Feed]
    calibration: Sequence[Feed]
    timed: Mapping[str, Feed]


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The models that were asked for."""
    for name in arguments.models:
        yield decoder(name, arguments)
    if arguments.encoder:
        yield encoder(Path(arguments.encoder), arguments)
    if arguments.resnet20:
        yield cnn(*arguments.resnet20)


def exported(model: str, scratch: Path, ways: Mapping[str, tuple[Pass, str]], given: Any) -> dict[str, Path | str]:
    """Files of the command line's kind: {title: file} for {title: (pass, word of the export)}."""
    found: dict[str, Path | str] = {}
    for i, (title, (each, to)) in enumerate(ways.items()):
        folder = scratch / f"ours-{i}"
        options = given if each.calibrated else {}
        try:
            compress.quantize(model, each, output=f"{folder}.checkpoint", verify=False, **options)
            found[title] = compress.export(f"{folder}.checkpoint", folder, to, verify=False).output / "model.onnx"
        except compress.CompressError as error:
            found[title] = str(error)
    return found


def decoder(name: str, arguments: argparse.Namespace) -> Case:
    """A causal language model, on windows of text."""
    source = find_source(name)
    limits = {"length": arguments.length, "samples": arguments.samples}
    tokenizer, config = lambda: load_tokenizer(source), read_config(source)
    ids = load_tokens(arguments.text, tokenizer, config, what="held-out", **limits).ids
    shown = load_tokens(arguments.calibration, tokenizer, config, what="calibration", **limits).ids
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def feed(rows: Tensor, past: int = 0) -> Feed:
        empty = np.zeros((len(rows), heads, past, width), np.float32)
        cache = {f"past_key_values.{i}.{part}": empty for i in range(config.num_hidden_layers) for part in CACHE}
        mask = np.ones((len(rows), past + rows.shape[1]), np.int64)
        return {"input_ids": rows.numpy(), "attention_mask": mask, **cache}

    ways = {
        "ours, GPTQ w4a16, onnx": (compress.GPTQ(**W4), "onnx"),
        "ours, GPTQ w4a16, onnx-exact": (compress.GPTQ(**W4), "onnx-exact"),
        "ours, GPTQ w4a16, onnx-qdq": (compress.GPTQ(**W4), "onnx-qdq"),
        "ours, RTN w4a16, onnx": (compress.RTN(**W4), "onnx"),
        "ours, w8a8 dynamic": (compress.RTN(scheme="w8a8"), "onnx"),
        "ours, w8a8 static": (compress.RTN(**STATIC), "onnx"),
    }
    step = feed(ids[:1, :1], arguments.length)
    given = {"calibration": shown, "batch_size": BATCH}

    def traced() -> Any:
        kind = transformers.AutoModelForCausalLM
        return trace_pretrained(kind.from_pretrained(source.path, dtype=torch.float32).eval())

    return Case(
        Path(name).name,
        "decoder",
        traced,
        lambda scratch: exported(name, scratch, ways, given),
        [feed(row[None]) for row in ids],
        [feed(row[None]) for row in shown],
        {"forward": feed(ids[:1]), "step": step},
    )


def encoder(folder: Path, arguments: argparse.Namespace) -> Case:
    """A BERT, on sentences."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def batches(file: Path) -> list[dict[str, Tensor]]:
        lines = file.read_text(encoding="utf-8").splitlines()[: arguments.samples * BATCH]
        sentences = [json.loads(line)["sentence1"] for line in lines]
        parts = [sentences[i : i + BATCH] for i in range(0, len(sentences), BATCH)]
        return [dict(tokenizer(part, padding=True, return_tensors="pt")) for part in parts]

    held_out, shown = map(batches, arguments.sentences)
    one = dict(tokenizer([" ".join(["a sentence"] * arguments.length)], truncation=True, max_length=arguments.length))
    ways = {
        "ours, w8a8 dynamic": (compress.RTN(scheme="w8a8"), "onnx"),
        "ours, w8a8 static": (compress.RTN(**STATIC), "onnx"),
        "ours, SmoothQuant w8a8": (compress.SmoothQuant(), "onnx"),
        "ours, GPTQ w4a16, onnx": (compress.GPTQ(**W4), "onnx"),
        "ours, RTN w4a16, onnx": (compress.RTN(**W4), "onnx"),
    }
    return Case(
        folder.parent.name if folder.name == "model" else folder.name,
        "encoder",
        lambda: trace_pretrained(transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()),
        lambda scratch: exported(str(folder), scratch, ways, {"calibration": shown}),
        [as_feed(batch) for batch in held_out],
        [as_feed(batch) for batch in shown],
        {"forward": {name: np.asarray(each, np.int64) for name, each in one.items()}},
    )


def as_feed(batch: Mapping[str, Tensor]) -> Feed:
    """Inputs as ONNX Runtime takes them."""
    return {name: each.numpy() for name, each in batch.items()}


def cnn(weights: Path, images: Path) -> Case:
    """The ResNet-20, calibrated on 200 images, judged by the others."""
    model, x = read_resnet20(weights, images)
    batches = [{"x": part} for part in x[:200].split(50)]
    compress.fold_batch_norm(model, batches[0])
    added = ["*.conv2"]  # to a shortcut, so that rounding them keeps the sum in integers
    minmax, mse = ({**STATIC, "calibrator": how} for how in ("minmax", "mse"))

    def flowing(options: Mapping[str, Any]) -> tuple[Pass, ...]:
        rounded = compress.only(compress.RTN(**options, outputs="static"), *added)
        return rounded, compress.but(compress.RTN(**options), *added)

    ways: dict[str, tuple[Any, str]] = {
        "ours, w8a8 static, minmax": (flowing(minmax), "onnx"),
        "ours, w8a8 static, mse": (flowing(mse), "onnx"),
        "ours, w8a8 static, mse, onnx-exact": (flowing(mse), "onnx-exact"),
        "ours, w8a8 static, outputs as they are": (compress.RTN(**mse), "onnx"),
        "ours, w8a16": (compress.RTN(scheme="w8a16", group_size=-1), "onnx"),
    }

    def ours(scratch: Path) -> dict[str, Path | str]:
        found: dict[str, Path | str] = {}
        for i, (title, (passes, to)) in enumerate(ways.items()):
            result = compress.quantize(copy.deepcopy(model), passes, calibration=batches, keep_codes=True)
            made = compress.export_onnx(result, batches[0], scratch / f"ours-{i}", to, verify=False)
            found[title] = made.output / "model.onnx"
        return found

    return Case(
        "resnet20",
        "cnn",
        lambda: trace_module(model, batches[0], ["y"]),
        ours,
        [as_feed({"x": part}) for part in x[200:].split(100)],
        [as_feed(batch) for batch in batches],
        {"forward": as_feed({"x": x[:1]}), "step": as_feed({"x": x[:16]})},
    )


def theirs(case: Case, original: Path, scratch: Path) -> dict[str, Path | str]:
    """Files of ONNX Runtime's quantizers: {title: file, or the reason why there is none}."""
    from onnxruntime import quantization

    prepared = scratch / "prepared.onnx"
    try:
        quantization.quant_pre_process(str(original), str(prepared), skip_symbolic_shape=True)
    except Exception as error:  # noqa: BLE001 - a package of others
        print(f"quant_pre_process: {type(error).__name__}: {error}")
        prepared = original
    left = {} if case.kind != "decoder" else {"nodes_to_exclude": heads_of(prepared)}
    ways: dict[str, Callable[[Path], None]] = {}
    if case.kind != "cnn":
        ways |= {f"onnxruntime, {how} w4": _in_blocks(prepared, how, left) for how in ("RTN", "HQQ")}

    def dynamic(output: Path) -> None:
        quantization.quantize_dynamic(prepared, output, per_channel=True, **left)

    def static(output: Path, **options: Any) -> None:
        feeds = Feeds(case.calibration)
        quantization.quantize_static(str(prepared), str(output), feeds, per_channel=True, **left, **options)

    ways["onnxruntime, quantize_dynamic"] = dynamic
    ways["onnxruntime, quantize_static, int8 inputs"] = static
    unsigned = {"activation_type": quantization.QuantType.QUInt8}
    ways["onnxruntime, quantize_static, uint8 inputs"] = partial(static, **unsigned)
    found: dict[str, Path | str] = {}
    for i, (title, make) in enumerate(ways.items()):
        (folder := scratch / f"theirs-{i}").mkdir()
        try:
            make(folder / "model.onnx")
            found[title] = folder / "model.onnx"
        except Exception as error:  # noqa: BLE001 - a package of others
            found[title] = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return found


def heads_of(graph: Path) -> list[str]:
    """The node that makes the logits, which our files leave as it is."""
    held = onnx.load(graph, load_external_data=False).graph
    makers = {name: node for node in held.node for name in node.output}
    return [makers[held.output[0].name].name]


def _in_blocks(graph: Path, how: str, left: Mapping[str, Any]) -> Callable[[Path], None]:
    from onnxruntime.quantization import matmul_nbits_quantizer as blocks

    def make(output: Path) -> None:
        config: Any = blocks.DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=True, accuracy_level=4)
        if how == "HQQ":
            config = blocks.HQQWeightOnlyQuantConfig(block_size=BLOCK, bits=4)
        run = blocks.MatMulNBitsQuantizer(
            onnx.load(graph), block_size=BLOCK, is_symmetric=True, accuracy_level=4, algo_config=config, **left
        )
        run.process()
        run.model.save_model_to_file(str(output))

    return make


class Feeds:
    """Calibration data as ONNX Runtime's quantizers take them, one after the other."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.left = iter(feeds)

    def get_next(self) -> Feed | None:
        """The next inputs; None at the end."""
        return next(self.left, None)
