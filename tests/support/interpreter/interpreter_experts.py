"""Loaded mixtures on the Triton kernels of experts, run as `interpreter_cases` runs kernels."""

import pytest
import torch
from mixtures import made

import compress
from compress.inference.layers.experts import StackedExperts, one_by_one
from compress.kernels.operators import grouped
from compress.model.split_experts import split_experts


@pytest.mark.parametrize(("scheme", "fuse"), [("w4a16", False), ("w4a16", True), ("w8a8", False)])
def test_a_mixture_takes_one_launch_for_all_experts(scheme, fuse, tmp_path, monkeypatch):
    made("qwen3-moe").half().save_pretrained(tmp_path / "model")
    rounded = {"group_size": -1, "grid": "asymmetric"} if scheme == "w4a16" else {}
    compress.quantize(tmp_path / "model", compress.RTN(scheme=scheme, **rounded), output=tmp_path / "out", verify=False)
    model = compress.load(tmp_path / "out", fuse=fuse)
    experts = next(module for module in model.modules() if isinstance(module, StackedExperts))
    assert experts.reasons == []
    assert len(experts.stacks) == (2 if fuse or scheme == "w8a8" else 3)
    x = torch.randn(9, 32, dtype=torch.float16, generator=torch.Generator().manual_seed(0))
    index, weights = torch.tensor([[0, 2], [4, 3], [3, 3]]).repeat(3, 1), torch.full((9, 2), 0.5, dtype=torch.float16)
    stacks, experts.stacks = experts.stacks, None
    expected = experts(x, index, weights)
    experts.stacks = stacks
    name = "grouped_w8a8" if scheme == "w8a8" else "grouped_words"
    calls, through = [], getattr(grouped, name)
    monkeypatch.setattr(grouped, name, lambda *given: calls.append(1) or through(*given))
    torch.testing.assert_close(experts(x, index, weights), expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max()))
    assert len(calls) == len(stacks)
    x.requires_grad_()
    experts(x, index, weights).float().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[0].abs().sum() > 0


def test_codes_times_int8_inputs_have_no_launch_for_all_experts():
    scheme = compress.QuantLinear.from_linear(torch.nn.Linear(32, 16), "w4a8", -1).scheme
    model = made("qwen3-moe")
    name = split_experts(model)[0]
    known = {
        f"{name}.{i}.{leaf}": (scheme, (16, 32)) for i in range(4) for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    found = one_by_one(model, known, torch.float16, torch.device("cpu"))
    assert found[f"{name}.3.up_proj"] == ["no kernel multiplies int8 inputs by words of several experts"]
