"""Words of the former release are those of today, and say so; what today's command does not take is refused."""

import click
import pytest
from commands import command

from compress.cli.former import reworded

CASES = {
    "distill M --cache-logits F --training T --calibration C --top-k 8 --train temperature=2": (
        "cache-logits M --output F --calibration T --top-k 8 --temperature 2"
    ),
    "distill M --cache-logits=F --calibration=C --quiet": "cache-logits M --output F --calibration C --quiet",
    "quantize M --budget 3bpw --group-size -1 --grid=narrow --set refit=0 --output O --no-fused": (
        "allocate M --budget 3bpw --group-sizes -1 --set grid=narrow --set refit=0 --run O --no-fused"
    ),
    "quantize M --max-kl=0.1 --output O": "allocate M --max-kl 0.1 --run O",
}


@pytest.mark.parametrize("words", CASES)
def test_former_words_are_said_in_those_of_today(words, capsys):
    made = reworded(words.split())
    assert made == CASES[words].split()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"write `compress {made[0]} " in line


@pytest.mark.parametrize(
    "words", ["quantize M --output O --set a=--budget", "allocate M --budget 3bpw", "distill M", ""]
)
def test_words_of_today_stay(words, capsys):
    assert reworded(words.split()) == words.split()
    assert capsys.readouterr().err == ""


def test_what_the_command_of_today_does_not_take_is_refused():
    with pytest.raises(click.UsageError, match="drop --train schedule"):
        reworded(["distill", "M", "--cache-logits", "F", "--train", "schedule=linear"])
    outcome = command("quantize", "M", "--budget", "3bpw", "--scheme", "w4a16", "--output", "O", "--calibration", "T")
    assert (outcome.code, "No such option" in outcome.err, "--scheme" in outcome.err) == (2, True, True)
