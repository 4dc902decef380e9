"""The recipe of few bits: learned ranges are close to floats, and better than straight-through min-max."""

import pytest

pytest.importorskip("sklearn", reason="the digits are in scikit-learn")

from compress.recipes.studies.quality import low_bits
from compress.recipes.studies.quality.lottery import digits

POINTS = {2: 2.0, 3: 1.0, 4: 1.0}  # below the network of floats
STEPS = 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learned_ranges_are_close_to_floats_and_better_than_min_max():
    seen, unseen = digits()
    model = low_bits.trained(0, seen)
    for bits, points in POINTS.items():
        row = low_bits.found(0, bits, STEPS, model, seen, unseen)
        assert min(row.learned, row.anchored) >= row.float - points, row
        if bits == 2:  # of more bits little is lost either way
            assert min(row.learned, row.anchored) > row.minmax, row
