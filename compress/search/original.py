"""The speed of the original model, measured once, with which all recipes of a sweep are compared."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from compress.base.device import find_device
from compress.base.errors import CheckpointError, CompressError, InputError
from compress.base.progress import Reporter
from compress.base.schema import built, fits
from compress.checkpoint.files import read_json, write_json
from compress.checkpoint.read.source import find_source
from compress.evaluation.document import SpeedResult
from compress.evaluation.optional_measurements import speed_alone
from compress.evaluation.speed.side_by_side import surroundings


@dataclass(frozen=True)
class _Kept:
    """The content of original.json."""

    model: str
    speed: SpeedResult


@dataclass
class OriginalSpeed:
    """The original's speed: measured on first use, or read from `place`, where an earlier sweep has written it."""

    place: Path
    model: str
    device: str | None
    trusted: bool
    reporter: Reporter
    taken: SpeedResult | None = None

    def speed(self) -> SpeedResult | None:
        """The speed; None where it cannot be measured. The row of every recipe then gives the reason."""
        if self.taken is None:
            self.taken = self._before()
        if self.taken is None:
            self.reporter.note("measuring the original's speed")
            with suppress(InputError, CompressError):
                self.taken = speed_alone(self.model, self.device, self.trusted)
                write_json(self.place, asdict(_Kept(self._content(), self.taken)))
        return self.taken

    def _content(self) -> str:
        return find_source(self.model, self.trusted).fingerprint()

    def _before(self) -> SpeedResult | None:
        """The speed that an earlier sweep measured of the same model, on the same device with as many threads; or
        None."""
        try:
            found = read_json(self.place) if self.place.is_file() else None
            fits(found, _Kept, self.place)
        except CheckpointError:
            return None
        kept: _Kept = built(found, _Kept)
        here = surroundings(find_device(self.device))
        return kept.speed if kept.model == self._content() and (kept.speed.device, kept.speed.threads) == here else None
