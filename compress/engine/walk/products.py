"""Products with a weight inside a module's forward, where no call of a module is the product.

    F.linear(x, experts.up[3])        one expert       x [..., K]                   the layer `experts.up.3`
    torch.bmm(x, experts.up.mT)       all of them      x [E, M, K]                  expert e reads x[e]
    F.grouped_mm(x, experts.up.mT, offs=ends)          x [S, K], sorted by expert   expert e reads x[ends[e-1]:ends[e]]

A weight is known by the memory that it is a view of. Products of copies of it (gathered by tokens, or of another dtype)
are not seen, nor are those inside torch functions that make several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.base.errors import CompressError
from compress.model.layers import Layer

# By the name of the function: the place of the left operand among its tensors.
LEFT = {"linear": 0, "matmul": 0, "__matmul__": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")

See = Callable[[Layer, Tensor], None]


class Products(TorchFunctionMode):
    """Calls `see(layer, x)` inside the context before every product of a layer's weight with x, [..., K]; not for an
    expert that is given no row.

    Raises CompressError, in the forward, for a weight that is not stored as its layer says.
    """

    def __init__(self, layers: Sequence[Layer], see: See) -> None:
        super().__init__()
        self.see = see
        self.layers: dict[nn.Parameter, dict[int | None, Layer]] = {}
        for layer in layers:
            self.layers.setdefault(layer.parameter, {})[layer.index] = layer
        self.inside = False  # a call: torch has then taken the mode away

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in LEFT or name in GROUPED:
            self.inside = True
            try:
                for layer, x in self._read(name, [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]):
                    self.see(layer, x)
            finally:
                self.inside = False
        return func(*args, **kwargs)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Turns the mode off inside the context: code there finds torch as it is outside the forward."""
        inside = self.inside
        if not inside:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.inside = inside
            if not inside:
                self.__enter__()

    def _read(self, name: str, tensors: Sequence[Tensor]) -> Iterator[tuple[Layer, Tensor]]:
        """(layer, the rows that it reads) of a product."""
        if len(tensors) < LEFT.get(name, 0) + 2:
            return
        left, right, *rest = tensors[LEFT.get(name, 0) :]
        if (weight_view := self._known(right)) is not None:
            x, rows_first = left, name == "linear"
        elif name != "linear" and name not in GROUPED and (weight_view := self._known(left)) is not None:
            right, left = left, right
            x, rows_first = left.mT if left.ndim > 1 else left, True
        else:
            return
        parameter, first, flipped = weight_view
        ends = rest[0].tolist() if name in GROUPED and rest else None
        for i, index in enumerate(_indices(right, parameter, first)):
            layer = self.layers[parameter].get(index)
            if layer is None:
                continue
            if layer.transposed != (rows_first == flipped):
                raise CompressError(_other_way(layer))
            rows = x
            if ends is not None:
                rows = x[ends[i - 1] if i else 0 : ends[i]]
            elif right.ndim == 3 and x.ndim > 2 and x.shape[-3] == len(right):
                rows = x[..., i, :, :]
            if rows.numel():
                yield layer, rows

    def _known(self, weight: Tensor) -> tuple[nn.Parameter, int, bool] | None:
        """(The parameter that a tensor is a view of, its first element there, whether the last two dimensions have
        changed places); None where it is of no layer."""
        if weight.ndim not in (2, 3):
            return None
        place = weight.untyped_storage().data_ptr()
        for parameter in self.layers:
            data = parameter.data
            first = int(weight.storage_offset() - data.storage_offset())
            if data.untyped_storage().data_ptr() == place and 0 <= first < data.numel():
                return parameter, first, weight.stride()[-2:] != data.stride()[-2:]
        return None


def _indices(weight: Tensor, parameter: nn.Parameter, first: int) -> list[int | None]:
    """The slices of a parameter that a view of it holds, which begins at this element; None for one without slices."""
    if parameter.ndim < 3:
        return [None]
    each = parameter.data.stride(0)
    if weight.ndim == 3 and weight.stride(0) == each:
        return list(range(first // each, first // each + len(weight)))
    return [first // each]


def _other_way(layer: Layer) -> str:
    taken, found = "[outputs, inputs]", "[inputs, outputs]"
    if layer.transposed:
        taken, found = found, taken
    return (
        f"{layer.name} is multiplied as {found} and was taken for {taken}; set is_transposed of the "
        f"{type(layer.module).__name__} to {not layer.transposed}, or ignore the layer"
    )
