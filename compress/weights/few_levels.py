"""The scale of two or three levels: the best of all, in closed form or from a search that leaves nothing out.

    sum over i of w_i (x_i - s q_i)^2      least over s and over all q, each -1 or 1 (XNOR-Net, arXiv 1603.05279),
                                           each -1, 0 or 1 (Ternary Weight Networks, arXiv 1605.04711)

Both papers have w = 1; here it is what an input weighs, the diagonal of a Hessian say. g members of a group.
"""

import torch
from torch import Tensor


def scale_of_levels(x: Tensor, weight: Tensor | None, zero: bool) -> Tensor:
    """The s [...] of x [..., g]; zero: whether 0 is a level. weight [g]: without one, or where nothing weighs more than
    0, all weigh the same."""
    live = weight is not None and bool((weight > 0).any())
    w = x.new_ones(x.shape[-1]) if weight is None or not live else weight.to(x.dtype)
    return ternary_scale(x, w) if zero else sign_scale(x, w)


def sign_scale(x: Tensor, weight: Tensor) -> Tensor:
    """The s [...] for q of -1 and 1: the mean of |x| [..., g], weighed by weight [g]."""
    return (x.abs() * (weight / weight.sum())).sum(-1)


def ternary_scale(x: Tensor, weight: Tensor) -> Tensor:
    """The s [...] for q of -1, 0 and 1 of x [..., g]. weight [g].

    Given s, every q is best where it is nearest, whatever it weighs: 0 up to |x| = s / 2. So the best of all q are not
    0 on the k largest |x|, for some k. There s is the weighted mean of |x| and lowers the sum by (sum w |x|)^2 / sum w:
    g of these are compared. (The paper has the threshold 0.7 mean |x| in place of the search.)
    """
    tiny = torch.finfo(x.dtype).tiny
    size, order = x.abs().sort(-1, descending=True)
    largest = size[..., :1].clamp(min=tiny)
    w = (weight / weight.sum())[order]
    mass, moment = w.cumsum(-1), (w * (size / largest)).cumsum(-1)
    scales = moment / mass.clamp(min=tiny)
    best = (moment * scales).argmax(-1, keepdim=True)
    return (scales.gather(-1, best) * largest).squeeze(-1)
