"""One thread for what is too small for several, and as many as before when all of it is done."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from compress.base.threads import one_thread
from compress.kernels.cpu.column_sweep import WORTH_A_THREAD, useful_threads


@pytest.fixture(autouse=True)
def three():
    """Three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_threads_come_back_when_the_last_one_has_left():
    meet, leave = Barrier(2), Barrier(2)

    def inside(first: bool) -> int:
        with one_thread():
            meet.wait()
            if not first:
                leave.wait()
        if first:
            leave.wait()
        return torch.get_num_threads()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(inside, [True, False]))
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ValueError), one_thread():
        raise ValueError
    assert torch.get_num_threads() == 3
    with one_thread(wanted=False):
        assert torch.get_num_threads() == 3


def test_loops_over_columns_take_as_many_threads_as_they_are_worth():
    assert [useful_threads(n) for n in (0, WORTH_A_THREAD, 2 * WORTH_A_THREAD, 2**40)] == [1, 1, 2, 3]
