"""Classifiers, CNNs among them: their accuracy, and their agreement with the reference.

    accuracy, reference_accuracy     share of inputs whose largest logit is the label's
    accuracy_difference              the first less the second, with its paired error: inputs that both get right, or
                                     both wrong, tell nothing of the difference
    agreement                        share of inputs that both put into the same class, right or wrong
    kl_mean                          KL(reference || model) of their classes' probabilities, nats per input

Errors are those of means over inputs, which are taken for independent.

A file of labelled inputs is .safetensors or .npz: `labels` [N], and the inputs by the names that the model's forward
has for them, like pixel_values or input_ids and attention_mask, N along their first axis, as the model reads them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.base.device import find_device
from compress.base.errors import CompressError, InputError
from compress.base.regular_files import regular
from compress.checkpoint.files import checksum
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.source import path_of
from compress.evaluation.document import ClassificationResult, Evaluation, Figure
from compress.evaluation.provenance import MeasuredModel, evaluation_of
from compress.evaluation.quality.exact_intervals import difference_of, share_of
from compress.evaluation.quality.kl_and_perplexity import mean_of_independent
from compress.evaluation.quality.language import Model, load_dense, open_model
from compress.model.calls import evaluating

LABELS = "labels"
FORM = "give a .safetensors or .npz file of `labels` and of inputs, like pixel_values, by their names"
NAMES = ("accuracy", "reference_accuracy", "accuracy_difference", "agreement")


def evaluate_classifier(
    model: nn.Module | str | Path,
    inputs: Tensor | Mapping[str, Tensor] | str | Path,
    labels: Tensor | None = None,
    *,
    reference: nn.Module | str | Path | None = None,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Evaluation:
    """Measure a classifier, compressed or not.

    inputs: what its forward takes, N along the first axis: a tensor for its first argument, or tensors by name. labels:
    [N] integers, 0 to its classes less one. Both in one: a file of labelled inputs. model, reference, dtype: as in
    `evaluate`; logits [N, classes] are what it returns, or their `logits`. Raises InputError for unusable inputs,
    CompressError for logits that are not numbers.
    """
    name = {"name": portable(str(inputs))} if isinstance(inputs, str | Path) else {}
    if isinstance(inputs, str | Path):
        if labels is not None:
            raise InputError(f"labels beside {str(inputs)!r}, which has its own; give one of them")
        inputs, labels = read_labelled(inputs)
    if labels is None:
        raise InputError("no labels given; give integers [N], one an input, or a file that has both")
    if labels.ndim != 1 or labels.is_floating_point() or not len(labels):
        raise InputError(f"labels of shape {list(labels.shape)} and {labels.dtype}; give integers [N], one an input")
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}; allowed: 1 or more")
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
    counts = {len(each) for each in given}
    if counts != {len(labels)}:
        raise InputError(f"{', '.join(map(str, sorted(counts)))} inputs with {len(labels)} labels; give one for each")
    target = find_device(device)
    work = torch.float32 if dtype is None and target.type == "cpu" else dtype
    ours = open_model(model, trust_remote_code)
    theirs = None if reference is None else open_model(reference, trust_remote_code)

    def asked(who: Model) -> tuple[MeasuredModel, Tensor]:
        network = load_dense(who, work, target)
        return MeasuredModel(who, network), _logits(network, inputs, len(labels), batch_size)

    model_measured, found_NC = asked(ours)
    original, expected_NC = (None, None) if theirs is None else asked(theirs)
    classes = found_NC.shape[1]
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise InputError(f"labels from {int(labels.min())} to {int(labels.max())}; the model has 0 to {classes - 1}")
    figures = _figures(found_NC, expected_NC, labels.cpu())
    result = ClassificationResult(checksum(labels), len(labels), classes, figures, **name)
    return replace(evaluation_of(model_measured, original, target), classifications=[result])


def read_labelled(source: str | Path) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs by name, labels) of a file. Raises InputError for a file without them."""
    path = regular(path_of(str(source), "labelled inputs"), "file of labelled inputs")
    if path.suffix not in (".safetensors", ".npz"):
        raise InputError(f"labelled inputs {str(source)!r}; {FORM}")
    if not path.is_file():
        raise InputError(f"file of labelled inputs {str(source)!r} does not exist; {FORM}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                tensors = {name: torch.from_numpy(file[name]) for name in file.files}
        else:
            tensors = load_file(path)
    except Exception:  # noqa: BLE001 - numpy and zip raise anything
        raise InputError(f"{source} is damaged or holds no tensors; {FORM}") from None
    labels = tensors.pop(LABELS, None)
    if labels is None or not tensors:
        raise InputError(f"{source} holds {', '.join([*tensors, *([] if labels is None else [LABELS])])}; {FORM}")
    return tensors, labels


@torch.no_grad()
def _logits(network: Any, inputs: Tensor | Mapping[str, Tensor], count: int, rows: int) -> Tensor:
    """[N, C] float32 on the CPU."""
    parameter = next(network.parameters())

    def moved(values: Tensor) -> Tensor:
        return values.to(parameter.device, parameter.dtype if values.is_floating_point() else values.dtype)

    parts = []
    with evaluating(network):
        for first in range(0, count, rows):
            part = slice(first, first + rows)
            if isinstance(inputs, Tensor):
                made = network(moved(inputs[part]))
            else:
                made = network(**{name: moved(values[part]) for name, values in inputs.items()})
            logits = getattr(made, "logits", made)
            if not isinstance(logits, Tensor) or logits.ndim != 2:
                raise InputError(f"{type(network).__name__} returns no logits [inputs, classes]; give a classifier")
            parts.append(logits.float().cpu())
    logits_NC = torch.cat(parts)
    if not bool(torch.isfinite(logits_NC).all()):
        raise CompressError(f"{type(network).__name__} gives logits that are not finite numbers; it is damaged")
    return logits_NC


def _figures(found_NC: Tensor, expected_NC: Tensor | None, labels_N: Tensor) -> dict[str, Figure]:
    """All figures by name."""

    def share(of_N: Tensor) -> Figure:
        return share_of(of_N.double().numpy())

    said_N = found_NC.argmax(-1)
    right_N = (said_N == labels_N).double()
    if expected_NC is None:
        return {"accuracy": share(right_N)}
    if expected_NC.shape != found_NC.shape:
        raise InputError(f"the model has {found_NC.shape[1]} classes, the reference {expected_NC.shape[1]}")
    theirs_N = expected_NC.argmax(-1)
    right_before_N = (theirs_N == labels_N).double()
    log_q, log_p = found_NC.double().log_softmax(-1), expected_NC.double().log_softmax(-1)
    return {
        "accuracy": share(right_N),
        "reference_accuracy": share(right_before_N),
        "accuracy_difference": difference_of(right_N.numpy(), right_before_N.numpy()),
        "agreement": share(said_N == theirs_N),
        "kl_mean": mean_of_independent((log_p.exp() * (log_p - log_q)).sum(-1).numpy()),
    }
