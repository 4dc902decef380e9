"""Bad input to losses: one line, before anything is computed."""

import re

import pytest
import torch
from combinations import every

from compress.base.errors import InputError
from compress.train.losses.attention import attention_loss
from compress.train.losses.chunked_logits import Head, HiddenTeacher, chunked_logits_loss
from compress.train.losses.contrastive import info_nce
from compress.train.losses.features import features_loss, layer_pairs
from compress.train.losses.logits import LogitsLoss, logits_loss
from compress.train.losses.relations import relations_loss
from compress.train.losses.top_k import top_k

Z = torch.zeros
HEAD, IDS = Head(Z(7, 4)), torch.arange(3)
# What is wrong -> (the call, what the line says).
CASES = {
    "kind": (lambda: LogitsLoss(kind="backward"), "unknown divergence 'backward';"),
    "tail": (lambda: LogitsLoss(tail="buckets"), "unknown tail 'buckets'; did you mean 'bucket'?"),
    "temperature": (lambda: LogitsLoss(temperature=0.0), "temperature 0.0; allowed: above 0"),
    "alpha": (lambda: LogitsLoss(alpha=1.5), "alpha 1.5; allowed: 0 "),
    "beta": (lambda: LogitsLoss(beta=1.0), "beta 1.0; allowed: above 0, below 1"),
    "no labels": (
        lambda: logits_loss(Z(3, 7), Z(3, 7), how=LogitsLoss(alpha=0.5)),
        "alpha 0.5 asks for cross entropy, which needs labels",
    ),
    "no teacher": (
        lambda: chunked_logits_loss(Z(3, 4), HEAD, labels_T=IDS),
        "alpha 1.0 asks for a divergence, which needs a teacher",
    ),
    "vocabularies": (
        lambda: logits_loss(Z(3, 7), Z(3, 8)),
        "tokens of the vocabulary: 7 of the student, 8 of the teacher; leave out what only one of them has",
    ),
    "vocabularies of heads": (
        lambda: chunked_logits_loss(Z(3, 4), HEAD, HiddenTeacher(Z(3, 5), Head(Z(8, 5)))),
        "tokens of the vocabulary: 7 of the student, 8 of the teacher; ",
    ),
    "tokens": (lambda: logits_loss(Z(3, 7), Z(4, 7)), "logits: [3, 7] of the student, [4, 7] of the teacher must be"),
    "tokens of top k": (
        lambda: logits_loss(Z(3, 7), top_k(Z(2, 7), 2)),
        "the teacher's top k of shape [2, 2] for tokens of shape [3]",
    ),
    "k": (lambda: top_k(Z(3, 7), 8), "top 8 of a vocabulary of 7; allowed: 1 to 7"),
    "temperature of a bucket": (
        lambda: logits_loss(Z(3, 7), top_k(Z(3, 7), 2), how=LogitsLoss(temperature=2.0)),
        "the teacher's top k are of temperature 1.0, the loss asks for 2.0, and what the rest weighs there",
    ),
    "labels": (
        lambda: logits_loss(Z(3, 7), Z(3, 7), labels_T=torch.arange(4)),
        "labels of shape [4] for tokens of shape [3]; they must be the same",
    ),
    "mask": (lambda: features_loss(Z(3, 7), Z(3, 7), mask_T=Z(3, 1)), "mask of shape [3, 1] for tokens of shape [3];"),
    "widths": (
        lambda: features_loss(Z(3, 7), Z(3, 8)),
        "widths: 7 of the student, 8 of the teacher; a projector of the student's takes one to the other",
    ),
    "hidden states": (lambda: features_loss(Z(3, 7), Z(2, 7)), "hidden states: [3, 7] of the student, [2, 7] of the"),
    "distance": (
        lambda: features_loss(Z(3, 7), Z(3, 7), distance="cos"),
        "unknown distance 'cos'; did you mean 'cosine'",
    ),
    "deeper student": (
        lambda: layer_pairs(12, 6),
        "the student has 12 layers, the teacher 6; 'uniform' takes no more layers than the teacher has: name pairs",
    ),
    "no layers": (lambda: layer_pairs(0, 6), "a student of 0 layers; allowed: 1 or more"),
    "map": (lambda: layer_pairs(3, 6, "lost"), "unknown map of layers 'lost'; did you mean 'last'?"),
    "pair": (lambda: layer_pairs(3, 6, [(0, 1), (2, 6)]), "pair (2, 6): the teacher has no layer 6; allowed: 0 to 5"),
    "negative": (lambda: layer_pairs(3, 6, [(-1, 5)]), "pair (-1, 5): the student has no layer -1; allowed: 0 to 2"),
    "twice": (
        lambda: layer_pairs(3, 6, [(0, 1), (0, 1)]),
        "pair (0, 1) is given twice; a weight says what counts more",
    ),
    "no pairs": (lambda: layer_pairs(3, 6, []), "no pairs of layers; give at least one"),
    "maps": (
        lambda: attention_loss(Z(2, 4, 3, 3), Z(2, 4, 3, 5)),
        "attention maps: [2, 4, 3, 3] of the student, [2, 4, 3, 5] of the teacher differ beyond heads",
    ),
    "heads": (
        lambda: attention_loss(Z(2, 4, 3, 3), Z(2, 8, 3, 3)),
        "4 heads of the student, 8 of the teacher have no pairs; heads='group' or 'mean'",
    ),
    "groups of heads": (
        lambda: attention_loss(Z(2, 4, 3, 3), Z(2, 6, 3, 3), heads="group"),
        "heads='group' of 4 and 6 heads, of which neither divides the other; heads='mean'",
    ),
    "mask of maps": (
        lambda: attention_loss(Z(2, 4, 3, 3), Z(2, 4, 3, 3), mask_BK=Z(2, 4)),
        "mask of shape [2, 4]; of samples and keys it has to be [2, 3]",
    ),
    "measure": (lambda: attention_loss(Z(2, 4, 3, 3), Z(2, 4, 3, 3), measure="l2"), "unknown measure 'l2'"),
    "relation heads": (
        lambda: relations_loss(Z(2, 3, 6), Z(2, 3, 8), 3),
        "3 relation heads do not divide the teacher's width of 8",
    ),
    "samples": (lambda: relations_loss(Z(2, 3, 6), Z(2, 4, 6), 3), "samples and tokens: [2, 3] of the student, [2, 4]"),
    "mask of relations": (
        lambda: relations_loss(Z(2, 3, 6), Z(2, 3, 6), 3, mask_BT=Z(3)),
        "mask of shape [3] for tokens of shape [2, 3]",
    ),
    "embeddings": (lambda: info_nce(Z(3, 4), Z(3, 5)), "widths: 4 of the student, 5 of the teacher; a projector"),
    "samples of embeddings": (lambda: info_nce(Z(3, 4), Z(2, 4)), "3 samples of the student, 2 of the teacher; "),
    "cold": (lambda: info_nce(Z(3, 4), Z(3, 4), temperature=-1.0), "temperature -1.0; allowed: above 0"),
    "mask of samples": (lambda: info_nce(Z(3, 4), Z(3, 4), mask_N=Z(4)), "mask of shape [4] for 3 samples"),
}


@every("name", CASES)
def test_one_line_says_what_was_given_and_what_is_allowed(name: str) -> None:
    call, says = CASES[name]
    with pytest.raises(InputError, match=f"^{re.escape(says)}") as refused:
        call()
    assert "\n" not in str(refused.value)
