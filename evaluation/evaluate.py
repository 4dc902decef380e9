"""`evaluate`: quality and size of a model, beside its original."""

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
from compress.evaluation.document import Evaluation, TextResult
from compress.evaluation.provenance import circumstances, named, run_of, size_of
from compress.evaluation.quality import PROTOCOL, Quality, measure
from compress.model.calls import evaluating
from compress.progress import Reporter, Silent
from compress.runtime.loading import load_source

# Why something that a caller may ask for was not measured.
NO_REFERENCE = "no reference was given"
IN_MEMORY = "the model was in memory, not in files"


def _open(model: nn.Module | str | Path, trusted: bool) -> nn.Module | Source:
    """A model in memory, or a checkpoint, opened once for all that is asked of it."""
    return model if isinstance(model, nn.Module) else find_source(str(model), trusted)


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


def _text_result(tokens: Tokens, quality: Quality) -> TextResult:
    """The figures on a text, with what they were measured on."""
    return TextResult(
        name=tokens.source,
        sha256=tokens.fingerprint(),
        role="held-out",
        protocol=PROTOCOL,
        windows=quality.windows,
        length=quality.length,
        stride=quality.length,
        tokens=quality.tokens,
        figures=quality.figures,
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
    sizes = size_of(ours), size_of(theirs)
    recipe, run = run_of(ours)
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
    missing = {} if sizes[0] is not None else {"size": IN_MEMORY}
    return Evaluation(
        model=named(ours, network, sizes[0]),
        texts=[_text_result(tokens, quality)],
        reference=None if theirs is None or original is None else named(theirs, original, sizes[1]),
        recipe=recipe,
        size=sizes[0],
        reference_size=sizes[1],
        run=run,
        missing=missing if theirs is not None else {"reference": NO_REFERENCE, **missing},
        provenance=circumstances(target),
    )
