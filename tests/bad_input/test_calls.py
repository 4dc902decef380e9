"""Bad input to `compress.quantize` from Python: one line that names the layer or the argument, and nothing changed."""

import pytest
import torch
import transformers
from models import build, tokens
from torch import nn
from torch.nn.utils import prune

import compress
from compress.base.errors import CompressError, InputError
from compress.passes.train import Train

RTN, GPTQ = compress.RTN(group_size=16), compress.GPTQ(group_size=16)
X = {"calibration": [{"input": torch.randn(64, 32)}]}


def two(**options):
    """Two linear layers, called 0 and 2."""
    return nn.Sequential(nn.Linear(32, 16, **options), nn.ReLU(), nn.Linear(16, 16, **options))


def with_first(change):
    """Two linear layers, of which the first is changed."""
    model = two()
    change(model[0])
    return model


def holding(make, **options):
    """Two linear layers, of which the first holds another weight."""
    return with_first(lambda layer: setattr(layer, "weight", nn.Parameter(make(layer.weight.data), **options)))


def to_llama(**inputs):
    return {"model": lambda: build("llama"), "passes": GPTQ, "calibration": [inputs]}


def made_without_gradients():
    with torch.inference_mode():
        return two()


def without_first_token():
    model = build("t5")
    for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, None)
    return model


def table_in_a_block():
    model = nn.ModuleDict({"table": nn.Embedding(16, 16), "layers": nn.ModuleList([two(), nn.Sequential(*two())])})
    model["layers"][0][0].weight = model["table"].weight
    return model


def image_model():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    return transformers.ViTModel(config)


