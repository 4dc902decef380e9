"""Every figure of `evaluate` against a plain computation that shares no code with it."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import CONTEXT, HIDDEN, INTERMEDIATE, VOCABULARY, command, make_llama, save
from places import SHARED
from scipy.stats import entropy, sem
from torch.nn import functional

import compress
from compress.base.errors import InputError
from compress.base.progress import Silent
from compress.checkpoint.read.source import find_source
from compress.evaluation.cost.size import measure_size
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.quality import predictor

ROWS, LENGTH = 6, 16
QUANTIZED = 2 * (HIDDEN * HIDDEN * 2 + HIDDEN * HIDDEN // 2 * 2 + HIDDEN * INTERMEDIATE * 2)  # all but down_proj
LAYERS = 2 * 6


def plain_logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits row by row, float32, of a checkpoint."""
    model = compress.load(path, torch.float32, dequantize=True)
    with torch.no_grad():
        return torch.cat([model(input_ids=row.unsqueeze(0)).logits for row in ids])


@pytest.fixture(scope="module")
def ids(token_file: Path) -> torch.Tensor:
    return torch.load(token_file, weights_only=True)


def plain_kl(expected: torch.Tensor, found: torch.Tensor) -> np.ndarray:
    """KL(expected || found) per predicted token, by scipy in float64."""
    p, q = (torch.softmax(x[:, :-1].double(), -1).flatten(0, 1).numpy() for x in (expected, found))
    return entropy(p, q, axis=-1)


def test_perplexity_is_exp_of_the_mean_cross_entropy_of_every_token_but_each_rows_first(
    llama: Path, token_file: Path, ids: torch.Tensor
) -> None:
    found = compress.evaluate(llama, text=str(token_file))
    logits = plain_logits(llama, ids)
    loss = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).double(), ids[:, 1:].reshape(-1))
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    assert (found.tokens, found.texts[0].length, found.model.dtype) == (ROWS * (LENGTH - 1), LENGTH, "float32")
    assert found.kl_mean is found.kl_median is found.kl_p99 is found.same_top is found.reference_perplexity is None


def test_rows_of_a_token_file_are_read_each_from_its_own_start(llama: Path, ids: torch.Tensor) -> None:
    together = compress.evaluate(llama, text=ids)
    alone = [compress.evaluate(llama, text=row.unsqueeze(0)) for row in ids]
    mean = sum(math.log(e.perplexity) for e in alone) / len(alone)
    assert math.log(together.perplexity) == pytest.approx(mean, rel=1e-6)
    shuffled = compress.evaluate(llama, text=ids.flip(0))
    assert shuffled.perplexity == pytest.approx(together.perplexity, rel=1e-6)
    assert compress.evaluate(llama, text=ids.view(3, -1)).perplexity != pytest.approx(together.perplexity, rel=1e-4)


