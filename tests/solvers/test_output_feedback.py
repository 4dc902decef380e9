"""GPTQ for the curvature of the loss: against dense float64 algebra on the Kronecker product of both curvatures."""

import pytest
import torch
from torch import Tensor

from compress.solvers import output_feedback
from compress.solvers.gptq import gptq
from compress.solvers.hessian_with_drift import POLISH_DAMP, Problem
from compress.solvers.k_quants.solve import KRule
from compress.solvers.output_feedback import OutputCurvature, relied_curvature, token_weights
from compress.solvers.statistics.output_moments import OutputMoments, run_length
from compress.solvers.tile_rule import TileRule
from compress.weights.formats.k_quants import KQuant
from compress.weights.formats.tiles import Tiles
from compress.weights.grid import Grid

OUTPUTS, INPUTS, RUN, GROUP = 10, 12, 4, 6
DAMP = 0.01
GRID = Grid(bits=3, granularity="group", group_size=GROUP)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def problem() -> tuple[Tensor, Tensor, Tensor]:
    """(A weight, H, H_O of runs of outputs: zeros between them)."""
    x = normal(40, INPUTS, seed=1) @ normal(INPUTS, INPUTS, seed=2)
    g = normal(60, OUTPUTS, seed=3) @ (torch.eye(OUTPUTS, dtype=torch.float64) + normal(OUTPUTS, OUTPUTS, seed=4) / 2)
    runs = torch.arange(OUTPUTS) // RUN
    return normal(OUTPUTS, INPUTS, seed=5), x.t() @ x / 40, g.t() @ g / 60 * (runs[:, None] == runs)


def in_runs(outputs_NN: Tensor) -> Tensor:
    rows = [torch.nn.functional.pad(rows, (0, RUN))[:, i : i + RUN] for i, rows in runs_of(outputs_NN)]
    return torch.cat(rows)


def runs_of(x: Tensor) -> list[tuple[int, Tensor]]:
    return [(i, x[i : i + RUN]) for i in range(0, OUTPUTS, RUN)]


def damped(hessian: Tensor, damp: float) -> Tensor:
    return hessian + damp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)


def solved(problem: tuple[Tensor, Tensor, Tensor], **how: int) -> Tensor:
    weight, hessian, outputs = problem
    made = gptq(weight, hessian, grid=GRID, damp=DAMP, scale_dtype=torch.float64, outputs_NS=in_runs(outputs), **how)
    return made.weight


def nearest(value: float, scale: float) -> float:
    code = min(max(round(value / scale), -4), 3)
    return code * scale


def loss(error: Tensor, hessian: Tensor, outputs: Tensor) -> float:
    return float(torch.einsum("nm,mk,kl,nl->", outputs, error, hessian, error))


def test_a_sweep_is_ldlq_on_the_kronecker_product(problem):
    """Weights one after another, column by column, each making up for the errors of all before it."""
    weight, hessian, outputs = problem
    found = solved(problem)
    scale = found.scale.repeat_interleave(GROUP, 1).t().flatten().tolist()
    whole = torch.kron(damped(hessian, DAMP), outputs)
    lower = torch.linalg.cholesky(whole.flip(0, 1)).flip(0, 1)
    unit = lower / lower.diagonal()
    w = weight.t().flatten()
    error = torch.zeros_like(w)
    for i in range(len(w)):
        target = float(w[i] + error[:i] @ unit[:i, i])
        error[i] = w[i] - nearest(target, scale[i])
    expected = (w - error).view(INPUTS, OUTPUTS).t()
    torch.testing.assert_close(found.dequantize(torch.float64), expected, rtol=0, atol=1e-9)


def test_descent_takes_every_weight_to_its_own_optimum(problem):
    weight, hessian, outputs = problem
    swept, found = solved(problem), solved(problem, sweeps=2)
    scale, values = swept.scale.repeat_interleave(GROUP, 1), swept.dequantize(torch.float64)
    hessian = damped(hessian, POLISH_DAMP)
    for _ in range(2):
        for k in range(INPUTS):
            for n in range(OUTPUTS):
                gradient = float(outputs[n] @ (weight - values) @ hessian[k])
                old = float(values[n, k])
                wanted = old + gradient / float(hessian[k, k] * outputs[n, n])
                new = nearest(wanted, float(scale[n, k]))
                values[n, k] = new if abs(new - wanted) < abs(old - wanted) else old
    torch.testing.assert_close(found.dequantize(torch.float64), values, rtol=0, atol=1e-9)


