"""llama.cpp's names for the ways in which byte-level BPE splits a text into words before it merges.

llama.cpp's converter knows a tokenizer by the hash of its output for one text, and a name stands for expressions in
src/llama-vocab.cpp. Here the steps in tokenizer.json are compared with those that each name stands for.
"""

import json
from collections.abc import Mapping
from typing import Any

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ("bytes", True)  # GPT-2's own expression, as ByteLevel applies it
DIGITS = ("digits", True)


def _split(*patterns: str) -> tuple[tuple[str, object], ...]:
    return (*(("split", pattern) for pattern in patterns), ("bytes", False))


# {steps: name}.
NAMES: dict[tuple[tuple[str, object], ...], str] = {
    (WORDS,): "gpt-2",
    (DIGITS, WORDS): "smollm",
    _split(QWEN2): "qwen2",
    _split(QWEN35): "qwen35",
    _split(LLAMA3): "llama-bpe",
    _split(TEKKEN): "tekken",
    _split(GPT4O): "gpt-4o",
    _split(*DEEPSEEK3): "deepseek-v3",
}
# Other names under which llama.cpp splits in one of these ways (src/llama-vocab.cpp).
ALIASES = {"deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "llama4": "gpt-4o"}
# Names under which llama.cpp takes a word that is a token as it is, and merges others.
WHOLE_WORDS = ("llama-bpe", "tekken")


def splitting_named(held: Mapping[str, Any]) -> str | None:
    """The name for the way in which a tokenizer.json splits a text; None where there is none."""
    return NAMES.get(_steps(held) or ())


def why_no_name(held: Mapping[str, Any]) -> str | None:
    """The reason why llama.cpp has no name for the way in which a tokenizer.json splits a text."""
    name = splitting_named(held)
    if name is None:
        said = json.dumps(held.get("pre_tokenizer"), ensure_ascii=True)
        known = ", ".join(NAMES.values())
        return (
            f"its tokenizer splits text in a way that is not among those written without --template ({known}): "
            f"{said[:120]}"
        )
    normalizer = held.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return f"its tokenizer normalizes text ({normalizer.get('type')}), which llama.cpp does not; give --template"
    if held["model"].get("ignore_merges") and name not in WHOLE_WORDS:
        return f"its tokenizer takes whole words first, which llama.cpp's {name} does not; give --template"
    return None


def _steps(held: Mapping[str, Any]) -> tuple[tuple[str, object], ...] | None:
    """The steps of a pre-tokenizer; None where one is of another kind."""
    step = held.get("pre_tokenizer") or {}
    steps: list[tuple[str, object]] = []
    for each in step.get("pretokenizers", [step]):
        pattern = (each.get("pattern") or {}).get("Regex")
        if each.get("type") == "ByteLevel" and not each.get("add_prefix_space"):
            steps.append(("bytes", each.get("use_regex", True)))
        elif each.get("type") == "Digits" and each.get("individual_digits"):
            steps.append(DIGITS)
        elif each.get("type") == "Split" and each.get("behavior") == "Isolated" and not each.get("invert") and pattern:
            steps.append(("split", pattern))
        else:
            return None
    return tuple(steps)