def test_kl_and_same_top_are_scipys(llama: Path, llama_w4: Path, ids: torch.Tensor) -> None:
    found = compress.evaluate(llama_w4, reference=llama, text=ids)
    expected, ours = plain_logits(llama, ids), plain_logits(llama_w4, ids)
    kl = plain_kl(expected, ours)
    assert kl.mean() > 1e-4  # far above what float32 can hide
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert found.kl_median == pytest.approx(np.median(kl), rel=1e-3)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    same = (expected[:, :-1].argmax(-1) == ours[:, :-1].argmax(-1)).float().mean()
    assert 0.5 < same < 1
    assert found.same_top == pytest.approx(float(same))
    loss = functional.cross_entropy(expected[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    assert found.reference_perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_kl_is_of_the_original_against_the_model_and_not_the_other_way_round(
    llama: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    sharper = make_llama()
    with torch.no_grad():
        sharper.lm_head.weight *= 3
    other = save(sharper.half(), tmp_path / "other")
    expected, ours = plain_logits(llama, ids), plain_logits(other, ids)
    forward, backward = plain_kl(expected, ours).mean(), plain_kl(ours, expected).mean()
    assert abs(forward - backward) > 0.05 * forward
    assert compress.evaluate(other, reference=llama, text=ids).kl_mean == pytest.approx(forward, rel=1e-4)


# --- standard errors -----------------------------------------------------------------------------------------------


def plain_surprisal(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """-log p of every predicted token, [rows, tokens]."""
    loss = functional.cross_entropy(logits[:, :-1].transpose(1, 2).double(), ids[:, 1:], reduction="none")
    return loss.numpy()


def errors_of(found: compress.Evaluation, kind: str) -> dict[str, float]:
    return {name: e for name, figure in found.texts[0].figures.items() if (e := getattr(figure, kind)) is not None}


def test_standard_errors_are_those_of_the_stored_tokens(llama: Path, llama_w4: Path, ids: torch.Tensor) -> None:
    found = compress.evaluate(llama_w4, reference=llama, text=ids)
    expected, ours = plain_logits(llama, ids), plain_logits(llama_w4, ids)
    nll, original = plain_surprisal(ours, ids), plain_surprisal(expected, ids)
    same = (expected[:, :-1].argmax(-1) == ours[:, :-1].argmax(-1)).double().numpy()
    values = {
        "log_perplexity_ratio": nll - original,
        "kl_mean": plain_kl(expected, ours).reshape(ROWS, LENGTH - 1),
        "same_top": same,
    }
    assert found.log_perplexity_ratio == pytest.approx(math.log(found.perplexity / found.reference_perplexity))
    assert (found.texts[0].windows, found.texts[0].length) == (ROWS, LENGTH)
    for kind, rows in (("error", lambda x: x.mean(1)), ("token_error", lambda x: x.ravel())):
        errors = errors_of(found, kind)
        assert set(errors) >= {"perplexity", "reference_perplexity", *values}
        for name, each in values.items():
            assert errors[name] == pytest.approx(sem(rows(each)), rel=2e-3), name
        # Delta method: d exp(m) = exp(m) dm.
        assert errors["perplexity"] == pytest.approx(found.perplexity * sem(rows(nll)), rel=1e-4)
        assert errors["reference_perplexity"] == pytest.approx(
            found.reference_perplexity * sem(rows(original)), rel=1e-4
        )
        assert errors["log_perplexity_ratio"] < errors["perplexity"] / found.perplexity / 2  # paired


def test_one_window_has_no_error_over_windows(llama: Path, ids: torch.Tensor) -> None:
    found = compress.evaluate(llama, text=ids[:1])
    assert errors_of(found, "error") == {}
    assert errors_of(found, "token_error")["perplexity"] > 0
    shortest = compress.evaluate(llama, text=ids[:1, :2])
    assert errors_of(shortest, "error") == errors_of(shortest, "token_error") == {}


def test_a_model_against_itself_differs_in_nothing(llama: Path, llama_w4: Path, ids: torch.Tensor) -> None:
    for model in (llama, llama_w4):
        found = compress.evaluate(model, reference=model, text=ids)
        assert (found.kl_mean, found.kl_median, found.kl_p99, found.same_top) == (0.0, 0.0, 0.0, 1.0)
        assert found.perplexity == found.reference_perplexity
        assert found.log_perplexity_ratio == found.error("log_perplexity_ratio") == 0
        assert found.bytes == found.reference_size.bytes


def test_figures_do_not_depend_on_what_runs_at_once(
    llama: Path, llama_w4: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = compress.evaluate(llama_w4, reference=llama, text=ids, cache=False)
    steps: list[tuple[int, int]] = []

    class Noted(Silent):
        def step(self, done: int, total: int, what: str) -> None:
            steps.append((done, total))

    monkeypatch.setattr(predictor, "FORWARD_TOKENS", 4 * LENGTH)
    monkeypatch.setattr(predictor, "CHUNK_VALUES", 7 * VOCABULARY)
    in_parts = compress.evaluate(llama_w4, reference=llama, text=ids, cache=False, reporter=Noted())
    assert steps == [(0, 6), (4, 6), (6, 6)]
    assert in_parts.perplexity == pytest.approx(at_once.perplexity, rel=1e-6)
    assert in_parts.kl_mean == pytest.approx(at_once.kl_mean, rel=1e-3)
    assert in_parts.same_top == at_once.same_top


def test_models_in_memory_give_the_same_figures(llama: Path, ids: torch.Tensor) -> None:
    model = compress.load(llama, torch.float32)
    inside, outside = compress.evaluate(model, text=ids), compress.evaluate(llama, text=ids)
    assert inside.perplexity == outside.perplexity
    assert inside.bytes == sum(4 * parameter.numel() for parameter in model.parameters())
    assert inside.missing == {"reference": "no reference was given"}


def test_text_is_cut_into_windows_of_the_context(llama: Path, text_file: Path) -> None:
    found = compress.evaluate(llama, text=str(text_file), samples=3)
    (text,) = found.texts
    assert (text.length, text.tokens, text.name) == (CONTEXT, 3 * (CONTEXT - 1), text_file.name)


# --- sizes ---------------------------------------------------------------------------------------------------------


def headers(path: Path) -> dict[str, tuple[str, list[int], int]]:
    """{tensor: (dtype, shape, bytes)} read from the files' own JSON headers, with no library."""
    found = {}
    for file in path.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], last - first)
    return found


def test_bytes_are_those_of_the_files_and_bits_those_of_the_tensors(llama: Path, llama_w4: Path) -> None:
    for path in (llama, llama_w4):
        size = measure_size(find_source(str(path)))
        tensors = headers(path)
        assert size.bytes == sum(p.stat().st_size for p in path.glob("*.safetensors"))
        assert size.bits_per_parameter == 8 * sum(n for _, _, n in tensors.values()) / size.parameters
    assert size.parameters == sum(p.numel() for p in make_llama().parameters())
    assert size.compressed_weights == QUANTIZED


def test_bits_per_weight_of_4_bits_in_groups_of_32_by_hand(llama: Path, llama_w4: Path, ids: torch.Tensor) -> None:
    # 4 bits, a float16 scale for 32 weights, and two int64 of shape a layer.
    expected = 4 + 16 / 32 + LAYERS * 2 * 64 / QUANTIZED
    assert compress.evaluate(llama_w4, text=ids).bits_per_weight == pytest.approx(expected, rel=1e-12)
    assert compress.evaluate(llama, text=ids).bits_per_weight == 16.0


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"scheme": "w3a16", "group_size": 32}, 3 + 16 / 32),
        ({"scheme": "w8a16", "group_size": 16}, 8 + 16 / 16),
        ({"scheme": "w4a16", "group_size": 32, "grid": "asymmetric"}, 4 + 16 / 32 + 4 / 32),
    ],
)
def test_bits_per_weight_count_codes_scales_and_zero_points(
    llama: Path, tmp_path: Path, options: dict[str, object], bits: float
) -> None:
    output = tmp_path / "out"
    compress.quantize(llama, compress.RTN(**options), ignore=["*.down_proj"], output=output, verify=False)
    expected = bits + LAYERS * 2 * 64 / QUANTIZED
    assert measure_size(find_source(str(output))).bits_per_weight == pytest.approx(expected, rel=1e-12)


