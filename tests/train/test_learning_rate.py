"""The rate that is chosen where nobody gave one, and the best that is kept: of a run that is otherwise any other."""

import json

import pytest
import torch
from checkpoints import same
from models import strong, tokens

import compress
from compress.base.errors import CheckpointError
from compress.base.progress import Silent
from compress.engine.learn import training
from compress.passes.train import Train
from compress.train.inputs.samples import Rows
from compress.train.learning_rate import (
    HIGHEST,
    LOWEST,
    PART,
    UNTESTED,
    RangeTest,
    choose_rate,
    fewer_rates,
    trial_rates,
)
from compress.train.loop.best import interval, measured_samples

TWO_BITS = compress.RTN(scheme="w2a16", group_size=16)
DATA = {"calibration": tokens(24, seed=4), "batch_size": 4, "verify": False}
FEW = {"steps": 4, "rows": 4, "save_every": 2}


class Stop(Silent):
    """Interrupts a run behind a step; keeps what is noted."""

    def __init__(self, after: str = "never") -> None:
        self.after, self.notes = after, list[str]()

    def step(self, done: int, total: int, what: str) -> None:
        if what.startswith(self.after):
            raise KeyboardInterrupt

    def note(self, message: str) -> None:
        self.notes.append(message)


def of(loss, rates=31):
    """A curve by the power of ten of its rates."""
    powers = [-6 + 5 * i / (rates - 1) for i in range(rates)]
    return [(10**x, loss(x)) for x in powers]


def test_the_rate_is_a_part_of_those_of_the_smallest_losses():
    assert choose_rate(10.0, of(lambda x: 1 + (x + 3) ** 2)) == pytest.approx(PART * 1e-3)
    cliff = of(lambda x: 0.25 - 0.01 * (x + 6) if x < -2.9 else 3.0)
    assert PART * 10**-3.5 < choose_rate(0.25, cliff) < PART * 1e-3
    cut_short = [place for place in cliff if place[1] < 1]
    assert choose_rate(0.25, cut_short) == choose_rate(0.25, cliff)
    noise = torch.Generator().manual_seed(0)
    noisy = of(lambda x: (1 + (x + 3) ** 2) * float(1 + 0.05 * torch.rand((), generator=noise)))
    assert PART * 10**-3.1 < choose_rate(10.0, noisy) < PART * 10**-2.9
    for harm in (of(lambda x: 1.1 + (x + 6)), []):
        assert choose_rate(1.0, harm) == LOWEST


def test_a_short_run_has_a_shorter_test():
    assert [len(trial_rates(steps)) for steps in (1, 40, 62, 10_000)] == [16, 20, 31, 31]
    assert trial_rates(62)[6] == pytest.approx(1e-5)


def test_a_short_time_has_a_test_of_fewer_rates_or_none():
    every = trial_rates(62)
    assert fewer_rates(every, 40) == every
    for count, low, high in ((20, LOWEST, HIGHEST), (6, 1e-5, 1e-2), (4, 1e-5, 1e-2)):
        rates = fewer_rates(every, count)
        assert (len(rates), rates[0]) == (count, low)
        assert rates[-1] == pytest.approx(high)
    assert fewer_rates(every, 3) == []
    said = Stop()
    passes = [TWO_BITS, Train(rows=4, minutes=1e-6)]
    (history,) = compress.quantize(strong(), passes, reporter=said, **DATA).record.training
    assert (history["options"]["learning_rate"], len(history["steps"])) == (UNTESTED, 1)
    assert "learning rate 0.0001: the time is too short for a range test" in said.notes


