"""The tokenizer as keys of a GGUF file, from tokenizer.json.

llama.cpp tokenizes by itself, in one of two ways that fit here:

    gpt2     byte-level BPE: a named way to split text into words ("pre-tokenizer"), then merges by their order
    llama    SentencePiece's BPE: spaces become U+2581, pieces merge by their scores; here the score of a piece is minus
             the place of its first merge, which gives the same order

A way to split that llama.cpp has no name for is refused: under another one text would silently become other tokens.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.base.regular_files import lies_in
from compress.checkpoint.files import read_json
from compress.checkpoint.gguf.pre_tokenizers import splitting_named, why_no_name
from compress.checkpoint.gguf.tokenizer_files import (
    BYTE,
    CONTROL,
    FILE,
    NORMAL,
    SETTINGS,
    SPACE,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from compress.checkpoint.seal import TEMPLATES

HEX = re.compile(r"<0x[0-9A-F]{2}>")
DEFAULT = "default"  # name of a template
NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_]")  # of names of other templates
Value = int | bool | str | list[int] | list[str] | list[float]


def why_not(folder: Path, rows: int) -> str | None:
    """The reason why llama.cpp cannot tokenize like this model, the end of a sentence about it; None where it can.
    rows: of its embedding."""
    if not (folder / FILE).exists():
        return f"it holds no {FILE}, from which the file's tokenizer is made; put it there, or give --template"
    if linked := [path for path in _template_files(folder).values() if not lies_in(path, folder)]:
        return f"its {linked[0].name} is a link out of its folder, whose content would be in the file; copy it there"
    tokenizer = read_json(folder / FILE)
    try:
        if tokenizer["model"]["type"] != "BPE":
            return f"its {FILE} is of the type {tokenizer['model']['type']!r}; written without --template: BPE"
        if (last := max(_tokens(tokenizer), default=0)) >= rows:
            return f"its {FILE} has the token {last}, and its embedding {rows} rows"
        keys_of(folder, rows)
        return None if _is_pieces(tokenizer) else why_no_name(tokenizer)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        return f"its {FILE} is not one of the tokenizers library ({type(error).__name__}: {error})"


def keys_of(folder: Path, rows: int) -> dict[str, Value]:
    """{key after `tokenizer.`: value} of a tokenizer against which there is no reason."""
    tokenizer, settings = read_json(folder / FILE), _settings(folder)
    pieces = _is_pieces(tokenizer)
    tokens = _tokens(tokenizer)
    added = {token["id"]: token for token in tokenizer.get("added_tokens") or ()}
    words = [tokens.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [UNUSED if i not in tokens else _kind(tokens[i], added.get(i), tokenizer) for i in range(rows)]
    metadata: dict[str, Value] = {
        "ggml.model": "llama" if pieces else "gpt2",
        "ggml.pre": "default" if pieces else splitting_named(tokenizer) or "",
        "ggml.tokens": words,
        "ggml.token_type": kinds,
    }
    if pieces:
        metadata |= {"ggml.scores": _scores(tokenizer, words), "ggml.add_space_prefix": _prefixed(tokenizer)}
    else:
        metadata["ggml.merges"] = [" ".join(pair) for pair in _merges(tokenizer)]
    return metadata | _special(tokenizer, settings, tokens) | _templates(folder, settings)


def notes_of(folder: Path) -> list[str]:
    """A line for each thing that llama.cpp's tokenizer does otherwise."""
    tokenizer = read_json(folder / FILE)
    notes = []
    if _is_pieces(tokenizer):
        vocabulary = tokenizer["model"]["vocab"]
        if not any(HEX.fullmatch(word) for word in vocabulary):
            notes.append(
                "the tokenizer has no tokens for single bytes: llama.cpp refuses a text with a character outside of "
                "the vocabulary"
            )
        if not _in_order(tokenizer):
            notes.append(
                "merges of different pieces alternate in tokenizer.json, which scores of pieces cannot say: llama.cpp "
                "may split some words otherwise"
            )
    elif (tokenizer.get("normalizer") or {}).get("type") == "NFC":
        notes.append(
            "the tokenizer composes characters first (NFC), which llama.cpp leaves out: the same for such text"
        )
    return notes


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    found = read_json(path) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _tokens(held: Mapping[str, Any]) -> dict[int, str]:
    """{id: token}, added ones last."""
    found = {place: word for word, place in held["model"]["vocab"].items()}
    return found | {token["id"]: token["content"] for token in held.get("added_tokens") or ()}


