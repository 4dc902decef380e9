"""Sparse rows: any weight and back, and tables that cannot be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.base.errors import CheckpointError
from compress.weights.formats.sparse import SHORT_COLUMNS, Sparse, SparseRows, column_dtype, sparse


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.sampled_from((0.0, 0.1, 0.7, 1.0)), st.integers(0, 10**6), st.data())
def test_any_choice_of_any_weight_comes_back_row_by_row(rows, columns, share, seed, data):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=draw).to(torch.bfloat16)
    chosen = torch.rand(rows, columns, generator=draw) < share
    if data.draw(st.booleans()):
        chosen[seed % rows] = not chosen[0, 0]  # a row that is full, or empty
    term = sparse(values, chosen)
    expected = torch.where(chosen, values, torch.zeros_like(values))
    term.format.check(term.parts(), rows, columns)
    assert torch.equal(term.dequantize(), expected)
    cut = data.draw(st.integers(0, rows))
    step = data.draw(st.sampled_from((1, 3)))
    assert torch.equal(Sparse.stacked([term.rows(slice(cut)), term.rows(slice(cut, None))]).dequantize(), expected)
    assert torch.equal(term.rows(slice(None, None, step)).dequantize(), expected[::step])
    x = torch.randn(3, columns, generator=draw).to(torch.bfloat16)
    product = term.format.product(x, term.parts())
    torch.testing.assert_close(product.float(), x.float() @ expected.float().t(), rtol=1e-2, atol=1e-2)


def test_counts_have_the_smallest_dtype_that_holds_them():
    for columns, dtype in ((255, torch.uint8), (256, torch.int16), (SHORT_COLUMNS, torch.int32)):
        term = sparse(torch.ones(2, columns), torch.tensor([[True], [False]]).expand(2, columns))
        assert term.parts()["row_count"].dtype == dtype
        assert term.format.read(term.parts(), 2, columns).row_start.tolist() == [0, columns, columns]


def test_columns_beyond_16_bits_have_32():
    assert [column_dtype(columns) for columns in (1, SHORT_COLUMNS, SHORT_COLUMNS + 1)] == [
        *(torch.int16, torch.int16),
        torch.int32,
    ]
    wide = torch.zeros(2, SHORT_COLUMNS + 1)
    wide[1, SHORT_COLUMNS] = 3.0
    term = sparse(wide, wide != 0)
    assert term.column.tolist() == [SHORT_COLUMNS]
    assert torch.equal(term.dequantize(), wide)


DAMAGED = {
    "column too large": ({"column": [0, 2, 8]}, r"column goes from 0 to 8; there are 8 inputs"),
    "column below 0": ({"column": [-1, 2, 1]}, r"column goes from -1 to 2; there are 8 inputs"),
    "unsorted": ({"column": [2, 0, 1]}, r"column does not rise within each row: there are repeated or unsorted"),
    "repeated": ({"column": [2, 2, 1]}, r"column does not rise within each row: there are repeated or unsorted"),
    "rows of too many": ({"row_count": [2, 1, 1]}, r"row_count is of 4 entries; there are 3 values"),
    "rows of too few": ({"row_count": [2, 0, 0]}, r"row_count is of 2 entries; there are 3 values"),
    "rows that overlap": ({"row_count": [4, -2, 1]}, r"row_count goes down to -2"),
    "rows of others": ({"row_count": [0, 3, 0]}, r"column does not rise within each row"),
    "no number": ({"value": [1.0, float("nan"), 2.0]}, r"value holds values that are not finite"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_table_that_cannot_be_is_refused_and_its_part_named(name):
    parts = {
        "row_count": torch.tensor([2, 0, 1], dtype=torch.int16),
        "column": torch.tensor([0, 2, 1], dtype=torch.int16),
        "value": torch.tensor([1.0, 2.0, 3.0]),
    }
    format_ = SparseRows(entries=3)
    format_.check(parts, 3, 8)
    changed, said = DAMAGED[name]
    damaged = {key: torch.tensor(value, dtype=parts[key].dtype) for key, value in changed.items()}
    with pytest.raises(CheckpointError, match=said):
        format_.check({**parts, **damaged}, 3, 8)
