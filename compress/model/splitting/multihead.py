"""MultiheadAttention of torch as linear layers: it reads its weights, also that of `out_proj`, and calls no layer.

    attention.in_proj_weight [3E, E], in_proj_bias    ->    attention.q_proj, attention.k_proj, attention.v_proj
    attention.q_proj_weight, k_proj_weight, v_proj_weight (other widths of keys or values)    ->    the same
    attention.out_proj                                ->    attention.out_proj, called

Shapes: B samples, T queries, S keys, E width, H heads of D.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from compress.model.splitting.stand_in import linear_of, take_attributes

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class SplitAttention(nn.Module):
    """A drop-in for nn.MultiheadAttention that calls the layers q_proj, k_proj, v_proj and out_proj. Attributes of that
    module are kept; in_proj_weight and in_proj_bias are None, at which torch's transformer layers call it."""

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    @staticmethod
    def of(module: nn.MultiheadAttention) -> "SplitAttention":
        """The drop-in of a module. The layers are views of its weights."""
        attention = SplitAttention()
        attention._qkv_same_embed_dim = module._qkv_same_embed_dim
        attention.register_parameter("in_proj_weight", None)
        attention.register_parameter("in_proj_bias", None)
        for name in ("bias_k", "bias_v"):
            attention.register_parameter(name, module._parameters.get(name))
        take_attributes(attention, module)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for name, weight, bias in zip(PROJECTIONS, _weights(module), biases, strict=True):
            attention.add_module(name, linear_of(weight, bias))
        out = module.out_proj
        attention.add_module("out_proj", linear_of(out.weight, out.bias))
        return attention.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(Outputs, attention weights or None), as nn.MultiheadAttention returns them. is_causal: no more than a hint
        about attn_mask, which has to be given, too."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask; give that, too")
        inputs = (self.get_submodule(name)(x) for name, x in zip(PROJECTIONS, (query, key, value), strict=True))
        q_BTE, k_BSE, v_BSE = (self._batch(x) for x in inputs)
        if key_padding_mask is not None and key_padding_mask.dim() == 1:
            key_padding_mask = key_padding_mask[None]
        if self.bias_k is not None and self.bias_v is not None:
            k_BSE, v_BSE = (
                torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k_BSE, self.bias_k), (v_BSE, self.bias_v))
            )
        q, k, v = (x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in (q_BTE, k_BSE, v_BSE))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v))
        mask = self._mask(key_padding_mask, attn_mask, q, k.shape[2])
        share = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.mT
            weights = dropout((scores if mask is None else scores + mask).softmax(-1), share)
            found = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            found = scaled_dot_product_attention(q, k, v, mask, share)
        joined = found.transpose(1, 2).flatten(2)
        alone = query.dim() == 2
        joined = joined[0] if alone else joined if self.batch_first else joined.transpose(0, 1)
        return self.get_submodule("out_proj")(joined), weights[0] if alone and weights is not None else weights

    def _batch(self, x: Tensor) -> Tensor:
        """[B, T, E] of what may be a single sample, or have T first."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _mask(self, padding_BS: Tensor | None, mask: Tensor | None, q_BHTD: Tensor, keys: int) -> Tensor | None:
        """A sum of masks for the scores, [B or 1, H or 1, T or 1, S]. The masks may not reach the keys that the module
        itself has added, which are never hidden."""
        total: Tensor | None = None
        heads = (
            None if mask is None else mask.unflatten(0, (-1, self.num_heads)) if mask.dim() == 3 else mask[None, None]
        )
        rows = None if padding_BS is None else padding_BS[:, None, None]
        for each in (heads, rows):
            if each is not None:
                hidden = each.to(q_BHTD)
                if not each.is_floating_point():  # True hides a key
                    hidden = torch.zeros_like(hidden).masked_fill(each, -torch.inf)
                hidden = pad(hidden, (0, keys - hidden.shape[-1]))
                total = hidden if total is None else total + hidden
        return total

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"


def _weights(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    if module._qkv_same_embed_dim:
        return cast(Tensor, module.in_proj_weight).chunk(3)
    return tuple(cast(Tensor, getattr(module, f"{name}_weight")) for name in PROJECTIONS)
