"""The engines for which `compress quantize --for ENGINE` quantizes: what each of them runs, and the form it opens.

A new engine is an entry of `ENGINES`. The contents of its form are stated elsewhere: `checkpoint.export.limits`, the
words of compressed-tensors (`weights.compressed_tensors.why_not`), and `weights.number_formats`. Sources of the rest:
llama.cpp's block types (ggml.h), vLLM's compressed-tensors schemes (`vllm/model_executor/layers/quantization`), the
modes of `mlx.core.quantize`, the GPTQ formats that ONNX Runtime GenAI's model builder and GPTQModel read. README has
which of them were run.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from compress.base.errors import InputError, one_of
from compress.checkpoint.export.limits import LIMITS, Limits
from compress.checkpoint.read.fused import LOADING, NOTHING, Loading
from compress.model.patterns import ignoring
from compress.passes.k_quants import OF_GPTQ
from compress.passes.options.weight_format import WeightFormat
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import ROUNDINGS
from compress.weights.compressed_tensors import why_not as why_not_told
from compress.weights.formats.levels import LevelCodes
from compress.weights.formats.sparse import SparseRows
from compress.weights.grid import DEFAULT_GROUP
from compress.weights.number_formats import SCHEMES, NumberFormat
from compress.weights.scheme import scheme_named

HALF = "float16"  # of scales, an option of passes
ANY = Limits()
ON_LLAMA_CPP = ("ollama", "lm-studio", "lmstudio", "gguf")  # programs that run models by it, and its files
NOT_IN_NAMES = re.compile("[^a-z0-9._-]+")  # of models in Ollama
AND = "&&"  # between two commands of a line
SAMPLE = 4096  # inputs and outputs of a layer by which passes are asked what they store


def _schemes(runs: Callable[[str, NumberFormat], bool]) -> list[str]:
    return [name for name, numbers in SCHEMES.items() if runs(name, numbers)]


def _integers(limits: Limits) -> list[str]:
    """Weights alone, of the widths that a layout has."""
    return [f"w{bits}a16" for bits in limits.bits]


@dataclass(frozen=True)
class Engine:
    """The formats that an engine runs. scheme, group_size: those that are picked; None: the method's own. why: the
    reason, a sentence of one line. schemes: all that it runs. limits: of their integers. methods: those with a format
    of their own that it runs, too, and the multiples in which their groups are (0: they settle that). sizes: those of
    groups of schemes for which another than `group_size` is picked. to: the word of the export that it opens (None: the
    checkpoint itself). reads: what of OUT that is, a phrase. tables: compressed embeddings fit in it. table_groups: of
    those, where nobody says otherwise (None: the pass's own). several: its layers may have groups of several sizes.
    loads: what it makes of layers as it loads (`jobs.fused_layers`). renames: the families (`model_type`) of which it
    does not find our layers, for it has other names for them. mix: a scheme of its own types, picked for gptq and rtn
    where no option asks for anything else, with table_scheme for the embedding; other: what a person may prefer to it,
    a phrase. run: command lines that run the result, of {out} ({text} within a string of Python), the {name} that
    Ollama gives it and the model's {architecture}.
    """

    scheme: str
    group_size: int | None
    why: str
    schemes: Sequence[str]
    limits: Limits = ANY
    methods: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    to: str | None = None
    reads: str = "OUT"
    tables: bool = True
    table_groups: int | None = None
    several: bool = False
    loads: Loading = NOTHING
    renames: Sequence[str] = ()
    mix: str | None = None
    table_scheme: str | None = None
    other: str = ""
    run: Sequence[str] = ()


class Picked(NamedTuple):
    """options: of a method, those that the engine needs among them. lines: for a person about these. embeddings: the
    scheme of the embedding, None where the engine asks for none."""

    options: dict[str, Any]
    lines: list[str]
    embeddings: str | None = None


BUILDER = replace(LIMITS["gptq"], bits=(4, 8), groups=(16, 32, 64, 128, 256))
ENGINES: Mapping[str, Engine] = {
    "llama.cpp": Engine(
        "w4a16",
        32,
        "groups of 32 are blocks of its Q4_0, those of 64 codes of 2 bits of its Q2_0, byte for byte",
        [*_integers(LIMITS["gguf"]), *_schemes(lambda name, numbers: numbers.blocks is not None)],
        LIMITS["gguf"],
        methods={"k-quants": 0, "ternary": 256, "binary": 128},
        sizes={"w2a16": 64},
        to="gguf",
        reads="OUT/model.gguf",
        table_groups=32,  # in one scale per token each block would repeat it
        mix="q4_k_m",
        table_scheme="w8a16",  # Q8_0; llama.cpp's own mix has Q6_K for a head, and Q8_0 where that does not fit
        other="smaller: --scheme w4a16 --embeddings w8a16 (Q4_0); closer to the original: --scheme q5_k_m --embeddings "
        "w8a16",
        run=(
            "llama-cli -m {out}/model.gguf",
            "ollama create {name} -f {out}/Modelfile && ollama run {name}",
        ),
    ),
    "vllm": Engine(
        "w4a16",
        None,
        "codes of 4 bits in groups of up to 128 have kernels on GPUs (Marlin) and on CPUs with AVX-512",
        _schemes(lambda name, numbers: numbers.vllm),
        Limits(groups=(-1, 32, 64, 128), asymmetric=False),
        loads=LOADING["vLLM"],
        run=("vllm serve {out}",),
    ),
    "transformers": Engine(
        "w4a16",
        None,
        "it decompresses every scheme of compressed-tensors as it loads",
        _schemes(lambda name, numbers: why_not_told(scheme_named(name)) is None),
        loads=LOADING["transformers"],
        run=("python -c 'import transformers as t; t.{architecture}.from_pretrained(\"{text}\")'",),
    ),
    "mlx": Engine(
        "w4a16",
        None,
        "mlx-lm multiplies groups of 32, 64 and 128 as they are",
        _integers(LIMITS["mlx"]),
        LIMITS["mlx"],
        to="mlx",
        several=True,
        run=("mlx_lm.generate --model {out} --prompt Hello",),
    ),
    "ort": Engine(
        "w4a16",
        32,
        "ONNX Runtime multiplies blocks of 32 as they are (MatMulNBits, with int8 inputs)",
        [*_integers(LIMITS["onnx"]), "w8a8"],
        LIMITS["onnx"],
        to="onnx",
        reads="OUT/model.onnx",
        tables=False,
        several=True,
        run=("python -c 'import onnxruntime as o; o.InferenceSession(\"{text}/model.onnx\")'",),
    ),
    "ort-genai": Engine(
        "w4a16",
        32,
        "ONNX Runtime GenAI's model builder turns GPTQ's layout into MatMulNBits, here with blocks of 32",
        _integers(BUILDER),
        BUILDER,
        to="gptq",
        reads="OUT, in GPTQ's layout",
        tables=False,
        run=("python -m onnxruntime_genai.models.builder -i {out} -o {out}.onnx -p int4 -e cpu",),
    ),
    "gptqmodel": Engine(
        "w4a16",
        None,
        "it reads symmetric codes of 2, 3, 4 and 8 bits in GPTQ's layout",
        _integers(LIMITS["gptq"]),
        LIMITS["gptq"],
        to="gptq",
        reads="OUT, in GPTQ's layout",
        tables=False,
        renames=("phi3", "glm4", "mixtral"),  # as 7.7.0
        run=("python -c 'from gptqmodel import GPTQModel; GPTQModel.load(\"{text}\")'",),
    ),
}


def engine_named(name: str) -> Engine:
    """The engine of a name. Raises InputError for an unknown one; the message names the likeliest."""
    meant = repr("llama.cpp") if name.lower() in ON_LLAMA_CPP else None
    return ENGINES[one_of("engine", name, ENGINES, meant)]


def commands_to_run(name: str, output: str, architecture: str) -> list[str]:
    """Command lines for a shell that run the result of an engine. output: the directory that it opens."""
    folder = Path(output)
    words = {
        "out": str(folder),
        "text": json.dumps(str(folder), ensure_ascii=False)[1:-1],
        "name": NOT_IN_NAMES.sub("-", folder.name.lower()).strip(".-") or "model",
        "architecture": architecture,
    }
    lines = (shlex.split(line) for line in engine_named(name).run)
    return [" ".join(word if word == AND else shlex.quote(word.format(**words)) for word in line) for line in lines]


def pick_options(name: str, method: str, options: Mapping[str, Any], known: Sequence[str]) -> Picked:
    """The options of a method for an engine. options: those that the person gave, which stay. known: the options that
    the method has."""
    engine = engine_named(name)
    opens = f"it reads {engine.reads}"
    if engine.mix is not None and method in ROUNDINGS and set(options) <= {*OF_GPTQ}:
        mix = f"{engine.mix}, and {engine.table_scheme} for the embedding; {engine.other}"
        return Picked({**options, "scheme": engine.mix}, [f"--for {name} picks {mix}; {opens}"], engine.table_scheme)
    size = "group_up_to" if engine.several and "group_size" not in options else "group_size"
    scheme = str(options.get("scheme", engine.scheme))
    wanted = {"scheme": engine.scheme, size: engine.sizes.get(scheme, engine.group_size)}
    if method in engine.methods:
        wanted = {"group_size": engine.methods[method] or None}
    elif "scheme" in options and not (scheme in engine.schemes and SCHEMES[scheme].has_groups):
        wanted = {}  # a type with groups of its own, or one that `check_engine` refuses
    added = {key: value for key, value in wanted.items() if value is not None and key not in options and key in known}
    words = ", ".join(f"{key} {value}" for key, value in added.items())
    why = f": {engine.why}" if words else ""
    said = [f"--for {name} picks {words or 'nothing'}; {opens}{why}"]
    return Picked({**options, **added}, said)


def with_float16_scales(name: str, passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], list[str]]:
    """(Passes, whose scales are numbers that the engine's files have; a line for a person where that changes any)."""
    if not engine_named(name).limits.half:
        return tuple(passes), []
    open_to_it = [
        vars(each).get("scales", HALF) != HALF
        and each.writes == "quantized weight"
        and not (isinstance(each, WeightFormat) and each.numbers.of_levels)
        for each in passes
    ]
    changed: dict[str, Any] = {"scales": HALF}
    found = tuple(replace(p, **changed) if opens else p for p, opens in zip(passes, open_to_it, strict=True))
    said = f"--for {name} rounds scales to float16, as it stores them, before codes are chosen (scales={HALF})"
    return found, [said] if any(open_to_it) else []


def check_engine(name: str, passes: Sequence[Pass]) -> None:
    """Raises InputError, which names the alternative, for passes that write what the engine does not run."""
    engine = engine_named(name)
    for each in sorted(passes, key=lambda p: p.name == "rotate"):  # of formats first: they outlast a rotation
        if (why := _why_not(name, engine, each)) is not None:
            raise InputError(why)


def _why_not(name: str, engine: Engine, each: Pass) -> str | None:
    """The reason why an engine does not run what a pass writes, a whole line; None where it does."""
    options = vars(each)
    if each.name == "kv-cache" and engine.to is not None:
        return f"--for {name} holds no rounded key-value cache; drop --kv-cache, and choose its cache in {name} itself"
    if (cache := each.cache_scheme) is not None and cache.narrow:
        return f"{name} reads no key-value cache of {cache.number}; give --kv-cache int8 or fp8, or leave --for out"
    known = engine.loads.caches
    if cache is not None and known is not None and (cache.number, cache.granularity) not in known:
        allowed = " or ".join(f"{number} per {granularity}" for number, granularity in known)
        return (
            f"{name} reads key-value caches of {allowed}, not of {cache.number} per {cache.granularity}; give "
            f"--kv-cache {known[0][0]}:{known[0][1]}"
        )
    if each.name == "rotate" and options.get("online"):
        return f"{name} rotates no inputs as it runs; leave online out of rotate, or leave --for out"
    if options.get("input_range", "minmax") != "minmax":
        return f"{name} searches no ranges of inputs; drop input_range, or leave --for out"
    if each.name == "embeddings":
        return None if engine.tables else f"--for {name} holds no compressed embedding; drop --embeddings"
    if each.writes != "quantized weight":
        return None
    stored = each.stored("", (SAMPLE, SAMPLE))
    if stored is not None and any(isinstance(term, SparseRows) for term in stored.terms):
        return f"{name} runs no codes with exact outliers beside them; drop outliers, or leave --for out"
    if each.name in engine.methods:
        return _why_not_own(name, engine.methods[each.name], each.name, options)
    codes, scheme = None if stored is None else stored.codes, getattr(each, "scheme", None)
    plain = codes is not None and (codes.layout is not None or isinstance(codes, LevelCodes))
    if not plain and (scheme is None or scheme in SCHEMES):
        return f"{name} does not run the format of {each.name}; use --method gptq, or leave --for out"
    if scheme not in engine.schemes:
        return f"{name} does not run {scheme}; it runs {', '.join(engine.schemes)}: give --scheme {engine.scheme}"
    if not isinstance(each, WeightFormat):
        return None
    if not each.numbers.has_groups:
        return None
    if each.grid == "asymmetric" and not engine.limits.asymmetric:
        return f"{name} runs symmetric codes; drop --grid {each.grid}, or leave --for out"
    sizes = engine.limits.why_not_group(each.group_size) if each.group_size else None
    if sizes is None:
        return None
    usual = f"give --group-size {engine.group_size or DEFAULT_GROUP}"
    if each.group_size == -1:
        return f"{name} runs groups, not one scale per output; {usual}"
    return f"{name} does not run groups of {each.group_size}; allowed: {sizes}: {usual}"


def _why_not_own(name: str, unit: int, method: str, given: Mapping[str, Any]) -> str | None:
    """The reason why an engine does not run codes of a method with a format of its own. given: its options."""
    size = given.get("group_size", 0)
    if size > -1 and unit and (not size or size % unit):
        return f"{name} runs {method} codes in groups of multiples of {unit}; give --group-size {unit}"
    return None


def check_inputs(name: str, passes: Sequence[Pass], columns: Mapping[str, int]) -> None:
    """Raises InputError for a layer whose inputs do not fill the engine's blocks. columns: {layer: inputs}."""
    engine = engine_named(name)
    for each in passes:
        own = each.numbers if isinstance(each, WeightFormat) and each.numbers.of_levels else None
        multiples = engine.limits.inputs if own is None else (own.blocks if engine.to else own.group_size)
        unit = engine.methods.get(each.name) or multiples or 1
        wanted = columns if each.writes == "quantized weight" and each.treats == "layers" else {}
        bad = [layer for layer in wanted if each.wants(layer) and columns[layer] % unit]
        if bad:
            left = ignoring(bad, list(columns))
            other = "use --method gptq" if engine.methods.get(each.name) else f"leave that out, {left}"
            raise InputError(
                f"{bad[0]} has {columns[bad[0]]} inputs ({len(bad)} layers in all); blocks of {name} take multiples of "
                f"{unit}: {other}, or leave --for out"
            )
