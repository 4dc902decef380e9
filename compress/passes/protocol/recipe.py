"""Recipes: YAML <-> a tuple of passes. Every key is consumed; a wrong one is an error with the closest right one.

A recipe is a file, or the name of one of those that come with the package (`BUILT_IN`). A pass of another module,
`module:Class`, must have been imported before.

passes:
  - gptq: {scheme: w3a16, group_size: 64}
    only: ["*.mlp.*"]
  - rtn: {scheme: w8a16, group_size: -1}
    but: ["*.mlp.*"]
"""

import importlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from compress.base.errors import InputError, one_of
from compress.base.regular_files import DEEPEST, MOST_NODES, check_nesting, regular
from compress.weights.number_formats import likely_scheme

if TYPE_CHECKING:
    from compress.passes.protocol.base import Pass

# Where each is, imported (with torch) when it is made: what is wrong before that is said at once.
PASSES = {
    "rtn": "compress.passes.rtn:RTN",
    "gptq": "compress.passes.gptq:GPTQ",
    "k-quants": "compress.passes.k_quants:KQuants",
    "spqr": "compress.passes.spqr:SpQR",
    "trellis": "compress.passes.trellis:Trellis",
    "ternary": "compress.passes.ternary:Ternary",
    "binary": "compress.passes.binary:Binary",
    "awq": "compress.passes.awq:AWQ",
    "low-rank": "compress.passes.low_rank:LowRank",
    "lqs": "compress.passes.lqs:LQS",
    "structure": "compress.passes.whole_model.structure:Structure",
    "rotate": "compress.passes.whole_model.rotate:Rotation",
    "magnitude": "compress.passes.magnitude:Magnitude",
    "wanda": "compress.passes.wanda:Wanda",
    "sparsegpt": "compress.passes.sparsegpt:SparseGPT",
    "taylor": "compress.passes.taylor:Taylor",
    "reconstruct": "compress.passes.reconstruct:Reconstruct",
    "train": "compress.passes.train:Train",
    "smoothquant": "compress.passes.smoothquant:SmoothQuant",
    "embeddings": "compress.passes.embeddings:Embeddings",
    "kv-cache": "compress.passes.kv_cache:KVCache",
}
# What people call some of them elsewhere.
OTHER_NAMES = {
    "nearest": "rtn",
    "round-to-nearest": "rtn",
    "svd": "low-rank",
    "bitnet": "ternary",
    "qat": "train",
    "qtip": "trellis",
}
# llama.cpp's types are a pass of their own, as none of the options of grids is theirs: {method: its `rounding`}.
K_QUANT = re.compile(r"q\d_k(_\w)?|iq4_xs")
ROUNDINGS = {"gptq": "gptq", "rtn": "nearest"}
BUILT_IN = {path.stem: path for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))}
TYPE_NAMES: dict[type, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a word"}
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def method_named(name: str) -> str:
    """The name of a method. Raises InputError for another, with the likeliest one."""
    meant: str | None = None
    if name not in PASSES and (other := OTHER_NAMES.get(name.lower())) is not None:
        meant = repr(other)
    elif name not in PASSES and (scheme := likely_scheme(name)) is not None:
        meant = f"scheme {scheme!r}"
    return one_of("method", name, sorted(PASSES), meant)


def pass_class(name: str) -> "type[Pass]":
    """The class of a pass by name (or `module:Class`). Raises InputError for a wrong name."""
    if ":" in name:
        return _third_party(name)
    module, _, attribute = PASSES[method_named(name)].partition(":")
    kind: type[Pass] = getattr(importlib.import_module(module), attribute)
    return kind


def options_of(kind: "type[Pass]") -> "dict[str, Field[Any]]":
    """The options of a pass, by name. Which layers it is for (`where`) is none: a recipe says that beside them."""
    return {f.name: f for f in fields(kind) if f.name != "where"}


def make_pass(name: str, options: Mapping[str, Any]) -> "Pass":
    """A pass by name (or `module:Class`) with its options; `gptq` and `rtn` of a scheme of llama.cpp's are `k-quants`.
    Raises InputError for a wrong name, option or value."""
    if name in ROUNDINGS and K_QUANT.fullmatch(str(options.get("scheme")).lower()):
        name, options = "k-quants", {"rounding": ROUNDINGS[name], **options}
    if name == "k-quants" and isinstance(scheme := options.get("scheme"), str):
        options = {**options, "scheme": scheme.lower()}
    kind = pass_class(name)
    known = options_of(kind)
    arguments = {}
    for key, value in options.items():
        one_of(f"option of {name}", key, sorted(known))
        arguments[key] = _typed(name, key, value, known[key])
    try:
        return kind(**arguments)
    except TypeError as error:
        raise InputError(f"{name}: {error}") from None


def _third_party(path: str) -> "type[Pass]":
    from compress.passes.protocol.base import Pass

    module, _, attribute = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # noqa: BLE001 - importing runs the module, which may raise anything
        raise InputError(
            f"pass {path!r} cannot be imported ({type(error).__name__}: {error}); write module:Class, with the "
            "module on PYTHONPATH"
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, Pass)):
        raise InputError(f"{path!r} is no subclass of compress.Pass")
    if not hasattr(kind, "name"):
        raise InputError(f"{path!r} is no pass that runs by itself; give a subclass of compress.Pass with a name")
    return kind


