"""The factorization and the column sweep: what they compute, and what they do with Hessians that are not good."""

import pytest
import torch

from compress.base.errors import CompressError
from compress.solvers.column_sweep import BLOCK, ColumnRule, sweep
from compress.solvers.hessian_with_drift import DAMP_LIMIT, Problem, add_damping
from compress.weights.grid import Grid, quantize


def correlated_hessian(channels: int, seed: int = 0, tokens: int | None = None) -> torch.Tensor:
    """X^T X / tokens of inputs with mixed channels of log-normal size, float64."""
    generator = torch.Generator().manual_seed(seed)
    count = 4 * channels if tokens is None else tokens
    x = torch.randn(count, channels, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(channels, channels, generator=generator, dtype=torch.float64) / channels**0.5
    x = x * torch.randn(channels, generator=generator, dtype=torch.float64).exp()
    return x.t() @ x / count


def normal(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row_losses(error_NK: torch.Tensor, hessian_KK: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ni,ij,nj->n", error_NK, hessian_KK, error_NK)


class Rounding(ColumnRule):
    """Rounds to multiples of a step, and notes what it is shown."""

    def __init__(self, step: float, group: int = 0) -> None:
        self.step, self.group = step, group
        self.begun: dict[int, torch.Tensor] = {}
        self.decided: list[int] = []

    def begin(self, column, updated_gN):
        self.begun[column] = updated_gN.clone()

    def decide(self, column, target_N):
        self.decided.append(column)
        return torch.round(target_N / self.step) * self.step


@pytest.mark.parametrize("damp", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("channels", [1, 7, 200])
def test_factor_reconstructs_the_damped_hessian(channels, damp):
    hessian = correlated_hessian(channels)
    before = hessian.clone()
    factor = Problem.of(hessian, damp)
    assert torch.equal(hessian, before)
    assert factor.damp == damp
    assert torch.equal(factor.upper, factor.upper.triu())
    assert torch.allclose(factor.upper.diagonal(), torch.ones(channels, dtype=torch.float64), atol=0, rtol=1e-15)
    assert torch.all(factor.diagonal > 0)
    rebuilt = factor.upper @ factor.diagonal.diag() @ factor.upper.t()
    target = hessian + damp * hessian.diagonal().mean() * torch.eye(channels, dtype=torch.float64)
    assert (rebuilt - target).norm() <= 1e-12 * target.norm()


def test_dead_columns_do_not_pollute_the_mean_that_damps():
    hessian = correlated_hessian(40)
    alone = add_damping(hessian, 0.1)
    # 60 dead columns among the 40: a mean over all of them would be 2.5 times too small.
    places = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:40].sort().values
    with_dead = torch.zeros(100, 100, dtype=torch.float64)
    with_dead[places[:, None], places] = hessian
    result = add_damping(with_dead, 0.1)
    assert torch.allclose(result[places[:, None], places], alone, rtol=1e-14, atol=0)
    assert torch.allclose(
        result[places, places] - hessian.diagonal(), (0.1 * hessian.diagonal().mean()).expand(40), rtol=1e-10
    )
    # A dead column is as stiff as an average live one, and coupled to none.
    dead = torch.tensor([j for j in range(100) if j not in places.tolist()])
    average = hessian.diagonal().mean() * 1.1
    assert torch.allclose(result[dead[:, None], dead], average * torch.eye(60, dtype=torch.float64), rtol=1e-12)
    assert torch.all(result[dead[:, None], places] == 0)


def test_dead_columns_do_not_change_what_the_live_ones_become():
    hessian, weight = correlated_hessian(40), normal(5, 40)
    alone, _ = sweep(weight, Problem.of(hessian, 0.01), Rounding(0.25))
    places = torch.arange(0, 80, 2)
    with_dead = torch.zeros(80, 80, dtype=torch.float64)
    with_dead[places[:, None], places] = hessian
    wide = normal(5, 80, seed=2)
    wide[:, places] = weight
    values, _ = sweep(wide, Problem.of(with_dead, 0.01), Rounding(0.25))
    assert torch.equal(values[:, places], alone)
    assert torch.equal(values[:, 1::2], torch.round(wide[:, 1::2] / 0.25) * 0.25)


def test_hessian_without_any_live_column_is_rounded_plainly():
    factor = Problem.of(torch.zeros(9, 9, dtype=torch.float64), 0.01)
    assert factor.damp == 0.01
    weight = normal(3, 9)
    assert torch.equal(sweep(weight, factor, Rounding(0.5))[0], torch.round(weight / 0.5) * 0.5)


@pytest.mark.parametrize(("coupling", "needed"), [(0.5, 0.01), (1.05, 0.1), (1.5, 1.0), (5.0, 10.0)])
def test_indefinite_hessian_raises_the_damping_tenfold_and_reports_it(coupling, needed):
    # Eigenvalues 1 + coupling and 1 - coupling, mean diagonal 1: damping above coupling - 1 makes it definite.
    hessian = torch.tensor([[1.0, coupling], [coupling, 1.0]], dtype=torch.float64)
    factor = Problem.of(hessian, 0.01)
    assert factor.damp == pytest.approx(needed, rel=1e-12)
    rebuilt = factor.upper @ factor.diagonal.diag() @ factor.upper.t()
    assert torch.allclose(rebuilt, hessian + needed * torch.eye(2, dtype=torch.float64), rtol=1e-12)


def test_rank_deficient_hessian_without_damping_is_damped():
    hessian = correlated_hessian(64, tokens=10)
    factor = Problem.of(hessian, 0.0)
    assert factor.damp >= 1e-4
    rebuilt = factor.upper @ factor.diagonal.diag() @ factor.upper.t()
    assert torch.allclose(rebuilt, add_damping(hessian, factor.damp), rtol=1e-10)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_hessian_that_is_not_finite_is_refused(poison):
    hessian = correlated_hessian(16)
    hessian[5, 5] = poison
    with pytest.raises(CompressError, match="non-finite activations"):
        Problem.of(hessian, 0.01)
    with pytest.raises(CompressError, match=str(DAMP_LIMIT)):
        Problem.of(torch.full((4, 4), poison), 0.01)


@pytest.mark.parametrize(
    ("columns", "group"),
    [(48, 0), (48, 16), (48, 48), (384, 0), (384, 16), (384, 48), (384, 192), (384, 384), (300, 0)],
)
def test_loss_of_the_sweep_is_the_quadratic_form_of_its_error(columns, group):
    hessian, weight = correlated_hessian(columns), normal(6, columns)
    rule = Rounding(0.3, group)
    values, loss = sweep(weight, Problem.of(hessian, 0.01), rule)
    exact = row_losses(weight - values, add_damping(hessian, 0.01))
    assert torch.allclose(loss, exact, rtol=1e-9, atol=0)
    assert rule.decided == list(range(columns))
    assert sorted(rule.begun) == (list(range(0, columns, group)) if group else [])


def test_sweep_loses_less_than_plain_rounding():
    hessian, weight = correlated_hessian(200), normal(32, 200)
    loss = sweep(weight, Problem.of(hessian, 0.01), Rounding(0.5))[1]
    nearest = row_losses(weight - torch.round(weight / 0.5) * 0.5, add_damping(hessian, 0.01))
    assert loss.sum() < 0.7 * nearest.sum()


@pytest.mark.parametrize(("columns", "group"), [(384, 8), (384, 48), (3 * BLOCK, BLOCK), (4 * BLOCK, 2 * BLOCK)])
def test_a_group_begins_with_the_weights_that_minimise_the_loss_given_all_decisions_so_far(columns, group):
    hessian, weight = correlated_hessian(columns, seed=4), normal(3, columns)
    rule = Rounding(0.4, group)
    values, _ = sweep(weight, Problem.of(hessian, 0.01), rule)
    exact = add_damping(hessian, 0.01)
    for first, updated_gN in rule.begun.items():
        # Setting the gradient of the free columns to zero: w_free + E_done H_done,free H_free,free^-1.
        error = (weight - values)[:, :first]
        change = torch.linalg.solve(exact[first:, first:], exact[first:, :first] @ error.t())
        expected = weight[:, first : first + group].t() + change[:group]
        assert torch.allclose(updated_gN, expected, rtol=1e-9, atol=1e-9)
    assert len(rule.begun) == columns // group


@pytest.mark.parametrize(("columns", "group"), [(300, 0), (304, 16), (300, 300)])
def test_identity_hessian_is_plain_rounding(columns, group):
    weight = normal(5, columns)
    factor = Problem.of(torch.eye(columns, dtype=torch.float64), 0.01)
    values, loss = sweep(weight, factor, Rounding(0.2, group))
    nearest = torch.round(weight / 0.2) * 0.2
    assert torch.equal(values, nearest)
    assert torch.allclose(loss, 1.01 * (weight - nearest).square().sum(1), rtol=1e-12)
    diagonal = torch.linspace(0.1, 10, columns, dtype=torch.float64)
    assert torch.equal(sweep(weight, Problem.of(diagonal.diag(), 0.01), Rounding(0.2, group))[0], nearest)


def test_sweep_with_a_fitted_grid_and_no_correlation_equals_quantize():
    weight = normal(4, 96)
    expected = quantize(weight, Grid(bits=3, symmetric=False), torch.float32)

    class Fixed(Rounding):
        def decide(self, column, target_N):
            one = quantize(target_N[:, None], expected.grid, torch.float32, expected.scale, expected.zero_point)
            return one.dequantize(torch.float64)[:, 0]

    values, _ = sweep(weight, Problem.of(torch.eye(96, dtype=torch.float64), 0.01), Fixed(0.0))
    assert torch.equal(values, expected.dequantize(torch.float64))


def test_a_rule_that_keeps_every_target_has_no_loss():
    class Keep(Rounding):
        def decide(self, column, target_N):
            return target_N

    weight = normal(4, 300)
    values, loss = sweep(weight, Problem.of(correlated_hessian(300), 0.01), Keep(0.0))
    assert torch.equal(values, weight)
    assert torch.all(loss == 0)