def _merges(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges in order; older files join a pair by a space."""
    pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in held["model"].get("merges") or ())
    return [(left, right) for left, right in pairs]


def _steps(held: Mapping[str, Any], what: str, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer."""
    step = held.get(what)
    if step is None:
        return []
    return list(step[inner]) if step.get("type") == "Sequence" else [step]


def _is_pieces(held: Mapping[str, Any]) -> bool:
    """True for BPE as SentencePiece has it: spaces become U+2581 and nothing else splits a text."""
    marks = [
        step
        for step in _steps(held, "normalizer", "normalizers")
        if step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == SPACE
    ]
    rest = _steps(held, "pre_tokenizer", "pretokenizers")
    spaces = [step for step in rest if step["type"] == "Metaspace" and not step.get("split", True)]
    at_spaces = [step for step in rest if step["type"] == "Split" and step.get("pattern") == {"String": " "}]
    return (bool(marks) or bool(spaces)) and len(rest) == len(spaces) + len(at_spaces)


def _prefixed(held: Mapping[str, Any]) -> bool:
    """True where a text gets a space before its first word."""
    before = any(step["type"] == "Prepend" for step in _steps(held, "normalizer", "normalizers"))
    spaces = [step for step in _steps(held, "pre_tokenizer", "pretokenizers") if step["type"] == "Metaspace"]
    return before or any(step.get("prepend_scheme", "always") != "never" for step in spaces)


def _scores(held: Mapping[str, Any], words: list[str]) -> list[float]:
    """Minus the place of the first merge that makes each piece; pieces that no merge makes come last."""
    places: dict[str, int] = {}
    merges = _merges(held)
    for place, (left, right) in enumerate(merges):
        places.setdefault(left + right, place)
    return [-float(places.get(word, len(merges))) for word in words]


def _in_order(held: Mapping[str, Any]) -> bool:
    """True where all merges of a piece stand together, so that the order of merges is one of pieces."""
    made = [left + right for left, right in _merges(held)]
    return len(set(made)) == sum(1 for i, piece in enumerate(made) if i == 0 or made[i - 1] != piece)


def _kind(word: str, added: Mapping[str, Any] | None, held: Mapping[str, Any]) -> int:
    if word == held["model"].get("unk_token"):
        return UNKNOWN if _is_pieces(held) else CONTROL
    if added is not None:
        return CONTROL if added.get("special") else USER_DEFINED
    return BYTE if _is_pieces(held) and HEX.fullmatch(word) else NORMAL


def _special(held: Mapping[str, Any], settings: Mapping[str, Any], tokens: Mapping[int, str]) -> dict[str, Value]:
    """Ids of special tokens, and whether a text begins or ends with one."""
    places = {word: place for place, word in tokens.items()}
    token_ids: dict[str, Value] = {}
    for key, entry in SPECIAL.items():
        token = settings.get(entry)
        word = token.get("content") if isinstance(token, dict) else token
        if word in places:
            token_ids[f"ggml.{key}_token_id"] = places[word]
    before, after = _around(held)
    return token_ids | {
        "ggml.add_bos_token": places.get(before or "", -1) == token_ids.get("ggml.bos_token_id", -2),
        "ggml.add_eos_token": places.get(after or "", -1) == token_ids.get("ggml.eos_token_id", -2),
    }


def _around(held: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens that a text gets before and after it."""
    processor = held.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            parts = step["single"]
            names = [part.get("SpecialToken", {}).get("id") for part in parts]
            return (names[0], names[-1]) if names else (None, None)
    return None, None


def _template_files(folder: Path) -> dict[str, Path]:
    files = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    return files | ({DEFAULT: default} if default.exists() else {})


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Value]:
    """The templates of chats that the model has: the default, and others by name."""
    found = settings.get("chat_template")
    listed = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
    templates = {each.get("name"): each.get("template") for each in listed}
    templates |= {name: path.read_text(encoding="utf-8") for name, path in _template_files(folder).items()}
    known = {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}
    named = {NOT_IN_KEYS.sub("_", name): text for name, text in known.items() if name != DEFAULT}
    keys: dict[str, Value] = {f"chat_template.{name}": text for name, text in named.items()}
    keys |= {"chat_templates": [*named]} if named else {}
    return keys | ({"chat_template": known[DEFAULT]} if DEFAULT in known else {})
