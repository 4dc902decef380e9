"""Encoder-decoders block by block: both stacks, the decoder behind the compressed encoder."""

import pytest
import torch
import transformers
from commands import PLAIN_GPTQ, StopAfterOne, fast_gptq, save
from models import build, tokens
from torch import Tensor, nn

import compress
from compress.base.errors import InputError
from compress.data.tokens import Tokens
from compress.inference.layers.compressed_layers import compressed_layers
from compress.jobs.calibration_data import _pair_with_decoder
from compress.jobs.verify import ACTIVE_TOLERANCE

SIZES = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def bart() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, max_position_embeddings=64, forced_eos_token_id=2, **SIZES, **TOKENS
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    for p in model.parameters():
        p.data.mul_(4 if p.ndim > 1 else 1)
    return model


MODELS = {"t5": lambda: build("t5"), "bart": bart}
LINEARS = {"t5": 2 * (4 + 2) + 2 * (8 + 2), "bart": 2 * (4 + 2) + 2 * (8 + 2)}
METHODS = {
    "gptq": lambda: fast_gptq(group_size=16),
    "smoothquant": compress.SmoothQuant,
    "w8a8": lambda: compress.RTN(scheme="w8a8"),
    "rtn": lambda: compress.RTN(group_size=16),
}


def pairs(count=2):
    return [{"input_ids": tokens(3, 16, i), "decoder_input_ids": tokens(3, 12, i + 5)} for i in range(count)]


@pytest.mark.first
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_linear_layer_of_both_stacks_is_compressed_and_runs(kind, method, tmp_path):
    source = save(MODELS[kind](), tmp_path / "in")
    data = {} if method in ("rtn", "w8a8") else {"calibration": tokens(6, 16)}
    found = compress.quantize(source, METHODS[method](), output=tmp_path / "out", verify=False, **data)
    names = {layer.name for layer in found.record.layers}
    linears = {n for n, m in MODELS[kind]().named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    assert names == linears
    assert len(names) == LINEARS[kind]
    assert set(found.record.left_alone.values()) == {"embedding", "output head"}
    assert not any("one block" in note for note in found.record.notes)
    batch, loaded, emulated = pairs()[0], compress.load(tmp_path / "out"), MODELS[kind]()
    assert len(list(compressed_layers(loaded))) == len(names)
    # In memory it has the values of the codes, and torch's own products of rounded inputs.
    pairs_of = _pair_with_decoder(Tokens(tokens(6, 16), ""), emulated.config).batches(8)
    compress.quantize(emulated, METHODS[method](), **({"calibration": pairs_of} if data else {}))
    with torch.no_grad():
        expected, computed = emulated(**batch).logits, loaded(**batch).logits
    # A rounded input may take the other code of a tie.
    allowed = ACTIVE_TOLERANCE if method in ("smoothquant", "w8a8") else 1e-3
    assert float((computed - expected).abs().max()) < allowed * float(expected.std())


@pytest.mark.first
@pytest.mark.parametrize("kind", MODELS)
def test_stack_by_stack_decides_as_the_model_in_one_block_does(kind):
    made = [MODELS[kind](), MODELS[kind]()]
    for model, one_block in zip(made, (False, True), strict=True):
        compress.quantize(model, fast_gptq(group_size=16), calibration=pairs(), one_block=one_block)
    whole = dict(made[1].named_parameters())
    for name, p in made[0].named_parameters():
        torch.testing.assert_close(p, whole[name], rtol=0, atol=0, msg=name)


def test_the_decoder_is_calibrated_behind_the_compressed_encoder():
    model, seen = bart(), []
    key = model.model.decoder.layers[1].encoder_attn.k_proj
    key.register_forward_pre_hook(lambda _, args: seen.append(args[0]) if type(args[0]) is Tensor else None)
    compress.quantize(model, compress.GPTQ(group_size=16, **PLAIN_GPTQ), calibration=pairs(1))
    with torch.no_grad():
        expected = model.model.encoder(pairs(1)[0]["input_ids"]).last_hidden_state
    assert any(torch.equal(x, expected) for x in seen)
    assert any(x.shape == expected.shape and not torch.equal(x, expected) for x in seen)  # the order was found before


@pytest.mark.full
def test_a_stopped_run_goes_on_in_the_decoder(tmp_path):
    source = save(bart(), tmp_path / "in")
    asked = {"calibration": pairs(), "verify": False}
    compress.quantize(source, fast_gptq(group_size=16), output=tmp_path / "whole", **asked)

    class StopInTheDecoder(StopAfterOne):
        def step(self, done, total, what):
            super().step(done - 2, total, what)

    with pytest.raises(KeyboardInterrupt):
        compress.quantize(
            source, fast_gptq(group_size=16), output=tmp_path / "out", reporter=StopInTheDecoder(), **asked
        )
    compress.quantize(source, fast_gptq(group_size=16), output=tmp_path / "out", resume=True, **asked)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == other


class Deep(nn.Module):
    """Two stacks; the second begins with features of the first block of the first."""

    def __init__(self, depth):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
        self.first, self.second, self.depth = nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:]), depth

    def forward(self, x):
        features = []
        for block in self.first:
            x = block(x)
            features.append(x)
        x = features[self.depth]
        for block in self.second:
            x = block(x)
        return x


@pytest.mark.parametrize(("depth", "said"), [(1, None), (0, "second reads more than what the last block")])
def test_a_stack_that_reads_another_in_its_depth_is_found_out(depth, said):
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    found = compress.quantize(Deep(depth), fast_gptq(group_size=16), calibration=[{"x": x}])
    assert len({layer.name for layer in found.record.layers}) == 4
    assert [said in note for note in found.record.notes if "one block" in note] == ([] if said is None else [True])


def test_stacks_run_in_the_order_of_their_calls():
    class Backwards(Deep):
        def forward(self, x):
            for block in (*self.second, *self.first):
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = Backwards(0), torch.randn(64, 16)
    found = compress.quantize(model, fast_gptq(group_size=16), calibration=[{"x": x}])
    assert [layer.name for layer in found.record.layers] == ["second.0.0", "second.1.0", "first.0.0", "first.1.0"]


def test_text_is_given_to_the_decoder_a_token_later(tmp_path):
    source = save(bart(), tmp_path / "in")
    found = compress.quantize(
        source, compress.SmoothQuant(), calibration=tokens(4, 8), output=tmp_path / "o", verify=False
    )
    assert "the decoder is calibrated on the encoder's text, a token later; give batches in Python for other pairs" in (
        found.record.notes
    )
    ids = tokens(4, 8)
    later = torch.cat([torch.full((4, 1), 2), ids[:, :-1]], 1)
    same = compress.quantize(
        source, compress.SmoothQuant(), calibration=[{"input_ids": ids, "decoder_input_ids": later}],
        output=tmp_path / "p", verify=False,
    )  # fmt: skip
    assert same.output is not None
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("o", "p"))
    assert one == other


def test_padding_is_refused():
    padded = Tokens(tokens(2, 8), "chat.jsonl", mask=torch.arange(8).expand(2, 8) < 6)
    with pytest.raises(
        InputError, match=r"^chat.jsonl makes samples with padding; .* samples of one length: give a text"
    ):
        _pair_with_decoder(padded, bart().config)
