"""Which samples steps have."""

from compress.train.inputs.samples import SampleOrder


def test_an_epoch_has_every_sample_once_and_seeds_and_epochs_their_own_order():
    def epoch(seed: int, number: int) -> tuple[int, ...]:
        order = SampleOrder(12, 4, seed)
        return tuple(sample for step in range(3) for sample in order.of_step(3 * number + step))

    orders = [epoch(seed, number) for seed in (0, 1, 2, 2**31) for number in (0, 1, 2)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(orders)) == len(orders)
