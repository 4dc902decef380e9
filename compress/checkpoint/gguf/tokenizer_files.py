"""tokenizer.json and what lies beside it, made from the keys of a GGUF file: the inverse of `export.gguf.tokenizer`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from compress.base.errors import InputError
from compress.checkpoint.files import write_json
from compress.checkpoint.gguf.pre_tokenizers import ALIASES, DIGITS, NAMES, WHOLE_WORDS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's types of tokens
SPACE = "\u2581"
FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# {key in the file: entry of tokenizer_config.json}.
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
PAD = "[PAD"  # begins the names of rows that no token has
COMPOSES = ("qwen2",)  # ways to split that all published tokenizers use after NFC


def write_tokenizer(folder: Path, keys: Mapping[str, Any], length: int) -> None:
    """Write the tokenizer of a file into a folder. keys: those of the file that begin with `tokenizer.`, without that.
    length: of the model's context. Raises InputError for a way to split text that is not known here."""
    kind, tokens = keys.get("ggml.model"), list(keys.get("ggml.tokens") or ())
    kinds = list(keys.get("ggml.token_type") or [NORMAL] * len(tokens))
    vocabulary = {word: i for i, word in enumerate(tokens) if not (kinds[i] == UNUSED and word.startswith(PAD))}
    if kind == "gpt2":
        tokenizer = _bytes(vocabulary, keys)
    elif kind == "llama":
        tokenizer = _pieces(vocabulary, kinds, keys)
    else:
        raise InputError(f"has a tokenizer of the kind {kind!r}; readable: 'gpt2', 'llama'")
    added = [(word, kinds[i] != USER_DEFINED) for word, i in vocabulary.items() if kinds[i] in (CONTROL, USER_DEFINED)]
    added += [(tokens[i], True) for i in range(len(tokens)) if kinds[i] == UNKNOWN]
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=special) for word, special in added])
    special = {entry: _token(f"ggml.{key}_token_id", keys) for key, entry in SPECIAL.items()}
    around = [
        entry
        for entry, default in (("bos_token", kind == "llama"), ("eos_token", False))
        if keys.get(f"ggml.add_{entry}", default) and special[entry] is not None
    ]
    if around:
        single = [str(special["bos_token"])] if "bos_token" in around else []
        single += ["$A", *([str(special["eos_token"])] if "eos_token" in around else [])]
        pairs = [(str(special[entry]), int(keys[f"ggml.{entry[:3]}_token_id"])) for entry in around]
        tokenizer.post_processor = processors.TemplateProcessing(" ".join(single), special_tokens=pairs)
    tokenizer.save(str(folder / FILE))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    write_json(folder / SETTINGS, settings | {entry: word for entry, word in special.items() if word is not None})
    if isinstance(template := keys.get("chat_template"), str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _token(key: str, keys: Mapping[str, Any]) -> str | None:
    """The token whose id a key has; None without one."""
    place, tokens = keys.get(key), keys["ggml.tokens"]
    return tokens[place] if isinstance(place, int) and place < len(tokens) else None


def _bytes(vocabulary: dict[str, int], keys: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE."""
    name = ALIASES.get(str(keys.get("ggml.pre")), str(keys.get("ggml.pre")))
    steps = next((steps for steps, each in NAMES.items() if each == name), None)
    if steps is None:
        raise InputError(
            f"has a tokenizer that splits text like {name!r}; readable: {', '.join([*NAMES.values(), *ALIASES])}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in keys.get("ggml.merges") or ()]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS))
    tokenizer.normalizer = normalizers.NFC() if name in COMPOSES else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_step(*step) for step in steps])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _step(kind: str, value: Any) -> Any:
    if kind == "split":
        return pre_tokenizers.Split(Regex(value), "isolated")
    if (kind, value) == DIGITS:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=value)


def _pieces(vocabulary: dict[str, int], kinds: list[int], keys: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE."""
    unknown = next((word for word, i in vocabulary.items() if kinds[i] == UNKNOWN), None)
    scores = keys.get("ggml.scores") or [0.0] * len(kinds)
    whole = {word for word, i in vocabulary.items() if kinds[i] in (NORMAL, USER_DEFINED)}
    merges = sorted(_merges(whole), key=lambda pair: (-scores[vocabulary["".join(pair)]], vocabulary[pair[0]]))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, byte_fallback=BYTE in kinds, fuse_unk=False)
    )
    prefix = keys.get("ggml.add_space_prefix", True)
    before = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(words: set[str]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that make another."""
    for word in words:
        pairs = ((word[:i], word[i:]) for i in range(1, len(word)))
        yield from (pair for pair in pairs if words.issuperset(pair))