def test_measurements_take_a_twentieth_of_the_time_at_most():
    assert interval(Train(steps=200, rows=16), 6) == 25
    assert interval(Train(steps=20, rows=16), 1) == 10
    assert interval(Train(steps=200, rows=16), 100) == 67  # 300 samples are measured, 3,200 trained on
    assert interval(Train(steps=200, rows=16), 1000) == 0
    assert measured_samples(Train(steps=200, rows=16)) == 160
    kept_out = Rows({"input_ids": torch.arange(1000)})
    assert kept_out.some(160).tensors["input_ids"].tolist() == [i * 1000 // 160 for i in range(160)]
    assert kept_out.some(1001) is kept_out


def test_a_run_whose_rate_was_chosen_is_the_run_of_that_rate(tmp_path, monkeypatch):
    """Bit for bit; also one that was stopped, which keeps the rate."""
    strong().save_pretrained(tmp_path / "model")
    before = torch.get_rng_state()
    result = compress.quantize(tmp_path / "model", [TWO_BITS, Train(**FEW)], output=tmp_path / "chosen", **DATA)
    assert torch.equal(before, torch.get_rng_state())
    (history,) = result.record.training
    rate = history["options"]["learning_rate"]
    assert rate == history["range_test"]["learning_rate"] > LOWEST
    given = [TWO_BITS, Train(**FEW, learning_rate=rate)]
    other = compress.quantize(tmp_path / "model", given, output=tmp_path / "given", **DATA)
    assert other.record.training[0]["range_test"] is None
    for name, p in result.model.state_dict().items():
        assert torch.equal(p, other.model.get_parameter(name)), name
    losses = [[line["loss"] for line in r.record.training[0]["steps"]] for r in (result, other)]
    assert losses[0] == losses[1]
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(
            tmp_path / "model", [TWO_BITS, Train(**FEW)], output=tmp_path / "out", reporter=Stop("step 3"), **DATA
        )
    kept = next((tmp_path / "out.partial").rglob("rate.json"))
    text = kept.read_text()
    kept.write_text("{")
    again = {"output": tmp_path / "out", "resume": True, **DATA}
    with pytest.raises(CheckpointError, match=r"rate\.json cannot be read"):
        compress.quantize(tmp_path / "model", [TWO_BITS, Train(**FEW)], **again)
    kept.write_text(text)
    monkeypatch.setattr("compress.train.learning_rate.range_test", None)  # it is not chosen again
    said = Stop()
    compress.quantize(tmp_path / "model", [TWO_BITS, Train(**FEW)], reporter=said, **again)
    same(tmp_path / "chosen", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "compress.json").read_text())["training"][0]
    assert (record["options"]["learning_rate"], record["resumed"]) == (rate, 2)
    assert record["range_test"]["curve"] == [list(place) for place in history["range_test"]["curve"]]
    assert [note for note in said.notes if note.startswith(f"learning rate {rate:.2g}, by a range test")]


def test_the_best_that_was_measured_is_kept_and_little_gain_is_said():
    harm = {**FEW, "learning_rate": 0.1, "save_every": 0}
    start = compress.quantize(strong(), [TWO_BITS], **DATA).model
    said = Stop()
    result = compress.quantize(strong(), [TWO_BITS, Train(**harm)], reporter=said, **DATA)
    assert result.record.training[0]["kept"] == 0
    for name, p in start.named_parameters():
        assert torch.equal(p, result.model.get_parameter(name)), name
    (note,) = [note for note in said.notes if note.startswith("training took back")]
    assert note.startswith("training took back 0% of the divergence")
    assert "a smaller learning_rate (now 0.1)" in note
    result = compress.quantize(strong(), [TWO_BITS, Train(**harm, keep="last")], **DATA)
    (history,) = result.record.training
    before, after = (line["logits"] for line in history["held_out"])
    assert history["kept"] == 4
    assert after > before
    # Penalties make it worse by intent, and masks have to be final.
    for more, kept in (({"l1": 5.0}, 4), ({"sparsity": 0.9, "prune_every": 1, "prune_from": 0.5}, 4)):
        result = compress.quantize(strong(), [Train(**FEW, **more, learning_rate=1e-4)], **DATA)
        assert result.record.training[0]["kept"] == kept


def test_scales_alone_have_no_use_for_a_rate_of_weights(monkeypatch):
    monkeypatch.setattr(training, "range_test_once", None)
    passes = [TWO_BITS, Train(**{**FEW, "steps": 1}, trains="scales")]
    assert compress.quantize(strong(), passes, **DATA).record.training[0]["range_test"] is None


def test_steps_are_as_many_as_the_pace_of_the_test_allows(monkeypatch):
    paced = RangeTest(0.01, 1.0, [(1e-6, 1.0)] * 29, seconds=31.0)
    assert paced.steps_in(1) == int(29 / 1.15)
    assert paced.steps_in(0.1) == 1
    options = {**FEW, "minutes": 1 / 60}
    del options["steps"]
    monkeypatch.setattr(RangeTest, "steps_in", lambda self, minutes: 10**6)  # whose time is up long before
    (history,) = compress.quantize(strong(), [TWO_BITS, Train(**options)], **DATA).record.training
    done = len(history["steps"])
    assert done == history["options"]["steps"] == history["held_out"][-1]["step"] < 10**6
    assert history["kept"] <= done