def test_a_refit_finds_the_scales_of_a_group_together(problem, monkeypatch):
    weight, hessian, outputs = problem
    swept, nearly = solved(problem), solved(problem, refit=1)
    monkeypatch.setattr(output_feedback, "LEFT", 1e-24)
    found = solved(problem, refit=1)
    hessian = damped(hessian, POLISH_DAMP)
    codes = (swept.dequantize(torch.float64).view(OUTPUTS, -1, GROUP) / swept.scale[..., None]).round()
    scale = swept.scale.clone()
    for group in range(scale.shape[1]):
        for first, _ in runs_of(weight):
            rows = range(first, min(first + RUN, OUTPUTS))
            basis = []
            for n in rows:
                one = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
                one[n, group * GROUP : (group + 1) * GROUP] = codes[n, group]
                basis.append(one)
            error = weight - (codes * scale[..., None]).view(OUTPUTS, INPUTS)
            pair = torch.einsum("anl,nm,bmk,kl->ab", torch.stack(basis), outputs, torch.stack(basis), hessian)
            slope = torch.einsum("anl,nm,mk,kl->a", torch.stack(basis), outputs, error, hessian)
            scale[list(rows), group] += torch.linalg.solve(pair, slope)
    torch.testing.assert_close(found.scale, scale, rtol=0, atol=1e-9)
    best, near, before = (loss(weight - x.dequantize(torch.float64), hessian, outputs) for x in (found, nearly, swept))
    assert 0 < before - best < 1.01 * (before - near)


def test_compiled_loops_decide_as_torch_does(problem):
    weight, hessian, outputs = problem
    single = tuple(x.float() for x in problem)
    how = {"grid": GRID, "refit": 2, "sweeps": 2, "outliers": 0.05, "scale_dtype": torch.float32}
    exact = gptq(weight, hessian, outputs_NS=in_runs(outputs), **how)
    found = gptq(*single[:2], outputs_NS=in_runs(single[2]), **how)
    torch.testing.assert_close(found.weight.dequantize(), exact.weight.dequantize(), rtol=1e-4, atol=1e-4)


def test_moments_of_runs_are_shrunk_by_their_noise(monkeypatch):
    monkeypatch.setattr("compress.solvers.statistics.output_moments.LONGEST", RUN)
    assert run_length(OUTPUTS) == RUN
    g = normal(30, OUTPUTS, seed=6).float()
    first, second = (OutputMoments(OUTPUTS, torch.device("cpu")) for _ in range(2))
    first.update(g[:7])
    second.update(g[7:])
    first.add(second)
    moments = g.double().t() @ g.double() / 30
    off, noise = 0.0, 0.0
    for i, rows in runs_of(torch.arange(OUTPUTS)):
        for n in rows.tolist():
            for m in range(i, i + len(rows)):
                if n != m:
                    off += float(moments[n, m] ** 2)
                    noise += float(((g[:, n] * g[:, m]).double() ** 2).mean() - moments[n, m] ** 2) / 29
    share = min(1.0, noise / off)
    expected = in_runs(moments * (1 - share) + torch.diag(moments.diagonal() * share)) / moments.diagonal().mean()
    result, taken_off = first.result()
    assert taken_off == pytest.approx(share)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert float(torch.linalg.eigvalsh(OutputCurvature(relied_curvature(result.double())).squares).min()) > 0


def test_tokens_count_by_their_gradients_in_part_and_not_without_limit():
    sizes = [torch.tensor([0.0, 1.0, 100.0]), torch.tensor([0.0, 3.0, 100.0])]
    assert token_weights(sizes).tolist() == [0.25, 1.75, 15.25]


def k_rule(weight: Tensor, problem: Problem) -> KRule:
    return KRule.of(weight, problem, KQuant(type="q3_k"))


def tile_rule(weight: Tensor, problem: Problem) -> TileRule:
    tiles = Tiles(bits=3, scale_bits=3, zero_bits=3, group_size=16, tile_rows=5)
    return TileRule.of(weight, problem, tiles, torch.float32, weight.new_full((OUTPUTS,), 0.5))


@pytest.mark.parametrize("rule_of", [k_rule, tile_rule])
def test_scales_that_are_codes_are_refitted_for_the_loss(rule_of):
    """With the compiled loops as without: the loss is that of the Kronecker product, and it falls."""
    columns, runs = 256, torch.arange(OUTPUTS) // RUN
    x = normal(600, columns, seed=1) @ (torch.eye(columns) + normal(columns, columns, seed=2) / 16)
    g = normal(60, OUTPUTS, seed=3) @ (torch.eye(OUTPUTS) + normal(OUTPUTS, OUTPUTS, seed=4) / 2)
    hessian, outputs = x.t() @ x / 600, g.t() @ g / 60 * (runs[:, None] == runs)
    weight, losses = normal(OUTPUTS, columns, seed=5), {}
    for dtype, exact in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        problem = Problem.of(hessian.to(dtype), DAMP)
        for refit, sweeps in ((0, 1), (1, 0), (2, 2)):
            rule = rule_of(weight.to(dtype), problem)
            rule.outputs = OutputCurvature(in_runs(outputs.to(dtype)))
            values, loss_N = rule.solve_columns(weight.to(dtype), problem, refit, sweeps)
            own = loss(weight - values.double(), damped(hessian, POLISH_DAMP), outputs)
            torch.testing.assert_close(float(loss_N.sum()), own, rtol=exact, atol=0)
            losses[dtype, refit, sweeps] = own
    for dtype in (torch.float64, torch.float32):
        assert losses[dtype, 2, 2] < min(losses[dtype, 0, 1], losses[dtype, 1, 0])
    assert losses[torch.float32, 2, 2] == pytest.approx(losses[torch.float64, 2, 2], rel=0.02)
