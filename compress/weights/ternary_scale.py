"""The optimal scale of two or three levels, in closed form or by an exhaustive search.

    sum over i of w_i (x_i - s q_i)^2      least over s and over all q, each -1 or 1 (XNOR-Net, arXiv 1603.05279),
                                           each -1, 0 or 1 (Ternary Weight Networks, arXiv 1605.04711)

Both papers have w = 1; here w is the weight of an input, like the diagonal of a Hessian. g members of a group.
"""

import torch
from torch import Tensor


def scale_of_levels(x: Tensor, weight: Tensor | None, zero: bool) -> Tensor:
    """The scales s [...] of x [..., g]. zero: 0 is a level, too. weight [g]: without one, or with none above 0, all
    members weigh the same."""
    live = weight is not None and bool((weight > 0).any())
    w = x.new_ones(x.shape[-1]) if weight is None or not live else weight.to(x.dtype)
    return ternary_scale(x, w) if zero else sign_scale(x, w)


def sign_scale(x: Tensor, weight: Tensor) -> Tensor:
    """The scales s [...] for q of -1 and 1: the mean of |x| [..., g], weighted by weight [g]."""
    return (x.abs() * (weight / weight.sum())).sum(-1)


def ternary_scale(x: Tensor, weight: Tensor) -> Tensor:
    """The scales s [...] for q of -1, 0 and 1 of x [..., g]. weight [g].

    Given s, the best q is the nearest level, whatever the weight: 0 up to |x| = s / 2. So the optimal q are not 0 on
    the k largest |x|, for some k. For each k, s is the weighted mean of these |x| and lowers the sum by
    (sum w |x|)^2 / sum w; all g values of k are compared. (The paper has the threshold 0.7 mean |x| in place of the
    search.)
    """
    tiny = torch.finfo(x.dtype).tiny
    size, order = x.abs().sort(-1, descending=True)
    largest = size[..., :1].clamp(min=tiny)
    w = (weight / weight.sum())[order]
    mass, moment = w.cumsum(-1), (w * (size / largest)).cumsum(-1)
    scales = moment / mass.clamp(min=tiny)
    best = (moment * scales).argmax(-1, keepdim=True)
    return (scales.gather(-1, best) * largest).squeeze(-1)