# --- the stored dtype ----------------------------------------------------------------------------------------------


def test_a_model_that_overflows_in_the_float16_it_is_stored_in_is_told_of(tmp_path: Path, ids: torch.Tensor) -> None:
    """In float32 nothing shows. The values are inside of an MLP, whose weights and outputs are small."""
    model = make_llama()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        for part, factor in ((mlp.up_proj.weight, 3e3), (mlp.gate_proj.weight, 3e3), (mlp.down_proj.weight.T, 1e-6)):
            part[0] *= factor
    half, brain = (save(copy.deepcopy(model).to(d), tmp_path / str(d)) for d in (torch.float16, torch.bfloat16))
    found = compress.evaluate(half, reference=brain, text=ids)
    assert "in model.layers.1.mlp.down_proj, and float16 ends at 65504" in found.missing["model in float16"]
    assert math.isfinite(found.perplexity)
    for _ in ("made", "kept"):
        turned = compress.evaluate(brain, reference=half, text=ids[:-1]).missing
        assert "model in float16" not in turned
        assert "float16 ends at 65504" in turned["reference in float16"]
    floor = compress.evaluate(brain, reference=half, text=ids, noise_floor=True)
    assert floor.texts[0].noise is None
    assert "in float16, whose range ends at 65504" in floor.missing["noise"]
    assert floor.missing["reference in float16"] == turned["reference in float16"]
    assert compress.evaluate(brain, text=ids, dtype="stored").model.dtype == "bfloat16"
    torch.save(ids, tmp_path / "ids.pt")
    stored = command("evaluate", half, "--text", tmp_path / "ids.pt", "--dtype", "stored")
    assert (stored.code, "not finite numbers" in stored.err, "damaged" in stored.err) == (1, True, False)


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_model_that_predicts_no_next_token_is_refused_in_one_line(tmp_path: Path, ids: torch.Tensor) -> None:
    headless = save(make_llama().half().model, tmp_path / "headless")
    with pytest.raises(InputError, match="LlamaModel predicts no next token; perplexity and KL need a language model"):
        compress.evaluate(headless, text=ids)
    with pytest.raises(InputError, match="Linear has no vocabulary; perplexity and KL need a language model"):
        compress.evaluate(torch.nn.Linear(2, 2), text=ids)


def padded(model: torch.nn.Module, size: int) -> torch.nn.Module:
    """A model with rows of noise behind its embedding and its head, as padding of a vocabulary is."""
    made = make_llama(vocab_size=size)
    state = made.state_dict()
    for name, value in model.state_dict().items():
        state[name][: len(value)] = value
    made.load_state_dict(state)
    return made


