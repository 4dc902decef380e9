"""Compressed models on a CUDA device: the CPU's numbers, static caches, captured graphs, memory. `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch
from commands import make_llama
from places import FIXTURES
from stepping import known, reasons, unfused

import compress
from compress.evaluation.speed.generation import GenerationTimer
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.steps.block import remarks
from compress.jobs.verify import outputs, probe
from compress.kernels import workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LLMCOMPRESSOR = FIXTURES / "llmcompressor"
CUDA = "cuda"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama wide enough for every kernel, bfloat16, at w4a16."""
    out = tmp_path_factory.mktemp("gpu") / "w4"
    model = make_llama(hidden_size=512, intermediate_size=1024, max_position_embeddings=256).bfloat16()
    compress.quantize(model, compress.RTN(), output=out, verify=False)
    return out


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", sorted(p.name for p in LLMCOMPRESSOR.iterdir() if p.is_dir()))
def test_the_gpu_computes_what_the_cpu_does(name, fuse):
    """In bfloat16 a GPU is as near to the CPU's float32 as the CPU is; where inputs are rounded, a code may differ."""
    ids = probe(24)
    exact, narrow = (outputs(compress.load(LLMCOMPRESSOR / name, dtype), ids) for dtype in (torch.float32, None))
    found = outputs(compress.load(LLMCOMPRESSOR / name, device=CUDA, fuse=fuse), ids.to(CUDA)).float().cpu()
    assert (found - exact).norm() <= 1.5 * (narrow.float() - exact).norm()


def test_layers_agree_with_their_dequantized_product(checkpoint):
    model = compress.load(checkpoint, device=CUDA)
    for M in (1, 17, 300):
        for _, layer in compressed_layers(model):
            x = torch.randn(M, layer.in_features, device=CUDA, dtype=torch.bfloat16)
            truth = x.double() @ layer.dequantize().double().t()
            sizes = x.double().abs() @ layer.dequantize().double().abs().t()
            assert ((layer(x).double() - truth).abs() <= 2**-7 * truth.abs() + 2**-8 * sizes).all()


@pytest.mark.parametrize("fuse", [False, True])
def test_generates_with_a_static_cache_as_without(checkpoint, fuse):
    model = compress.load(checkpoint, device=CUDA, fuse=fuse)
    ids = torch.arange(8, device=CUDA)[None] + 3
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    static = model.generate(ids, **options, cache_implementation="static")  # a graph, or compiled
    assert (remarks(model) == []) == fuse
    assert torch.equal(plain[:, :12], static[:, :12])


def test_a_forward_is_captured_and_replayed(checkpoint):
    model = compress.load(checkpoint, device=CUDA)
    workspace.prepare(torch.device(CUDA, torch.cuda.current_device()))
    ids = torch.arange(4, device=CUDA)[None] + 3
    side = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(3):
                model(input_ids=ids, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(input_ids=ids, use_cache=False).logits
        for start in (3, 40, 900):
            ids.copy_(torch.arange(4, device=CUDA)[None] + start)
            for _ in range(3):
                graph.replay()
            expected = model(input_ids=ids, use_cache=False).logits
            assert torch.equal(captured, expected)


def test_memory_is_that_of_the_files(checkpoint):
    files = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = compress.load(checkpoint, device=CUDA)
    assert torch.cuda.memory_allocated() - before <= 1.1 * files + 2**20
    assert model is not None


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_steps_in_launches_say_what_blocks_say_also_from_a_graph(checkpoint, batch):
    """The graph reads the length of the cache anew: the same steps again, behind another prompt."""
    model = compress.load(checkpoint, device=CUDA)
    plain = unfused(model)
    timers = [GenerationTimer(each, batch, 12, 6) for each in (model, plain)]
    timers[0].capture()
    assert timers[0].launch == "graph", timers[0].why_eager
    assert known(model) == len(model.model.layers), reasons(model)
    for prompt in (12, 9):
        for timer in timers:
            timer.prompt = timer.prompt[:, :prompt]
            timer.start()
        for _ in range(4):
            timers[1].ids.copy_(timers[0].ids)
            for timer in timers:
                timer.run_step()
        for one, two in zip(timers[0].cache.layers, timers[1].cache.layers, strict=True):
            assert int(one.get_seq_length()) == int(two.get_seq_length()) == prompt + 4
            scale = float(two.keys.abs().max())
            torch.testing.assert_close(one.keys, two.keys, rtol=0, atol=0.04 * scale)
