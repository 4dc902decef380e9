"""The score of a weight: what a mask that keeps the highest scores goes by. One function per paper.

Shapes: N outputs, K inputs. Scores [N, K] are never negative.

    magnitude   |W_ij|                                           Han et al., arXiv 1506.02626
    wanda       |W_ij| |X_j|_2                                   Sun et al., arXiv 2306.11695
    taylor      (g_ij W_ij)^2, summed                            Molchanov et al., arXiv 1906.10771, equation 8
"""

from torch import Tensor

from compress.weights.grid import working_dtype

# Of the largest norm: as good as never active, and above zero.
LEAST_NORM = 1e-12


def magnitude(weight_NK: Tensor) -> Tensor:
    """[N, K] |W_ij|, in a dtype whose products do not overflow."""
    return weight_NK.to(working_dtype(weight_NK)).abs()


def wanda(weight_NK: Tensor, norm_K: Tensor) -> Tensor:
    """[N, K] |W_ij| |X_j|, divided by the largest norm, which decides nothing inside a layer. norm: of each input over
    tokens, |X_j|_2, of any scale. Where no input is active, weights are compared by size alone."""
    most = norm_K.max()
    relative = (norm_K / most).clamp(min=LEAST_NORM) if most > 0 else norm_K.new_ones(norm_K.shape)
    size = magnitude(weight_NK)
    return size * relative.to(size.dtype)


def taylor(weight_NK: Tensor, gradient_NK: Tensor) -> Tensor:
    """[N, K] float64: the squared change of the loss of one micro-batch where a weight becomes zero, to
    first order. gradient: of that loss by the weight. The score is the sum over micro-batches."""
    return (weight_NK.double() * gradient_NK.double()).square()
