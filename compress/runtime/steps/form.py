"""Finds the form of a decoder block: which products it has, what stands between them, and how.

Nothing is concluded from names of classes. A trial (`trace.py`) has what each module was given and returned; a form is
known if every number of the trial follows from the numbers before it by the operations of `kernels.cpu.steps`.

    norm -> q, k, v -> (norms of heads) -> (rotary embedding) -> cache, attention -> o -> (norm) -> + x
         -> norm -> gate, up -> act(gate) up, or act(up) -> down -> (norm) -> +

or with the MLP beside attention. An MLP of another form (a mixture of experts) is called as it is.
"""

from compress.runtime.steps.attention_form import attention_form
from compress.runtime.steps.mlp_form import mlp_form, sums_of
from compress.runtime.steps.parts import TOLERANCE, BlockForm
from compress.runtime.steps.trace import Trace, UnknownFormError


def form_of(trace: Trace) -> BlockForm:
    """The form of a block. Raises UnknownFormError."""
    if trace.x.dtype not in TOLERANCE:
        raise UnknownFormError(f"it computes in {trace.x.dtype}")
    attention, a = attention_form(trace)
    mlp, m, parallel = mlp_form(trace, attention, a)
    return BlockForm(attention, mlp, parallel, sums_of(trace, a, m, parallel))
