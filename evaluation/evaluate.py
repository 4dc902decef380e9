"""`evaluate`: quality and size of a model, beside its original."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.pretrained import load_tokenizer, read_config
from compress.checkpoint.source import Source, find_source
from compress.checkpoint.stored import stored_in
from compress.data import Tokens, load_tokens
from compress.device import find_device
from compress.errors import InputError
from compress.evaluation.quality import Quality, measure
from compress.evaluation.size import Size, measure_size
from compress.model.calls import evaluating
from compress.progress import Reporter, Silent
from compress.runtime.loading import load_source


@dataclass(frozen=True)
class Evaluation:
    """What a model costs and how good it is. Figures against a reference, and sizes of models in memory, are None.

    perplexity, reference_perplexity: exp of the mean negative log-likelihood per token. log_perplexity_ratio: the
    logarithm of the first over the second. kl_*: nats per token against the reference. same_top: share of tokens with
    the same top choice. standard_errors: of these by name, those of means, from the spread of whole windows (None of
    one window); token_standard_errors: as if tokens were independent, which they are not (`compress.evaluation.quality`
    has both formulas). tokens: predicted tokens, in `windows` of `length` tokens. bytes: of the weight files.
    bits_per_weight: of the compressed layers, scales included. dtype: of the arithmetic. text_sha256: of the token ids.
    """

    perplexity: float
    reference_perplexity: float | None
    log_perplexity_ratio: float | None
    kl_mean: float | None
    kl_median: float | None
    kl_p99: float | None
    same_top: float | None
    standard_errors: Mapping[str, float | None]
    token_standard_errors: Mapping[str, float | None]
    tokens: int
    windows: int
    length: int
    bytes: int | None
    reference_bytes: int | None
    bits_per_weight: float | None
    bits_per_parameter: float | None
    dtype: str
    text: str
    text_sha256: str


def _open(model: nn.Module | str | Path, trusted: bool) -> nn.Module | Source:
    """A model in memory, or a checkpoint, opened once for all that is asked of it."""
    return model if isinstance(model, nn.Module) else find_source(str(model), trusted)


def _size(model: nn.Module | Source | None) -> Size | None:
    return measure_size(model) if isinstance(model, Source) else None


def _config_of(model: nn.Module | Source) -> Any:
    """The configuration, without loading weights."""
    config: Any = read_config(model) if isinstance(model, Source) else getattr(model, "config", None)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InputError(f"{type(config or model).__name__} has no vocabulary; perplexity and KL need a language model")
    return config


def _loaded(source: Source, dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """Dense weights, exactly what the codes stand for, unless inputs are quantized too: only codes can show that."""
    layers = stored_in(source).layers
    weights_only = all(stored.scheme.inputs is None for stored in layers.values())
    return load_source(source, dtype, device, dequantize=bool(layers) and weights_only)


def _ready(model: nn.Module | Source, dtype: torch.dtype | None, device: torch.device) -> Any:
    network: Any = _loaded(model, dtype, device) if isinstance(model, Source) else model
    if not hasattr(network, "generate") or network.get_output_embeddings() is None:
        raise InputError(f"{type(network).__name__} predicts no next token; perplexity and KL need a language model")
    return network


def _check_vocabulary(config: Any, original: Any) -> None:
    """Refuse a reference that predicts other tokens."""
    if original.vocab_size != config.vocab_size:
        raise InputError(
            f"the reference has a vocabulary of {original.vocab_size}, the model of {config.vocab_size}; KL needs the "
            "same one"
        )


def _summary(
    quality: Quality, sizes: tuple[Size | None, Size | None], dtype: torch.dtype, tokens: Tokens
) -> Evaluation:
    """The figures of a model, with what they were measured on. sizes: of the model and of the reference."""
    return Evaluation(
        perplexity=quality.perplexity,
        reference_perplexity=quality.reference_perplexity,
        log_perplexity_ratio=quality.log_perplexity_ratio,
        kl_mean=quality.kl_mean,
        kl_median=quality.kl_median,
        kl_p99=quality.kl_p99,
        same_top=quality.same_top,
        standard_errors=quality.errors,
        token_standard_errors=quality.token_errors,
        tokens=quality.tokens,
        windows=quality.windows,
        length=quality.length,
        bytes=sizes[0].bytes if sizes[0] else None,
        reference_bytes=sizes[1].bytes if sizes[1] else None,
        bits_per_weight=sizes[0].bits_per_weight if sizes[0] else None,
        bits_per_parameter=sizes[0].bits_per_parameter if sizes[0] else None,
        dtype=str(dtype).removeprefix("torch."),
        text=tokens.source,
        text_sha256=tokens.fingerprint(),
    )


def evaluate(
    model: nn.Module | str | Path,
    *,
    reference: nn.Module | str | Path | None = None,
    text: str | Tensor = "demo",
    length: int | None = None,
    samples: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure a language model, compressed or not, on held-out text or token ids [samples, length].

    model, reference: directories, hub ids, 'demo' or models in memory. text: as `quantize` takes calibration. length:
    tokens per window of text (the model's context, at most 2048). samples: at most so many windows. dtype: of the
    arithmetic (float32 on a CPU, the checkpoint's own on a GPU); models in memory are taken as they are.
    trust_remote_code: run Python code that comes with models given by name, if any does.

    Raises InputError for models that predict no next token and for text that cannot be used.
    """
    target = find_device(device)
    work = torch.float32 if dtype is None and target.type == "cpu" else dtype
    ours = _open(model, trust_remote_code)
    theirs = None if reference is None else _open(reference, trust_remote_code)
    sizes = _size(ours), _size(theirs)
    config = _config_of(ours)
    sources = [each for each in (ours, theirs) if isinstance(each, Source)]

    def tokenizer() -> Any:
        if not sources:
            raise InputError("a model in memory has no tokenizer; give token ids [samples, length] instead of text")
        return load_tokenizer(sources[0])

    tokens = load_tokens(text, tokenizer, config, what="held-out", length=length, samples=samples)
    if theirs is not None:
        _check_vocabulary(config, _config_of(theirs))
    reporter = reporter or Silent()
    for note in tokens.notes:
        reporter.note(note)
    network = _ready(ours, work, target)
    original = None if theirs is None else _ready(theirs, work, target)
    reporter.step(0, len(tokens.ids), "")
    with evaluating(network), evaluating(network if original is None else original):
        quality = measure(
            network, tokens.ids, config.vocab_size, original, lambda n, of: reporter.step(n, of, "windows")
        )
    return _summary(quality, sizes, next(network.parameters()).dtype, tokens)
