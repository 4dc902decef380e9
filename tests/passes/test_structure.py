"""Which groups go and what makes up for them, against least squares by brute force on the data themselves."""

import pytest
import torch

from compress.base.collectives import Comm
from compress.engine.shrink.groups import Reading, choose
from compress.passes.whole_model.structure import Structure
from compress.solvers.removal import AffineHessian, CutConsumer, LeastSquares, Zeroing, best, compensate, greedy
from compress.solvers.statistics.hessian import Hessian

T, N, SIZE, GROUPS = 400, 5, 3, 6
FREE = 2  # inputs that are in no group
K = GROUPS * SIZE + FREE
TINY = 1e-12  # damping that changes nothing
EXACT = {"damp": TINY, "shrink": False, "statistics": "float64"}


def data(seed=0):
    """Correlated inputs with means, [T, K], a weight [N, K] and a bias [N]."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(K, K, generator=generator, dtype=torch.float64)
    x = torch.randn(T, K, generator=generator, dtype=torch.float64) @ mixing + 1
    return x, *(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((N, K), (N,)))


COLUMNS = (torch.randperm(K, generator=torch.Generator().manual_seed(4))[: GROUPS * SIZE]).view(GROUPS, SIZE)


def without(groups):
    gone = COLUMNS[groups].flatten().tolist()
    return [k for k in range(K) if k not in gone]


def least(x, y, groups, ones=False):
    """(the best weights on what is left, the mean squared error per token) by QR of the data."""
    left = x[:, without(groups)]
    left = torch.cat([left, torch.ones(T, 1, dtype=x.dtype)], 1) if ones else left
    found = torch.linalg.lstsq(left, y).solution
    return found.T, float((y - left @ found).square().sum() / T)


def consumer(x, weight):
    return CutConsumer(weight, x.T @ x / T, COLUMNS, TINY)


def test_the_cost_of_a_group_is_what_least_squares_loses():
    x, weight, _ = data()
    costs, gone, before = LeastSquares(consumer(x, weight)), [], 0.0
    for next_one in (4, 1, 3):
        scores = costs.scores()
        for group in set(range(GROUPS)) - set(gone):
            _, lost = least(x, x @ weight.T, [*gone, group])
            assert float(scores[group]) == pytest.approx(lost - before, rel=1e-6)
        costs.remove(torch.tensor([next_one]))
        gone.append(next_one)
        before = least(x, x @ weight.T, gone)[1]


def test_without_making_up_the_cost_of_a_group_is_what_its_zeros_lose():
    x, weight, _ = data()
    costs, gone = Zeroing(consumer(x, weight)), []
    for next_one in (2, 5, 0):
        lost = [
            float((x[:, (inside := COLUMNS[[*gone, g]].flatten())] @ weight[:, inside].T).square().sum() / T)
            for g in range(GROUPS)
        ]
        before = float((x[:, (inside := COLUMNS[gone].flatten())] @ weight[:, inside].T).square().sum() / T)
        for group in set(range(GROUPS)) - set(gone):
            assert float(costs.scores()[group]) == pytest.approx(lost[group] - before, rel=1e-6)
        costs.remove(torch.tensor([next_one]))
        gone.append(next_one)


def test_survivors_are_the_least_squares_solution_with_its_bias():
    x, weight, bias = data()
    for ones, moments in ((False, Hessian), (True, AffineHessian)):
        statistic = moments(K, torch.device("cpu"), dtype=torch.float64)
        for part in x.split(37):
            statistic.update(part, None)
        y = x @ weight.T + (bias if ones else 0)
        reading = Reading(weight, bias if ones else None, {"hessian": statistic.result()}, COLUMNS)
        how = Structure(heads=0.5, rounds=GROUPS, **EXACT)
        chosen = choose(how, (GROUPS, 3), {"o": reading}, torch.zeros(GROUPS), Comm())
        gone = [g for g in range(GROUPS) if g not in chosen.kept.tolist()]
        assert len(gone) == 3
        expected, lost = least(x, y, gone, ones)
        found, found_bias = chosen.solved["o"]
        if ones:
            found = torch.cat([found, found_bias[:, None]], 1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        assert chosen.figures["loss"] == pytest.approx(lost / float(y.square().sum() / T), rel=1e-5)
        assert chosen.figures["zeroed_loss"] > 1.5 * chosen.figures["loss"]


def test_what_was_cut_before_a_layer_is_made_up_for():
    """The layer's input has drifted: it aims at what it returned in the original model."""
    x, weight, bias = data()
    drifted = x + 0.3 * torch.randn(K, K, generator=torch.Generator().manual_seed(8), dtype=torch.float64)[0] * x[:, :1]
    statistic = AffineHessian(K, torch.device("cpu"), dtype=torch.float64, reference=True)
    statistic.update(drifted, x)
    reading = Reading(weight, bias, {"hessian": statistic.result()}, COLUMNS)
    for drift in (1.0, 0.0):
        how = Structure(heads=0.5, drift=drift, **EXACT)
        chosen = choose(how, (GROUPS, 4), {"o": reading}, torch.zeros(GROUPS), Comm())
        found = torch.cat([chosen.solved["o"][0], chosen.solved["o"][1][:, None]], 1)
        gone = [g for g in range(GROUPS) if g not in chosen.kept.tolist()]
        wanted = (x if drift else drifted) @ weight.T + bias
        torch.testing.assert_close(found, least(drifted, wanted, gone, ones=True)[0], rtol=1e-5, atol=1e-7)