def _typed(name: str, key: str, value: Any, option: "Field[Any]") -> Any:
    """`value` in the type of the option's default; words like "0.5" and "true" are read. An option that is
    None by default takes that, or the word none, too."""
    default = option.default
    if default is MISSING or isinstance(default, tuple):
        return tuple(value) if isinstance(value, list) else value
    if default is None and value in (None, "none"):
        return None
    wanted, raw_value = type(default) if default is not None else _other_than_none(option), value
    if wanted is None:
        return value
    if isinstance(value, str) and wanted is not str:
        value = _read_word(value, wanted)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted or (isinstance(value, float) and not math.isfinite(value)):
        kind = TYPE_NAMES.get(wanted, wanted.__name__)
        like = "or none" if default is None else f"like {default!r}"
        raise InputError(f"option {key} of {name} is {raw_value!r}; it must be {kind}, {like}")
    return value


def _other_than_none(option: "Field[Any]") -> type | None:
    """The one type that an option has where it is not None; None where its annotation does not say one."""
    kinds = [kind for kind in get_args(option.type) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) else None


def _read_word(word: str, wanted: type) -> Any:
    """The value that a word stands for; the word itself where it stands for none. YAML takes 1e-3 for a word."""
    if wanted is bool:
        return TRUTH.get(word.lower(), word)
    try:
        return wanted(word) if wanted in (int, float) else word
    except ValueError:
        return word


def parse_recipe(data: Any, where: str) -> "tuple[Pass, ...]":
    """Passes from parsed YAML."""
    if not isinstance(data, Mapping) or set(data) != {"passes"} or not isinstance(data["passes"], Sequence):
        raise InputError(f"{where} must hold one key, `passes`, with a list")
    return tuple(_step(step, f"{where}, step {i}") for i, step in enumerate(data["passes"], 1))


def _step(step: Any, where: str) -> "Pass":
    if not isinstance(step, Mapping):
        raise InputError(f"{where} must be a pass with its options, like `gptq: {{scheme: w4a16}}`")
    names = [key for key in step if key not in ("only", "but")]
    if len(names) != 1 or not isinstance(names[0], str):
        raise InputError(f"{where} must name one pass; it has {', '.join(map(str, names)) or 'none'}")
    options = step[names[0]] or {}
    if not isinstance(options, Mapping):
        raise InputError(f"{where}: the options of {names[0]} must be a mapping")
    try:
        _check_imported(names[0])
        result = make_pass(names[0], options)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    for key in ("only", "but"):
        if key in step:
            patterns = step[key]
            if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns) or not patterns:
                raise InputError(f"{where}: `{key}` must be a list of layer patterns")
            from compress.passes.protocol.base import but, only

            result = (only if key == "only" else but)(result, *patterns)
    return result


class _Loader(yaml.SafeLoader):
    """The loader of plain YAML without merge keys (`<<`), each of which may double what it copies."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if merged := next((key for key, _ in node.value if key.tag == "tag:yaml.org,2002:merge"), None):
            raise ValueError(f"line {merged.start_mark.line + 1} has a merge key (<<); write out what it copies")


def _check_imported(name: str) -> None:
    """Raises InputError for a class whose module nobody has imported. A recipe may be anybody's, and importing runs
    code."""
    module, colon, _ = name.partition(":")
    if colon and module not in sys.modules and not module.startswith(f"{__name__.partition('.')[0]}."):
        raise InputError(
            f"{name!r} is code of a module, which a recipe does not import; read it, and if you trust it give --plugin "
            f"{module or 'MODULE'} (in Python: import it first)"
        )


def load_recipe(path: str | Path) -> "tuple[Pass, ...]":
    """Passes of a YAML file, or of the built-in recipe of this name where there is no such file."""
    file = Path(path)
    if not file.suffix and file.parent == Path() and not file.is_file():
        file = BUILT_IN[one_of("recipe", str(path), BUILT_IN)]
    try:
        data = yaml.load(regular(file, "recipe").read_text(encoding="utf-8"), _Loader)
        check_nesting(data, MOST_NODES)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"recipe {str(path)!r} is nested deeper than {DEEPEST} levels") from None
    except (OSError, ValueError) as error:
        raise InputError(f"recipe {str(path)!r} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"recipe {str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
    return parse_recipe(data, str(path))


def about(text: str) -> str:
    """A recipe's purpose: the first sentence of the comment that its YAML begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("# ") or line.startswith("#  "):
            break
        lines.append(line.removeprefix("# "))
    return " ".join(lines).split(". ")[0].removesuffix(".")


def regrouped(passes: "Sequence[Pass]", size: int) -> "tuple[tuple[Pass, ...], list[str]]":
    """(The passes with another group size, the names of those that had one before.) Passes that give each output
    channel one scale keep it."""
    others = [p.regrouped(size) for p in passes]
    changed = [p.name for p, other in zip(passes, others, strict=True) if other is not None]
    return tuple(other or p for p, other in zip(passes, others, strict=True)), changed


def describe(passes: "Sequence[Pass]") -> dict[str, Any]:
    """The recipe as resolved, every option spelled out; `parse_recipe` reads it back."""
    steps = []
    for p in passes:
        filters: dict[str, list[str]] = {}
        for each in reversed(p.where):  # the last one first, as it would be read from outside
            if each.kind in filters:
                raise InputError(f"a recipe cannot hold two `{each.kind}` filters around one pass")
            filters[each.kind] = list(each.patterns)
        path = f"{type(p).__module__}:{type(p).__qualname__}"
        name = p.name if PASSES.get(p.name) == path else path
        known = options_of(type(p))
        steps.append({name: {key: value for key, value in asdict(p).items() if key in known}, **filters})
    return {"passes": steps}
