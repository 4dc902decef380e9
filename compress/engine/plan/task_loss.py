"""The loss of a task: what a model returns itself where it is given labels, or next tokens for one that generates."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from compress.base.errors import CompressError, InputError
from compress.model.calls import Batch, token_mask
from compress.model.finite_weights import is_damaged

# The label of what is not to be predicted.
NONE = -100


def check_loss(model: nn.Module, batches: Sequence[Batch], who: str) -> None:
    """Raises InputError, before any work, for batches of which no loss can be told."""
    for i, batch in enumerate(batches):
        if has_labels(batch):
            continue
        if not generates(model) or not isinstance(batch.get("input_ids"), Tensor):
            raise InputError(
                f"{who} needs a loss, and calibration batch {i + 1} ({', '.join(batch)}) has no labels; allowed: token "
                "ids for a model that generates text, or batches with what the model makes a loss of (labels)"
            )
        if batch["input_ids"].shape[-1] < 2:
            raise InputError(f"{who} predicts next tokens, and calibration batch {i + 1} has one token a sample")


def check_predictions(model: nn.Module, batches: Sequence[Batch], who: str) -> None:
    """Raises InputError, before any work, for a model or batches without predictions of next tokens."""
    ids = [batch.get("input_ids") for batch in batches]
    if not generates(model) or not all(isinstance(each, Tensor) and each.shape[-1] > 1 for each in ids):
        raise InputError(
            f"{who} with objective=loss looks at predictions of next tokens; give it a model that generates text and "
            "samples of two or more token ids, or leave objective=loss out"
        )


def has_labels(batch: Batch) -> bool:
    """True if a batch names labels: a key has "label" in it."""
    return any("label" in key for key in batch)


def generates(model: nn.Module) -> bool:
    """True if a model says of itself that it predicts next tokens (`can_generate`), and is no encoder-decoder."""
    can = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    return callable(can) and bool(can()) and not getattr(config, "is_encoder_decoder", False)


def task_loss(output: Any, batch: Batch) -> Tensor:
    """The loss of a micro-batch, a mean over what it predicts, by what the model returned for it."""
    if has_labels(batch):
        loss = output
        if not isinstance(output, Tensor):
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise CompressError(
                "the model returns no loss for the labels of its batch: a number, by itself or called loss"
            )
        return loss.float().sum()
    logits_BTV, ids_BT = output.logits, batch["input_ids"].to(output.logits.device)
    mask = token_mask(batch)
    labels = ids_BT if mask is None else ids_BT.masked_fill(~mask.to(ids_BT.device), NONE)
    return functional.cross_entropy(
        logits_BTV[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=NONE
    )


def check_finite(loss: Tensor) -> None:
    """Raises CompressError for a loss, or what stands for one, that has no gradient worth anything."""
    if is_damaged(loss.detach(), finite=True):
        raise CompressError("the loss of a calibration batch is not finite; the model overflows in this dtype")
