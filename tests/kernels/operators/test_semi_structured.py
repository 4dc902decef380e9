"""16-bit 2:4 weights: the reasons to stay dense, one by one, on devices that are made up."""

import pytest
import torch

from compress.kernels.operators import semi_structured


class OnCuda(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Sets the capability and libraries of the GPU; returns the setter."""

    def set_to(capability, cusparselt):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: cusparselt)

    set_to((9, 0), True)
    return set_to


def weight(N=32, K=64, dtype=torch.float16):
    dense = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    dense[:, 1::4] = 0
    dense[:, 2::4] = 0
    return dense.as_subclass(OnCuda)


def test_a_24_weight_is_taken(gpu):
    for capability, cusparselt in (((9, 0), True), ((8, 0), False)):
        gpu(capability, cusparselt)
        assert semi_structured.why_not_semi_structured(weight()) == []


@pytest.mark.parametrize(
    ("given", "capability", "cusparselt", "reason"),
    [
        ({"dtype": torch.float32}, (9, 0), True, "float32; allowed: float16, bfloat16"),
        ({"N": 33}, (9, 0), True, "33x64; multiples of 32x64"),
        ({"K": 96}, (9, 0), True, "32x96; multiples of 32x64"),
        ({}, (7, 5), True, "compute capability 7.5; at least 8.0"),
        ({}, (9, 0), False, "cuSPARSELt is not available"),
    ],
)
def test_why_not(gpu, given, capability, cusparselt, reason):
    gpu(capability, cusparselt)
    reasons = semi_structured.why_not_semi_structured(weight(**given))
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_a_dense_weight_is_named_by_place(gpu):
    dense = weight()
    dense[3, 8:12] = 1
    assert "row 3 keeps 4 of columns 8 to 11" in semi_structured.why_not_semi_structured(dense)[0]


def test_without_a_gpu_the_weight_stays_as_it_is():
    dense = weight().as_subclass(torch.Tensor)
    back, reasons = semi_structured.semi_structured(dense)
    assert back is dense
    assert reasons == ["the device is cpu, not cuda"]
