"""The Pareto front: the points that no other beats in both of two figures, of which less is better."""

from collections.abc import Sequence


def undominated(places: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the pairs that no other is at most as large as in both figures and smaller in one; of equals all."""

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    return {i for i, place in enumerate(places) if not any(beats(other, place) for other in places)}