def test_what_others_can_replace_goes_before_what_is_small():
    """A channel that is a sum of two others costs nothing, and is the largest of all; magnitude takes the smallest."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(T, 8, generator=generator, dtype=torch.float64)
    x[:, 6] = x[:, 1] + x[:, 2]
    x[:, 3] = 0  # never active: costs nothing, whatever it weighs
    weight = torch.rand(N, 8, generator=generator, dtype=torch.float64) + 0.5
    weight[:, 6], weight[:, 3], weight[:, 5] = 9.0, 7.0, 0.1
    layer = CutConsumer(weight, x.T @ x / T, torch.arange(8)[:, None], 1e-8)
    assert greedy([Zeroing(layer)], 8, 1, 64).tolist() == [0, 1, 2, 4, 5, 6, 7]
    kept = greedy([LeastSquares(layer)], 8, 2, 64).tolist()
    assert 3 not in kept
    assert not {1, 2, 6} <= set(kept)  # one of the three that depend on each other
    staying = layer.inputs(torch.tensor(kept))
    torch.testing.assert_close(x[:, staying] @ compensate(layer, staying).T, x @ weight.T, rtol=0, atol=1e-5)
    assert 5 not in greedy([Zeroing(layer)], 8, 2, 64).tolist()
    assert best(weight.square().sum(0), 1).tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_with_few_tokens_little_is_made_up():
    """Second moments of five tokens are noise off the diagonal; shrunk, they leave survivors nearly as they were."""
    x, weight, _ = data()
    change = {}
    for shrink in (True, False):
        statistic = Hessian(K, torch.device("cpu"), dtype=torch.float64)
        noise = torch.randn(5, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        statistic.update(noise, None)
        reading = Reading(weight, None, {"hessian": statistic.result()}, COLUMNS)
        how = Structure(heads=0.5, shrink=shrink, statistics="float64")
        chosen = choose(how, (GROUPS, 3), {"o": reading}, torch.zeros(GROUPS), Comm())
        inputs = CutConsumer(weight, x.T @ x, COLUMNS, TINY).inputs(chosen.kept)
        change[shrink] = float((chosen.solved["o"][0] - weight[:, inputs]).norm() / weight[:, inputs].norm())
    assert change[True] < 0.3 * change[False]


def test_how_many_stay():
    for share, groups, multiple, left in [(0.25, 8, 1, 6), (0.25, 64, 32, 64), (0.5, 64, 32, 32), (0.3, 100, 8, 72)]:
        how = Structure(channels=share, multiple=multiple)
        if left == groups:
            with pytest.raises(
                ValueError, match=r"channels 0\.25 of 64 channels in multiples of 32 is none; give 0\.5"
            ):
                how.staying("channels", groups)
        else:
            assert how.staying("channels", groups) == left
    assert Structure(heads=0.9).staying("heads", 2) == 1
    assert [Structure(heads=share).staying("heads", 10) for share in (0.1, 0.28, 0.3, 0.7)] == [9, 8, 7, 3]
    for groups, enough in ((2, "0.5"), (3, "0.334")):  # a quarter of them would be half, or a third
        with pytest.raises(ValueError, match=rf"heads 0\.25 of {groups} heads .* is none; give {enough} or more"):
            Structure(heads=0.25).staying("heads", groups)
        assert Structure(heads=float(enough)).staying("heads", groups) == groups - 1
