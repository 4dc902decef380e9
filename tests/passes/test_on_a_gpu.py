"""What a pass makes on a CUDA device beside what it makes on a CPU. `pytest -m gpu`."""

import pytest
import torch
from commands import make_llama
from safetensors.torch import load_file

import compress
from compress.jobs.verify import outputs, probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROUNDED = {
    "w4a16": {},
    "w3a16 with zero points": {"scheme": "w3a16", "grid": "asymmetric", "group_size": 32},
    "w8a8": {"scheme": "w8a8", "group_size": -1},
    "nvfp4a16": {"scheme": "nvfp4a16"},
    "mxfp4a16": {"scheme": "mxfp4a16"},
    "nf4a16": {"scheme": "nf4a16"},
}


def a_model():
    return make_llama(hidden_size=256, intermediate_size=512)


def made_on(device, method, out, **data):
    compress.quantize(a_model(), method, output=out / device, device=device, verify=False, **data)
    (file,) = (out / device).glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("options", ROUNDED.values(), ids=ROUNDED)
def test_rounding_to_nearest_writes_the_same_files(options, tmp_path):
    there, here = (made_on(device, compress.RTN(**options), tmp_path) for device in ("cuda", "cpu"))
    assert there.keys() == here.keys()
    assert [name for name, tensor in here.items() if not torch.equal(tensor, there[name])] == []


@pytest.mark.parametrize("method", ["GPTQ", "AWQ", "SpQR", "SmoothQuant", "SparseGPT", "Trellis"])
def test_calibrated_passes_leave_an_error_of_the_same_size(method, tmp_path):
    """Sums of other orders round some weights to other codes, which are as good."""
    ids = probe(24)
    tokens = torch.randint(3, 96, (16, 64), generator=torch.Generator().manual_seed(0))
    exact, off = outputs(a_model(), ids), {}
    for device in ("cuda", "cpu"):
        made_on(device, getattr(compress, method)(), tmp_path, calibration=tokens)
        off[device] = (outputs(compress.load(tmp_path / device, torch.float32), ids) - exact).norm().item()
    assert 0.8 * off["cpu"] <= off["cuda"] <= 1.25 * off["cpu"]
