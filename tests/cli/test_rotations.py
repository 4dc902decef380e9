"""`--rotate`: what it asks for, and that trellis codes are rotated without it."""

import pytest

from compress import Rotation
from compress.cli.commands.quantize import rotation_asked

AS_IT_RUNS = Rotation(hidden=False, heads=False, online=True)


@pytest.mark.parametrize(
    ("rotate", "method", "passes", "said"),
    [
        (None, "trellis", (AS_IT_RUNS,), True),
        (True, "trellis", (AS_IT_RUNS,), False),
        (False, "trellis", (), False),
        (None, "gptq", (), False),
        (True, "gptq", (Rotation(),), False),
    ],
)
def test_rotations_of_methods(rotate: bool | None, method: str, passes: tuple[Rotation, ...], said: bool) -> None:
    found, remarks = rotation_asked(rotate, method)
    assert found == passes
    assert bool(remarks) == said
