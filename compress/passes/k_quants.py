"""K-quants and IQ4_XS: llama.cpp's super-blocks, by GPTQ (arXiv 2210.17323) where text calibrates, else to nearest.

Shapes: N outputs, K inputs. A super-block is 256 weights of a row in groups of g: 16 for q2_k, q3_k and q6_k, else 32.
Of each weight the code q, of each group the codes s and m of a scale and a minimum, of each super-block two float16:

    q2_k, q4_k, q5_k    w = d s q - dmin m          bits per weight: 2.625, 4.5, 5.5
    q3_k, q6_k          w = d s (q - z)             3.4375, 6.5625; s is signed, z = 2^(bits - 1)
    iq4_xs              w = d s level(q)            4.25; s is signed, levels of IQ4_NL

    minimise over all of them     tr((W* - Q) H (W* - Q)^T)     H, target W* and drift: `compress methods gptq`

GPTQ's sweep goes over the columns. Where it opens a super-block it fits d and dmin to weights that carry all feedback
so far; where it comes to a group, s and m in these steps; then the group's codes, one column after another. An error of
column j costs D_j there, the diagonal of H = U D U^T (`solvers.column_sweep`), by which fits are weighed. `refit` then
sets s, m, d and dmin anew for fixed codes, by the loss itself, and `sweeps` of coordinate descent move single codes.

Not from a paper: the types are those of llama.cpp (k-quants, by I. Kawrakow, ggml-org/llama.cpp#1684). They are stored
byte for byte, so that a GGUF file of them is a copy.

With rounding=nearest, which is what `--method rtn --scheme q4_k` asks for, every weight counts the same and no text is
needed.

Inputs that are no multiple of 256 take what llama.cpp falls back to, in groups of 32: q2_k, q3_k and iq4_xs become
iq4_nl, q4_k and q5_k w5a16 (its Q5_0), q6_k w8a16 (Q8_0). llama.cpp has Q5_1 for q5_k, whose minimum is float16.

Mixes are llama.cpp's, too. `more` of n blocks are the first and the last eighth and every third between them:

    q3_k_m    q3_k; o_proj q4_k; v_proj q4_k, in the first two blocks q5_k; down_proj q4_k, in the first 16th q5_k
    q3_k_l    q3_k; o_proj, v_proj, down_proj q5_k
    q4_k_s    q4_k; v_proj of the first four blocks, down_proj of the first eighth q5_k
    q4_k_m    q4_k; v_proj, down_proj of `more` q6_k
    q5_k_m    q5_k; v_proj, down_proj of `more` q6_k
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

import torch

from compress.base.errors import InputError, check_least, one_of
from compress.kernels.layouts.k_quants import BLOCK
from compress.model.patterns import ignoring
from compress.passes.gptq import GPTQ
from compress.passes.options.k_mixes import K_SCHEMES, MIXES, blocks_of_names, type_in, types_of
from compress.passes.options.loss_aware import LossAware
from compress.passes.protocol.base import Aspect, Pass
from compress.passes.protocol.round_to_nearest import weight_error
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide
from compress.passes.rtn import RTN
from compress.solvers.hessian_with_drift import ActOrder, Problem
from compress.solvers.k_quants.solve import KRule, nearest_blocks
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.decision import Decision
from compress.weights.formats.k_quants import KQuant
from compress.weights.matrix import Matrix
from compress.weights.number_formats import LEVELS
from compress.weights.scheme import Scheme

Rounding = Literal["gptq", "nearest"]
# What llama.cpp has instead where super-blocks do not fit, as schemes of groups of 32 with signed scales.
FALLBACKS = {**dict.fromkeys(("q2_k", "q3_k", "iq4_xs"), "iq4_nl"), "q4_k": "w5a16", "q5_k": "w5a16", "q6_k": "w8a16"}
FALLBACK_GROUP = 32
# The options that are of the sweep, and of the fallback's.
OF_GPTQ = ("damp", "drift", "shrink", "statistics", "refit", "sweeps", "objective")


@dataclass(frozen=True, kw_only=True)
class KQuants(LossAware):
    """llama.cpp's K-quants and IQ4_XS, by GPTQ or to nearest."""

    name: ClassVar[str] = "k-quants"
    writes: ClassVar[Aspect] = "quantized weight"
    act_order: ClassVar[ActOrder] = "none"  # type: ignore[misc]  # groups and super-blocks are runs of columns

    scheme: str = "q4_k"
    """q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs: the type of all layers; or a mix: q3_k_m, q3_k_l, q4_k_s, q4_k_m,
    q5_k_m."""

    rounding: Rounding = "gptq"
    """Codes by GPTQ's sweep, or to nearest without calibration data."""

    blocks: int = 0
    """0 or a number: blocks of the model, by which a mix tells their types; 0: as many as its layers' names say."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("K-quant", self.scheme, K_SCHEMES)
        one_of("rounding", self.rounding, get_args(Rounding))
        check_least(self, 0, "blocks")
        idle = [f.name for f in fields(self) if f.name in OF_GPTQ and getattr(self, f.name) != f.default]
        if idle and not self.calibrates:
            raise InputError(f"{idle[0]} is of rounding=gptq, and rounding is nearest; leave it out")

    @property
    def format(self) -> KQuant:
        """The format of a layer whose inputs are a multiple of 256."""
        return KQuant(type=self.scheme)

    @property
    def calibrates(self) -> bool:
        return self.rounding == "gptq"

    @property
    def group_length(self) -> int:
        return self.format.layout.group

    def needs(self) -> Mapping[str, StatisticFactory]:
        return super().needs() if self.calibrates else {}

    @property
    def decide_stage(self) -> Decide:
        stage = super().decide_stage
        return stage if self.calibrates else replace(stage, reference=False)

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        bad = [name for name, (_, columns) in shapes.items() if columns % FALLBACK_GROUP]
        if bad:
            raise InputError(
                f"{self.scheme} needs inputs in multiples of {FALLBACK_GROUP}: {bad[0]} has {shapes[bad[0]][1]} "
                f"({len(bad)} layers in all); give those another method, or leave them out: "
                f"{ignoring(bad, list(shapes))}"
            )

    @property
    def usual_size(self) -> int | None:
        return BLOCK

    def sized(self, widths: Collection[int], example: str) -> tuple[Pass, str | None]:
        """This pass, and the types of layers whose inputs are no multiple of 256."""
        instead = ", ".join(f"{kind} becomes {FALLBACKS[kind]}" for kind in types_of(self.scheme))
        return self, (
            f"{example}, no multiple of {BLOCK}, like others perhaps: there {instead}, in groups of {FALLBACK_GROUP}, "
            "the types that llama.cpp falls back to"
        )

    def placed(self, layers: Sequence[str]) -> Pass:
        known = self.blocks or self.scheme not in MIXES
        return self if known else replace(self, blocks=blocks_of_names(self.scheme, layers))

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        typed = replace(self, scheme=type_in(self.scheme, layer, self.blocks))
        return typed.fallback.stored(layer, shape) if shape[1] % BLOCK else Scheme(terms=(typed.format,))

    def apply(self, site: Site) -> dict[str, Decision]:
        types = {name: type_in(self.scheme, name, self.blocks) for name in site.weights}
        made: dict[str, Decision] = {}
        for kind in dict.fromkeys(types.values()):
            part = site.rows({name: slice(None) for name in types if types[name] == kind})
            made |= replace(self, scheme=kind)._of_one_type(part)
        return {name: made[name] for name in site.weights}

    def _of_one_type(self, site: Site) -> dict[str, Decision]:
        if next(iter(site.weights.values())).shape[1] % BLOCK:
            return self.fallback.apply(site)
        if self.calibrates:
            return super().apply(site)
        rounded = {name: nearest_blocks(weight, self.format) for name, weight in site.weights.items()}
        return {n: Decision(w, {"weight_error": weight_error(site.weights[n], w)}) for n, w in rounded.items()}

    @property
    def fallback(self) -> Pass:
        """The pass for layers whose inputs are no multiple of 256."""
        scheme = FALLBACKS[self.scheme]
        # iq4_nl has scales of float16 only.
        form: dict[str, Any] = {"scheme": scheme} if scheme in LEVELS else {"scheme": scheme, "scales": "float16"}
        if not self.calibrates:
            return RTN(**form, group_size=FALLBACK_GROUP, clip=True)
        same = {option: getattr(self, option) for option in OF_GPTQ}
        return GPTQ(**form, group_size=FALLBACK_GROUP, **same)

    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Matrix:
        return nearest_blocks(site.weights[name].to(dtype), self.format)

    def solve_rows(self, site: Site, problem: Problem, scale_dtype: torch.dtype, **rows: Any) -> Matrix:
        rule = KRule.of(rows["weight_NK"], problem, self.format)
        return rule.solve(rows["weight_NK"], problem, self.refit, self.sweeps, rows.get("outputs_NS")).weight
