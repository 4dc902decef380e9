"""Five ternary codes in a byte: the layout, its inverse, and which bytes there are."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.layouts.trits import bytes_of, limits, pack_trits, unpack_trits

examples = settings(max_examples=25, deadline=None, derandomize=True)
ROWS = st.integers(1, 40).flatmap(
    lambda count: st.lists(st.lists(st.integers(-1, 1), min_size=count, max_size=count), min_size=1, max_size=4)
)


@examples
@given(ROWS)
def test_bytes_are_numbers_to_the_base_of_three_and_give_back_their_digits(rows):
    packed = pack_trits(torch.tensor(rows, dtype=torch.int8))
    assert packed.dtype == torch.uint8
    fives = [[row[first : first + 5] for first in range(0, len(row), 5)] for row in rows]
    expected = [[sum((code + 1) * 3**place for place, code in enumerate(five)) for five in row] for row in fives]
    assert packed.tolist() == expected
    assert packed.shape[1] == bytes_of(len(rows[0]))
    assert unpack_trits(packed, len(rows[0])).tolist() == rows


def test_the_limits_of_a_row_are_what_its_bytes_can_be_and_no_more():
    for count in range(1, 12):
        largest = pack_trits(torch.ones(1, count, dtype=torch.int8))
        assert torch.equal(largest[0].to(torch.int16) + 1, limits(count))
    every = torch.arange(243, dtype=torch.uint8).unsqueeze(1)
    assert torch.equal(pack_trits(unpack_trits(every, 5)), every)
    assert len(unpack_trits(every, 5).unique(dim=0)) == 243
