"""MultiheadAttention of torch as linear layers: the same outputs and weights, every projection compressed."""

import pytest
import torch
from combinations import pairs
from torch import nn

import compress
from compress.base.errors import InputError

BOTH = [False, True]


def test_outputs_and_weights_are_those_of_torch():
    for first, bias, widths, added, zeros in pairs(BOTH, BOTH, [{}, {"kdim": 12, "vdim": 20}], BOTH, BOTH):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(
            16, 4, bias=bias, batch_first=first, add_bias_kv=added, add_zero_attn=zeros, **widths
        )
        for p in attention.parameters():
            nn.init.normal_(p)
        model = nn.ModuleList([attention.double()])
        sizes = [(2, 5, 16), (2, 7, widths.get("kdim", 16)), (2, 7, widths.get("vdim", 16))]
        inputs = [torch.randn(size).double() for size in sizes]
        inputs = inputs if first else [x.transpose(0, 1) for x in inputs]
        padding = torch.arange(7)[None] >= torch.tensor([[7], [4]])
        masks = [None, torch.randn(5, 7).double(), torch.rand(5, 7) > 0.7, torch.rand(8, 5, 7) > 0.7]
        masks = [mask if mask is None or mask.is_floating_point() else mask & (torch.arange(7) > 0) for mask in masks]

        def calls(model=model, inputs=inputs, padding=padding, masks=masks):
            single = [x[:, 0] if model[0].batch_first is False else x[0] for x in inputs]
            yield model[0](*single, key_padding_mask=padding[1])
            for mask in masks:
                bools = padding if mask is None or mask.dtype == torch.bool else None
                for wanted in ({}, {"need_weights": False}, {"average_attn_weights": False}):
                    yield model[0](*inputs, key_padding_mask=bools, attn_mask=mask, **wanted)

        expected = list(calls())
        assert compress.split_layers(model) == ["0"]
        for (output, weights), (output_too, weights_too) in zip(calls(), expected, strict=True):
            torch.testing.assert_close(output, output_too)
            torch.testing.assert_close(weights, weights_too)


class Encoder(nn.Module):
    """A small transformer of torch's layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x):
        return self.decoder(x, self.encoder(x))


@pytest.mark.parametrize("p", [compress.GPTQ(group_size=32), compress.RTN(scheme="w8a8")], ids=["gptq", "w8a8"])
def test_all_layers_of_torchs_transformer_get_codes_that_run(p, tmp_path):
    torch.manual_seed(0)
    model, batch = Encoder().eval(), {"x": torch.randn(4, 12, 32)}
    before = model(**batch).detach()
    assert len(compress.split_layers(model)) == 4
    torch.testing.assert_close(model(**batch), before)
    result = compress.quantize(model, p, calibration=[batch], output=tmp_path / "out")
    assert result.record.left_alone == {}
    assert len({layer.name for layer in result.record.layers}) == 4 * 4 + 3 * 2
    loaded = compress.load(tmp_path / "out", into=Encoder().eval())
    assert isinstance(loaded.encoder.layers[0].self_attn.q_proj, compress.QuantLinear)
    torch.testing.assert_close(loaded(**batch), model(**batch), rtol=0, atol=5e-2 if p.name == "rtn" else 1e-5)


def test_a_joint_weight_that_another_module_reads_is_refused():
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)])
    model[1].in_proj_weight = model[0].in_proj_weight
    with pytest.raises(InputError, match=r"^0 shares its in_proj_weight with 1; give each"):
        compress.split_layers(model)
