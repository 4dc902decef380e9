"""The engines for which `compress quantize --for ENGINE` quantizes: what each of them runs, and the form it opens.

A new engine is an entry of `ENGINES`. Sources: llama.cpp's block types (ggml.h), vLLM's compressed-tensors schemes
(`vllm/model_executor/layers/quantization`), the GPTQ formats that ONNX Runtime GenAI's model builder and GPTQModel
read. README has which of them were run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from compress.base.errors import InputError, one_of
from compress.model.patterns import ignoring
from compress.passes.protocol.base import Pass
from compress.weights.scheme import is_float

WIDTHS = tuple(f"w{bits}a16" for bits in range(2, 9))
HALF = "float16"  # of scales, an option of passes
# Methods whose formats are sums or tiles, whatever their options are.
OF_THEIR_OWN = ("spqr", "lqs")
SYMMETRIC = ("signed-scale", "symmetric", "narrow")
# Layers of which an engine makes one: the experts of a block; these, and layers that read one input.
Merges = Literal["nothing", "experts", "inputs"]


@dataclass(frozen=True)
class Engine:
    """The formats that an engine runs. scheme, group_size: those that are picked; None: the method's own. why: the
    reason, a sentence of one line. schemes: all that it runs. groups: sizes that it runs (None: any). unit: what sizes
    must be multiples of. asymmetric: it runs zero points. float16: its scales are, whatever the model's are. methods:
    those with a format of their own that it runs, too, and the multiples in which their groups are (0: they settle
    that). inputs: what those of a layer must be a multiple of. to: the word of the export that it opens (None: the
    checkpoint itself). tables: compressed embeddings fit in it. table_groups: of those, where nobody says
    otherwise (None: the pass's own). floats: schemes of small floats, whose groups and scales are their own, and what
    inputs of a layer must be a multiple of. several: its layers may have groups of several sizes. merges: what it makes
    one layer of as it loads (`jobs.fused_layers`).
    """

    scheme: str | None
    group_size: int | None
    why: str
    schemes: Sequence[str]
    groups: Sequence[int] | None = None
    unit: int = 1
    asymmetric: bool = True
    float16: bool = False
    methods: Mapping[str, int] = field(default_factory=dict)
    inputs: int = 1
    to: str | None = None
    tables: bool = True
    table_groups: int | None = None
    floats: Mapping[str, int] = field(default_factory=dict)
    several: bool = False
    merges: Merges = "nothing"


ENGINES: Mapping[str, Engine] = {
    "llama.cpp": Engine(
        "w4a16",
        32,
        "groups of 32 are blocks of its Q4_0, byte for byte (--scheme q4_k_m: its K-quants)",
        WIDTHS,
        unit=32,
        asymmetric=False,
        float16=True,
        methods={"k-quants": 0, "ternary": 256, "binary": 128},
        inputs=32,
        to="gguf",
        table_groups=32,  # in one scale per token each block would repeat it
        floats={"iq4_nl": 32, "mxfp4a16": 32, "nvfp4a16": 64},
    ),
    "vllm": Engine(
        "w4a16",
        None,
        "codes of 4 bits in groups of up to 128 have kernels on GPUs (Marlin) and on CPUs with AVX-512",
        (*WIDTHS, "w4a8", "w8a8", "fp8", "fp8-block"),
        groups=(-1, 32, 64, 128),
        asymmetric=False,
        floats={"mxfp4a16": 32, "mxfp4": 32, "nvfp4a16": 16, "nvfp4": 16, "mxfp8": 32},
        merges="inputs",
    ),
    "transformers": Engine(
        "w4a16",
        None,
        "it decompresses every scheme of compressed-tensors as it loads",
        (*WIDTHS, "w2a2", "w3a3", "w4a4", "w4a8", "w8a8", "fp8", "fp8-block"),
        floats={
            "mxfp4a16": 32,
            "mxfp6a16": 32,
            "mxfp8a16": 32,
            "mxfp4": 32,
            "mxfp8": 32,
            "nvfp4a16": 16,
            "nvfp4": 16,
        },
        merges="experts",
    ),
    "ort": Engine(
        "w4a16",
        32,
        "ONNX Runtime multiplies blocks of 32 as they are (MatMulNBits, with int8 inputs)",
        ("w2a16", "w4a16", "w8a16", "w8a8"),
        unit=16,
        to="onnx",
        tables=False,
        several=True,
    ),
    "ort-genai": Engine(
        "w4a16",
        32,
        "ONNX Runtime GenAI's model builder turns GPTQ's layout into MatMulNBits, here with blocks of 32",
        ("w4a16", "w8a16"),
        groups=(16, 32, 64, 128, 256),
        asymmetric=False,
        float16=True,
        inputs=32,
        to="gptq",
        tables=False,
    ),
    "gptqmodel": Engine(
        "w4a16",
        None,
        "it reads symmetric codes of 2, 3, 4 and 8 bits in GPTQ's layout",
        ("w2a16", "w3a16", "w4a16", "w8a16"),
        groups=(-1, 16, 32, 64, 128, 256, 512, 1024),
        asymmetric=False,
        float16=True,
        inputs=32,
        to="gptq",
        tables=False,
    ),
}


def engine_named(name: str) -> Engine:
    """The engine of a name. Raises InputError for an unknown one; the message names the likeliest."""
    return ENGINES[one_of("engine", name, ENGINES)]


def picked(
    name: str, method: str, options: Mapping[str, Any], known: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """(Options of a method, those that the engine needs among them; a line for a person about these). options: those
    that the person gave, which stay. known: the options that the method has."""
    engine = engine_named(name)
    size = "group_up_to" if engine.several and "group_size" not in options else "group_size"
    wanted = {"scheme": engine.scheme, size: engine.group_size}
    if method in engine.methods:
        wanted = {"group_size": engine.methods[method] or None}
    elif "scheme" in options and str(options["scheme"]) not in engine.schemes:
        wanted = {}  # a type of the engine's own has its own groups; another one is refused by `check_engine`
    added = {key: value for key, value in wanted.items() if value is not None and key not in options and key in known}
    form = "the checkpoint" if engine.to is None else f"its export to {engine.to}"
    said = ", ".join(f"{key} {value}" for key, value in added.items()) or "nothing: the method settles it"
    return {**options, **added}, [f"--for {name} picks {said}; it opens {form}: {engine.why}"]


def with_its_scales(name: str, passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], list[str]]:
    """(Passes, whose scales are numbers that the engine's files have; a line for a person where that changes any)."""
    if not engine_named(name).float16:
        return tuple(passes), []
    own = engine_named(name).floats
    open_to_it = [
        vars(each).get("scales", HALF) != HALF
        and each.writes == "quantized weight"
        and vars(each).get("scheme") not in own
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
    given = vars(each)
    if each.name == "kv-cache" and engine.to is not None:
        return f"--for {name} holds no rounded key-value cache; drop --kv-cache, and choose its cache in {name} itself"
    if (cache := each.cache_scheme) is not None and cache.narrow:
        return f"{name} reads no key-value cache of {cache.number}; give --kv-cache int8 or fp8, or leave --for out"
    if each.name == "rotate" and given.get("online"):
        return f"{name} rotates no inputs as it runs; leave online out of rotate, or leave --for out"
    if given.get("input_range", "minmax") != "minmax":
        return f"{name} searches no ranges of inputs; drop input_range, or leave --for out"
    if each.name == "embeddings":
        return None if engine.tables else f"--for {name} holds no compressed embedding; drop --embeddings"
    if each.writes != "quantized weight":
        return None
    scheme, size = given.get("scheme"), given.get("group_size", 0)
    if given.get("outliers"):
        return f"{name} runs no codes with exact outliers beside them; drop outliers, or leave --for out"
    if each.name in engine.methods:
        return _why_not_own(name, engine.methods[each.name], each.name, size, given.get("salient", 0))
    if scheme is None or each.name in OF_THEIR_OWN:
        return f"{name} does not run the format of {each.name}; use --method gptq, or leave --for out"
    if given.get("per_tensor") and engine.merges == "inputs" and is_float(scheme):
        return f"{name} rounds float8 of q, k and v again, to one scale for all of them; drop per_tensor"
    if scheme in engine.floats:
        return None
    if scheme not in engine.schemes:
        nearest = engine.scheme if engine.scheme in engine.schemes else engine.schemes[0]
        runs = ", ".join([*engine.schemes, *engine.floats])
        return f"{name} does not run {scheme}; it runs {runs}: give --scheme {nearest}"
    if given.get("grid") not in (None, *SYMMETRIC) and not engine.asymmetric:
        return f"{name} runs symmetric codes; drop --grid {given['grid']}, or leave --for out"
    if size > 0 and (size % engine.unit or (engine.groups is not None and size not in engine.groups)):
        sizes = f"multiples of {engine.unit}" if engine.groups is None else ", ".join(map(str, engine.groups))
        return f"{name} does not run groups of {size}; allowed: {sizes}: give --group-size {engine.group_size or 128}"
    if size == -1 and engine.groups is not None and -1 not in engine.groups:
        return f"{name} runs groups, not one scale per output; give --group-size {engine.group_size or 128}"
    return None


def _why_not_own(name: str, unit: int, method: str, size: int, salient: int) -> str | None:
    """The reason why an engine does not run groups of so many inputs of a method with a format of its own."""
    if salient:
        return f"{name} runs one binary term; drop salient, or leave --for out"
    if size > -1 and unit and (not size or size % unit):
        return f"{name} runs {method} codes in groups of multiples of {unit}; give --group-size {unit}"
    return None


def check_inputs(name: str, passes: Sequence[Pass], columns: Mapping[str, int]) -> None:
    """Raises InputError for a layer whose inputs do not fill the engine's blocks. columns: {layer: inputs}."""
    engine = engine_named(name)
    for each in passes:
        own = engine.floats.get(str(vars(each).get("scheme")))
        unit = engine.methods.get(each.name) or own or engine.inputs
        wanted = columns if each.writes == "quantized weight" and each.treats == "layers" else {}
        bad = [layer for layer in wanted if each.wants(layer) and columns[layer] % unit]
        if bad:
            left = ignoring(bad, list(columns))
            other = "use --method gptq" if engine.methods.get(each.name) else f"leave that out, {left}"
            raise InputError(
                f"{bad[0]} has {columns[bad[0]]} inputs ({len(bad)} layers in all); blocks of {name} take multiples of "
                f"{unit}: {other}, or leave --for out"
            )