IN_BATCHES = r"the model takes pixel_values: give batches in Python .*\{'pixel_values': tensor\}"
COMPUTED = r"^0 computes its weight from other tensors .*ignore=\['0'\]"
utils, parametrizations = nn.utils, nn.utils.parametrizations
# What is wrong -> (the arguments, what the line says). Where no model or pass is given: two linear layers, RTN.
CASES = {
    "int8 weight": (
        {"model": lambda: holding(lambda w: w.to(torch.int8), requires_grad=False)},
        "^0 has weights of torch.int8",
    ),
    "float8 weight": (
        {"model": lambda: holding(lambda w: w.to(torch.float8_e4m3fn), requires_grad=False)},
        "^0 has .*float8",
    ),
    "complex weight": ({"model": lambda: two(dtype=torch.complex64)}, r"^0 has weights of torch\.complex64; allowed: "),
    "meta model": (
        {"model": lambda: two(device="meta")},
        r"^0\.weight has no values .* load the model's weights first",
    ),
    "sparse weight": ({"model": lambda: holding(torch.Tensor.to_sparse)}, r"^0\.weight is sparse .*to_dense"),
    "empty weight": (
        {"model": lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))},
        "^0 has a weight without a shape",
    ),
    "image model without data": (
        {"model": image_model, "passes": GPTQ},
        "^gptq needs calibration data; " + IN_BATCHES,
    ),
    "encoder-decoder without a first token": (
        {"model": without_first_token, "passes": GPTQ, "calibration": tokens()},
        r"names no token with which the decoder begins \(decoder_start_token_id\): add it",
    ),
    "encoder-decoder trained on text": (
        {"model": lambda: build("t5"), "passes": Train(steps=1), "calibration": tokens()},
        "^an encoder-decoder is trained on pairs; give batches with input_ids, decoder_input_ids and labels",
    ),
    "image model with text": (
        {"model": image_model, "passes": GPTQ, "calibration": "demo"},
        "^'demo' holds no inputs of this model; " + IN_BATCHES,
    ),
    "no inputs": ({"model": lambda: nn.ModuleDict({"none": nn.Linear(4, 0)})}, r"^none has an empty weight, \[0, 4\]"),
    "weight_norm": ({"model": lambda: with_first(parametrizations.weight_norm)}, COMPUTED),
    "old weight_norm": ({"model": lambda: with_first(utils.weight_norm)}, COMPUTED),
    "spectral_norm": ({"model": lambda: with_first(parametrizations.spectral_norm)}, COMPUTED),
    "old spectral_norm": ({"model": lambda: with_first(utils.spectral_norm)}, COMPUTED),
    "pruned": ({"model": lambda: with_first(lambda layer: prune.l1_unstructured(layer, "weight", 0.5))}, COMPUTED),
    "table in a block": (
        {"model": table_in_a_block, "passes": [compress.RTN(), compress.Embeddings()]},
        r"^layers\.0\.0, in a block, has the weight of table; leave the embeddings pass out",
    ),
    "inference model": (
        {"model": lambda: made_without_gradients()},
        r"^0\.weight was made under torch\.inference_mode",
    ),
    "no model": (
        {"model": lambda: None},
        "^model: None is no model; give a directory, a hub id, 'demo' or a torch.nn.Module",
    ),
    "pass by name": ({"passes": "gptq"}, "^passes: 'gptq' is no pass; give one, like compress.GPTQ"),
    "pass by class": ({"passes": compress.RTN}, "^passes: <class .* is no pass"),
    "list of names": ({"passes": ["gptq"]}, "^passes: 'gptq' is no pass"),
    "no passes": ({"passes": None}, "^passes: None is no pass"),
    "one pattern": ({"ignore": "*.0"}, r"^ignore: '\*\.0' is one pattern; give a list"),
    "batch size": ({"batch_size": "8"}, "^batch size '8'; allowed: 1 or more"),
    "samples": ({"passes": GPTQ, "calibration": "demo", "samples": "8"}, "^samples '8'; it must be a whole number"),
    "dtype": ({"dtype": torch.int8}, r"^dtype torch\.int8; allowed: "),
    "grouped convolution": (
        {
            "model": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 8, 3)),
            "passes": compress.LowRank(share=0.9),
            "calibration": [{"input": torch.ones(2, 8, 9, 9)}],
        },
        "^low-rank decides about a layer as a whole, and 0 is a convolution of 4 groups; ignore it or use another",
    ),
    "calibration": ({"passes": GPTQ, "calibration": 5}, "^calibration is 5; give text, token ids"),
    "input name": (
        {"passes": GPTQ, "calibration": [{"z": torch.ones(2, 32)}]},
        "^calibration batch 1 has z for the forward of Sequential, which takes input: ",
    ),
    "input shape": (
        {"passes": GPTQ, "calibration": [{"input": torch.ones(2, 31)}]},
        r"^the model cannot run calibration batch 1 \(input \[2, 31\]\): RuntimeError: ",
    ),
    "second input shape": (
        {
            "model": lambda: nn.Sequential(*two(), nn.Unflatten(0, (2, -1)), nn.Linear(16, 16)),
            "passes": GPTQ,
            "calibration": [{"input": torch.ones(2, 32)}, {"input": torch.ones(3, 32)}],
        },
        r"^the model cannot run calibration batch 2 \(input \[3, 32\]\): RuntimeError: ",
    ),
    "use_cache as a tensor": (
        to_llama(input_ids=tokens(), use_cache=torch.ones(5)),
        "^a calibration batch asks for use_",
    ),
    "sparse ids": (to_llama(input_ids=tokens().to_sparse()), "^input_ids of a calibration batch is a sparse tensor; "),
    "sparse mask": (
        to_llama(input_ids=tokens(), attention_mask=torch.ones(6, 16).to_sparse()),
        "^attention_mask of a calibration batch is a sparse tensor; ",
    ),
    "complex ids": (to_llama(input_ids=tokens() * 1j), r"^the model cannot run .* \(input_ids \[6, 16\]\): "),
    "unsigned ids": (to_llama(input_ids=tokens().to(torch.uint16)), r"^the model cannot run .* \(input_ids \["),
    "unknown input": (to_llama(z=tokens()), r"^the model cannot run calibration batch 1 \(z \[6, 16\]\): ValueError: "),
    "token ids": (
        to_llama(input_ids=tokens() + 90),
        "^input_ids of a calibration batch holds token ids from 90 to 184; ",
    ),
    "floats as ids": (
        to_llama(input_ids=tokens().float()),
        r"^the model cannot run .* \(input_ids \[6, 16\]\): Runtime",
    ),
    "masked tokens": (
        to_llama(input_ids=tokens(), attention_mask=torch.zeros(6, 16)),
        "^every token of the calibration batches is masked",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, about such layers
@pytest.mark.parametrize("name", CASES)
def test_one_line_names_the_layer_or_the_argument(name):
    given, says = CASES[name]
    arguments = {"model": two, "passes": RTN, **given}
    model = arguments.pop("model")()
    with pytest.raises(InputError, match=says) as refused:
        compress.quantize(model, arguments.pop("passes"), **arguments)
    assert "\n" not in str(refused.value)


def test_what_is_wrong_with_an_argument_is_said_before_the_model_is_loaded(llama, tmp_path, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("compress.jobs.model_source.load_dense", loaded)
    ids = torch.full((2, 8), 5000)
    cases = [
        ({"passes": GPTQ}, "gptq needs calibration data"),
        ({"passes": GPTQ, "calibration": tmp_path / "no.txt"}, "does not exist"),
        ({"passes": GPTQ, "calibration": ids}, "the vocabulary is 0 to 2047"),
        ({"passes": GPTQ, "calibration": [{"input_ids": ids}]}, "the vocabulary is 0 to 2047"),
        ({"passes": GPTQ, "calibration": "demo", "length": 65}, "reads at most 64"),
        ({"passes": GPTQ, "calibration": "demo", "device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"samples": 3}, "leave them out"),
        ({"store": "2:4"}, "store is how the output is written; give an output"),
        ({"store": "2 of 4"}, "store '2 of 4'; allowed: 2:4"),
        ({"shard_size": "2GB"}, "shard_size is of the output's files; give an output"),
        ({"resume": True}, "need an output"),
        ({"output": ""}, "no directory that can be made"),
        ({"fsdp": True}, "process group"),
    ]
    for given, says in cases:
        arguments = {"passes": RTN, **given}
        with pytest.raises(InputError, match=says):
            compress.quantize(llama, arguments.pop("passes"), **arguments)


def test_layers_that_cannot_be_compressed_are_refused_only_where_they_would_be():
    model = with_first(parametrizations.weight_norm)
    assert [r.name for r in compress.quantize(model, RTN, ignore=["0"]).record.layers] == ["2"]
    model = with_first(parametrizations.spectral_norm)
    only = compress.only(GPTQ, "2")
    assert [r.name for r in compress.quantize(model, only, **X).record.layers] == ["2"]


def test_a_later_batch_of_another_width_is_named():
    batches = [{"input": torch.ones(2, width)} for width in (32, 31)]
    with pytest.raises(CompressError, match=r"^a calibration batch gives 0 31 inputs; it has 32$"):
        compress.quantize(two(), GPTQ, calibration=batches)


def test_inference_mode_is_no_obstacle():
    def made():
        torch.manual_seed(0)
        return two()

    model, other = made(), made()
    compress.quantize(other, GPTQ, **X)
    with torch.inference_mode():
        batch = [{"input": X["calibration"][0]["input"].clone()}]
        compress.quantize(model, GPTQ, calibration=batch)
    for one, two_ in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two_)


def test_what_cannot_be_prepared_for_a_loop_of_ones_own_is_refused():
    cases = [
        ({"passes": [RTN, Train(steps=1)]}, "train is a loop of its own; leave it out"),
        ({"passes": compress.KVCache()}, "no pass decides about layers"),
        ({"passes": RTN, "scales": "free"}, "scales 'free'; allowed: learned, anchored, fixed, fitted"),
        ({"passes": RTN, "ignore": "*"}, "is one pattern"),
        ({"passes": GPTQ}, "gptq needs calibration data"),
    ]
    for given, says in cases:
        with pytest.raises(InputError, match=says):
            compress.prepare_qat(build("llama"), **given)
    model = build("llama")
    prepared = compress.prepare_qat(model, RTN)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for again in (compress.prepare_qat, compress.quantize):
        with pytest.raises(InputError, match=r"q_proj rounds for training already \(prepare_qat\); train and convert"):
            again(model, RTN)
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="resume, overwrite and verify need an output"):
        prepared.convert(verify=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_a_model_with_adapters_is_refused(llama, tmp_path):
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    model = build("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    for given, name in ((adapted, "the model"), (model, r"model\.layers\.0\.self_attn\.q_proj")):
        for call in (compress.quantize, compress.prepare_qat):
            with pytest.raises(InputError, match=rf"^{name} is an adapter of peft, .* after merge_and_unload"):
                call(given, RTN)
    with pytest.raises(InputError, match="is an adapter of peft"):
        compress.quantize(adapted, RTN, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"adapter of peft alone; .* merge_and_unload"):
        compress.quantize(tmp_path / "adapter", RTN)
