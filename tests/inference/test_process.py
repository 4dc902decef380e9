"""What a loaded model changes in the process: itself, and nothing that other models use."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import torch
from transformers import AutoModelForCausalLM

import compress

AROUND = """
import sys, compress
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.quantizers import auto


def held():
    classes = (PreTrainedModel, LlamaAttention, LlamaDecoderLayer)
    places = (AttentionInterface._global_mapping, auto.AUTO_QUANTIZER_MAPPING, *map(vars, classes))
    return [{name: value for name, value in place.items() if not name.startswith("compress")} for place in places]


before = held()
compress.load(sys.argv[1])
assert held() == before
"""


def test_loading_adds_names_of_its_own_and_replaces_nothing(llama_w4):
    subprocess.run([sys.executable, "-c", AROUND, str(llama_w4)], check=True)


def test_a_loaded_model_counts_codes_in_copies_too_and_is_freed_with_its_last_user(llama_w4, llama):
    whole = AutoModelForCausalLM.from_pretrained(llama).num_parameters()
    model = compress.load(llama_w4)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert [each.num_parameters() for each in (model, *copies)] == [whole] * 3
    assert model.model.num_parameters() < whole == copies[0].dequantize().num_parameters()
    held = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert held() is None
    finally:
        gc.enable()
    assert [each.num_parameters() for each in copies] == [whole] * 2


def test_a_loaded_model_takes_another_attention_function_like_any_other(llama_w4):
    model = compress.load(llama_w4, torch.float32).eval()
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    for each in (model, copy.deepcopy(model)):
        each.set_attn_implementation("eager")
        assert {module.config._attn_implementation for module in each.modules() if hasattr(module, "config")} == {
            "eager"
        }
        torch.testing.assert_close(each(ids).logits, expected, rtol=1e-4, atol=1e-4)
