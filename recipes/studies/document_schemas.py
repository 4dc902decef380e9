"""JSON Schemas of the documents that `--json` writes, made from their dataclasses, into `evaluation/schemas/`.

    python recipes/studies/document_schemas.py

A description is the docstring of its class. Objects may have further keys, as later versions add some.
"""

import inspect
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from compress.evaluation.document import FORMAT, Evaluation
from compress.evaluation.json_document import Summary
from compress.evaluation.quality.gates import GateResult

PLACE = Path(__file__).parents[2] / "evaluation" / "schemas"
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}
LINE = 120
Schema = dict[str, Any]


def schema_of(kind: Any, named: dict[str, Schema]) -> Schema:
    """The schema of a type, as JSON holds its values. named: takes those of dataclasses, by their names."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if origin in (Union, UnionType):
        if {*inner} <= {*TYPES}:
            return {"type": [TYPES[each] for each in inner]}
        return {"anyOf": [schema_of(each, named) for each in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list or (origin is tuple and inner[-1] is ...):
        return {"type": "array", "items": schema_of(inner[0], named)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [schema_of(each, named) for each in inner], "minItems": len(inner)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(inner[1], named)}
    if isinstance(kind, type) and is_dataclass(kind):
        if kind.__name__ not in named:
            named[kind.__name__] = {}  # for one that holds itself
            named[kind.__name__] = _object(kind, named)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return {"type": TYPES[kind]}


def _object(kind: Any, named: dict[str, Schema]) -> Schema:
    hints = get_type_hints(kind)
    properties = {field.name: schema_of(hints[field.name], named) for field in fields(kind)}
    about = " ".join((inspect.getdoc(kind) or "").split())
    return {"description": about, "type": "object", "properties": properties, "required": list(properties)}


def document_schema(kind: Any, version: int) -> Schema:
    """The schema of a document: a dataclass with its format, a summary and gates."""
    named: dict[str, Schema] = {}
    on_top = {"summary": schema_of(Summary, named), "gates": schema_of(list[GateResult], named)}
    content = _object(kind, named)
    content["properties"].pop("format")
    properties = {"format": {"const": version}, **on_top, **content["properties"]}
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"{kind.__name__}, format {version}"}
    return {**about, **content, "properties": properties, "required": list(properties), "$defs": named}


def schemas() -> dict[str, Schema]:
    """{name of the file: schema}."""
    return {"evaluation.json": document_schema(Evaluation, FORMAT)}


def lay_out(value: Any, indent: str = "") -> str:
    """JSON in which whatever fits into a line stands in one."""
    text = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(text) < LINE or not isinstance(value, dict):
        return text
    inside = (f'{indent} "{key}": {lay_out(each, indent + " ")}' for key, each in value.items())
    return "{\n" + ",\n".join(inside) + f"\n{indent}}}"


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name, content in schemas().items():
        (PLACE / name).write_text(lay_out(content) + "\n", encoding="utf-8")
