"""The lottery recipe: one ticket of the digits, from a fixed seed."""

import pytest

from compress.recipes.studies.quality.tickets import Lottery

pytest.importorskip("sklearn", reason="the digits are in scikit-learn")

from compress.recipes.studies.quality import lottery

ALLOWED = 1.0  # points below the dense network
STEPS = 400


@pytest.mark.slow
def test_a_ticket_is_as_good_as_its_network_and_better_than_its_mask_alone():
    found = lottery.drawn(0, Lottery(sparsity=lottery.SPARSITY, per="model", to=40), STEPS)
    assert found.ticket >= found.dense - ALLOWED
    assert found.ticket > max(found.others)