def test_a_reference_that_is_padded_further_is_compared_over_the_common_tokens(
    llama: Path, llama_w4: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    original = compress.load(llama, torch.float32)
    longer = save(padded(original, VOCABULARY + 64), tmp_path / "longer")
    plain = compress.evaluate(llama_w4, reference=llama, text=ids)
    for model, reference in ((llama_w4, longer), (longer, llama_w4)):
        for _ in ("made", "kept"):
            found = compress.evaluate(model, reference=reference, text=ids)
            assert found.texts[0].protocol.endswith(f"; over the {VOCABULARY} tokens that both models have")
            if model == llama_w4:
                assert found.perplexity == pytest.approx(plain.perplexity, rel=1e-6)
                assert found.kl_mean == pytest.approx(plain.kl_mean, rel=1e-5)
            else:
                assert found.perplexity == pytest.approx(plain.texts[0].figures["reference_perplexity"].value, rel=1e-6)
    foreign = ids.clone()
    foreign[0, 0] = VOCABULARY
    with pytest.raises(InputError, match=f"holds token id {VOCABULARY}, which only one of the two models has"):
        compress.evaluate(longer, reference=llama, text=foreign)
    tokenizer = json.loads((longer / "tokenizer.json").read_text(encoding="utf-8"))
    first, second, *_ = (token for token, i in tokenizer["model"]["vocab"].items() if i in (600, 601))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (longer / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(InputError, match=r"token 600 is '.*' of the model, and '.*' of the reference"):
        compress.evaluate(llama, reference=longer, text=ids)


def test_a_reference_of_another_vocabulary_is_refused(llama: Path, tmp_path: Path) -> None:
    other = save(make_llama(vocab_size=512).half(), tmp_path / "other")
    with pytest.raises(InputError, match="the reference has a vocabulary of 512, the model of 2048"):
        compress.evaluate(llama, reference=other, text=torch.zeros(1, 4, dtype=torch.int64))


def test_text_for_a_model_in_memory_is_refused(llama: Path) -> None:
    with pytest.raises(InputError, match="a model in memory has no tokenizer; give token ids"):
        compress.evaluate(make_llama(), text="demo")


def test_text_is_refused_before_weights_are_loaded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("compress.evaluation.quality.language.load_source", load)
    with pytest.raises(InputError, match=r"no\.txt' does not exist"):
        compress.evaluate(llama, text="no.txt")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the trained models beside the project")
def test_a_trained_model_has_the_perplexity_that_its_card_states() -> None:
    found = compress.evaluate(
        SHARED / "models" / "babyllama-105", text=str(SHARED / "tokens" / "babyllama-105.eval.pt"), samples=60
    )
    assert found.perplexity == pytest.approx(2.15, abs=0.06)  # 2.1513 on all 500 rows


def test_evaluating_leaves_the_training_mode_alone() -> None:
    model = make_llama().train()
    compress.evaluate(model, text=torch.randint(VOCABULARY, (2, 16)))
    assert all(module.training for module in model.modules())


# --- in a file -----------------------------------------------------------------------------------------------------


def test_an_evaluation_is_read_back_as_it_was(llama: Path, llama_w4: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    for found in (compress.evaluate(llama_w4, reference=llama, text=ids), compress.evaluate(llama, text=ids[:1])):
        (tmp_path / "found.json").write_text(json.dumps(asdict(found)))
        assert read_evaluation(tmp_path / "found.json") == found
    assert found.run is found.recipe is found.reference is None


def test_an_evaluation_says_what_was_measured(llama: Path, llama_w4: Path, ids: torch.Tensor) -> None:
    found = compress.evaluate(llama_w4, reference=make_llama(), text=ids)
    record = json.loads((llama_w4 / "compress.json").read_text())
    assert found.recipe == record["identity"]["recipe"]
    assert [asdict(layer)["name"] for layer in found.run.layers] == [layer["name"] for layer in record["layers"]]
    assert (found.run.seconds, found.run.left_alone) == (record["seconds"], record["left_alone"])
    assert (found.model.name, found.model.architecture) == (llama_w4.name, "LlamaForCausalLM")
    assert found.model.parameters == found.reference.parameters == found.size.parameters
    assert (found.reference.name, found.reference.fingerprint) == ("LlamaForCausalLM", None)
    assert found.model.fingerprint == find_source(str(llama_w4)).fingerprint()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: d.pop("format"), "format is None; it must be 2"),
        (lambda d: d.update(format=1), "format is 1; it must be 2"),
        (lambda d: d["texts"][0].pop("tokens"), r"texts\[0\].tokens is missing; it must be a whole number"),
        (lambda d: d["texts"][0]["figures"].update(kl_mean=0.5), r"figures.kl_mean is 0.5; it must be a mapping"),
        (lambda d: d["model"].update(colour="red"), "model.colour is 'red'; it must be left out"),
    ],
)
def test_a_file_that_holds_no_evaluation_is_refused_by_its_key(
    llama: Path, ids: torch.Tensor, tmp_path: Path, damage: Callable[[dict], object], says: str
) -> None:
    value = asdict(compress.evaluate(llama, text=ids[:1]))
    damage(value)
    path = tmp_path / "found.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match=f"^{path}: .*{says}"):
        read_evaluation(path)
