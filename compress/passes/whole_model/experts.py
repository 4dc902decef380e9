"""Experts of a mixture go that add least to what the tokens get that are routed to them.

    S_j = mean over x in X_j of  g_j(x) |f_j(x)|        X_j: the tokens that are routed to expert j
                                                        g_j: its weight in the sum over a token's experts
                                                        f_j: what it returns

The experts with the least S_j go, as many from every layer, and the rows of the router that choose them with them; the
others stay as they are. A token then goes to the best of those that are left: what the router gives is what the
original router gives with the others masked out.

Sources: Lasby et al. 2025, REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression (arXiv 2510.13999),
equation 9.

Paper -> code: S_j -> `Tally.scores`; the choice -> `experts_left`.

Departs from the paper:
- layers are judged behind nothing that was removed, all in one pass over the calibration data; so is the paper's.
- an expert that no token reached has a score of zero, and goes first.
- where a router chooses groups of experts first (DeepSeek-V3), as many go from each group, and two stay at least, as
  groups are judged by their best two.
- where a token's weight is multiplied with what an expert is given (Llama 4), that is part of f_j already.

Shapes: T tokens, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.errors import CompressError, InputError
from compress.model.calls import Call
from compress.model.edits.keep_experts import KeepExperts, mixtures_of, routers_of
from compress.model.experts import Experts
from compress.model.known_edits import Edit
from compress.model.structure.hollow_forward import replaced_forwards
from compress.passes.protocol.model_view import Whole
from compress.passes.protocol.removal import going, upwards

# Experts of a group that its router looks at.
BEST_OF_GROUP = 2


class Tally:
    """Sums over the tokens of each expert of a layer: of what it adds, and of tokens."""

    def __init__(self, experts: int) -> None:
        self.norms, self.tokens = torch.zeros(experts, dtype=torch.float64), torch.zeros(experts, dtype=torch.int64)

    def add(self, expert: int, outputs: Tensor, weights: Tensor) -> None:
        """outputs [n, H] and weights [n] of an expert for n tokens."""
        self.norms[expert] += (outputs.double().norm(dim=-1) * weights.double().abs()).sum().cpu()
        self.tokens[expert] += len(outputs)

    def scores(self) -> Tensor:
        """[E] the mean for each expert, float64; 0 for one without tokens."""
        return self.norms / self.tokens.clamp(min=1)


def watch_experts(experts: Experts, tally: Tally, real_T: Tensor | None, *given: Tensor) -> Tensor:
    """The output of `experts` for `given`; counts what each expert adds. real: the tokens that are no padding."""

    def see(expert: int, token: Tensor, outputs: Tensor, weights: Tensor) -> None:
        seen = slice(None) if real_T is None else real_T[token]
        tally.add(expert, outputs[seen], weights[seen])

    return experts.watched(see, *given)


@dataclass(frozen=True)
class RouterChoice:
    """The choice of a router. groups: of experts, of which `chosen_groups` are looked at for a token (1 and 1: there
    are none). top: experts of a token."""

    experts: int
    top: int
    groups: int = 1
    chosen_groups: int = 1

    @property
    def least(self) -> int:
        """Experts that have to stay."""
        of_group = -(-self.top // self.chosen_groups)
        return self.groups * (max(of_group, BEST_OF_GROUP) if self.groups > 1 else of_group)

    def staying(self, share: float) -> int:
        """The number of experts that stay where a share goes: as many of every group, and all that a token needs."""
        of_group = self.experts // self.groups
        return max(self.groups * (of_group - going(share, of_group)), min(self.least, self.experts))


def experts_left(scores_E: Tensor, routing: RouterChoice, staying: int) -> list[int]:
    """The numbers of the experts with the largest scores, as many of every group; of equal ones the first."""
    by_group = scores_E.view(routing.groups, -1)
    order = by_group.sort(dim=1, descending=True, stable=True).indices[:, : staying // routing.groups]
    first = torch.arange(routing.groups)[:, None] * by_group.shape[1]
    return (order + first).flatten().sort().values.tolist()


def routing_of(model: nn.Module, name: str, around: nn.Module, experts: Experts) -> RouterChoice:
    """The choice of the router beside experts. Raises InputError where nothing says how many a token goes to."""
    text: Any = getattr(model, "config", None)
    text = text.get_text_config() if hasattr(text, "get_text_config") else text
    owners = [*routers_of(around, experts), around, text]
    top = _first(owners, "top_k", "num_experts_per_tok")
    if top is None:
        raise InputError(f"{name}: nothing says how many experts a token goes to (top_k, num_experts_per_tok)")
    groups = _first(owners, "num_group", "n_group") or 1
    return RouterChoice(len(experts.numbers), top, groups, _first(owners, "topk_group") or 1)


def _first(owners: Sequence[Any], *names: str) -> int | None:
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in found if type(value) is int), None)


def fewer_experts(share: float, whole: Whole) -> Iterator[tuple[str, Edit]]:
    """The edits that remove a share of the experts of every layer. Raises InputError for a model without experts that
    could go."""
    model = whole.model
    mixtures = {(around, own): experts for around, own, experts in mixtures_of(model)}
    if not mixtures:
        raise InputError(
            f"experts: {type(model).__name__} has none as layers of their own; leave it out, or call "
            "compress.split_experts(model) on a model in memory"
        )
    routings = {
        place: routing_of(model, place[0], model.get_submodule(place[0]), experts)
        for place, experts in mixtures.items()
    }
    for (around, _), routing in routings.items():
        if routing.staying(share) == routing.experts:
            raise InputError(
                f"experts {share} of {routing.experts} in {around} is none: {routing.least} have to stay; give "
                f"{upwards(routing.groups / routing.experts)} or more, or leave it out"
            )
    tallies = {experts: Tally(len(experts.numbers)) for experts in mixtures.values()}

    def watch(block: nn.Module, call: Call) -> AbstractContextManager[None]:
        real_T = None if call.tokens is None else call.tokens.reshape(-1)
        seen: dict[nn.Module, Callable[..., Tensor]] = {
            m: partial(watch_experts, m, tallies[m], real_T) for m in block.modules() if isinstance(m, Experts)
        }
        return replaced_forwards(seen)

    whole.through(watch)
    for (around, own), experts in mixtures.items():
        tally, routing = tallies[experts], routings[around, own]
        tally.norms, tally.tokens = (sum(whole.comm.gather_objects(part)) for part in (tally.norms, tally.tokens))
        if not int(tally.tokens.sum()):
            raise CompressError(f"no calibration token reached {around}; give more calibration data")
        scores = tally.scores()
        staying = experts_left(scores, routing, routing.staying(share))
        gone = [i for i in range(routing.experts) if i not in staying]
        unseen = sum(int(tally.tokens[i]) == 0 for i in gone)
        whole.note(
            f"structure: {around} goes on without {len(gone)} of {routing.experts} experts: "
            f"{', '.join(map(str, gone))}" + (f" ({unseen} of them got no token)" if unseen else "")
        )
        told = (("removed", gone), ("scores", scores.tolist()), ("tokens", tally.tokens.tolist()))
        yield around, KeepExperts(own, tuple(staying), told)
