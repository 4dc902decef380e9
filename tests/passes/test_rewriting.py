"""Passes of one's own that rotate, permute or cut: each a class and no more."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from commands import save
from models import build, tokens

import compress
from compress.base.errors import CompressError
from compress.jobs.verify import outputs, probe
from compress.model.edits.keep_channels import Coupling, Keep, Member
from compress.model.known_edits import Edit
from compress.model.structure.rotate import Rotate, unfit
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Between, Rewritten
from compress.passes.protocol.stages import Rewrite, Stage
from compress.solvers.statistics.input_statistics import ChannelNorm
from compress.weights.rotations.orthogonal import random_orthogonal


@dataclass(frozen=True, kw_only=True)
class Editing(Pass):
    """Base of those below: `edits` around each producer."""

    def edits(self, between: Between) -> list[Edit]:
        raise NotImplementedError

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Rewrite({"norm": ChannelNorm}, lambda between: Rewritten(self.edits(between), {"toy": 1})),)


class Rotating(Editing):
    name: ClassVar[str] = "rotating"

    def edits(self, between: Between) -> list[Edit]:
        size = between.widest()
        generator = torch.Generator().manual_seed(7)
        return [] if size is None else [Rotate(between.fold, random_orthogonal(size, generator))]


class Permuting(Editing):
    name: ClassVar[str] = "permuting"

    def edits(self, between: Between) -> list[Edit]:
        found = between.places()
        return [each.permuted(torch.arange(next(iter(each.of.values())).shape[1]).flip(0)) for each in found]


class Cutting(Editing):
    name: ClassVar[str] = "cutting"

    def edits(self, between: Between) -> list[Edit]:
        if unfit(between.fold):
            return []
        fold = between.fold
        producer = Member(fold.producer, torch.arange(fold.channels))
        consumers = [Member(each.name, each.channel_of_K) for each in fold.consumers]
        return [Keep(Coupling(fold.channels, (producer,), (), tuple(consumers)), torch.arange(fold.channels - 1))]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("make", [Rotating, Permuting])
def test_a_pass_that_rotates_or_permutes_is_a_class(kind: str, make: Callable[[], Pass], tmp_path):
    original = build(kind)
    model = save(build(kind), tmp_path / "model")
    made = compress.quantize(model, make(), calibration=tokens(), output=tmp_path / "out", verify=False)
    assert {fold.method for fold in made.record.folds} == {make().name}
    loaded = compress.load(tmp_path / "out")
    changed = [name for name, p in original.named_parameters() if not torch.equal(p, loaded.get_parameter(name))]
    assert changed
    if make is Permuting:
        assert all(
            torch.equal(
                original.get_parameter(n).flatten().sort().values, loaded.get_parameter(n).flatten().sort().values
            )
            for n in changed
        )
    expected = outputs(original, probe(96))
    assert (outputs(loaded, probe(96)) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_what_rotates_can_be_rounded_afterwards():
    model, original = build("llama"), build("llama")
    compress.quantize(model, [Rotating(), compress.RTN(scheme="w8a16", group_size=16)], calibration=tokens())
    expected = outputs(original, probe(96))
    assert 0 < (outputs(model, probe(96)) - expected).abs().max() <= 0.05 * expected.abs().max()


def test_an_edit_that_changes_shapes_is_refused_inside_the_loop():
    model, original = build("llama"), build("llama")
    with pytest.raises(CompressError, match=r"cutting changes the shape of model\.layers\.0.*leaves all shapes"):
        compress.quantize(model, Cutting(), calibration=tokens())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
