"""Results of an examination, in words and as data."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["good", "slow", "missing", "broken"]


@dataclass(frozen=True)
class Observation:
    """One thing that was looked at. about: its area. state: `good`; `slow` (it works, more slowly than it could);
    `missing` (something optional is not there); `broken` (work will fail). advice: what to do, where there is
    something to do."""

    about: str
    state: State
    said: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.about}: {self.said}" + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Examination:
    """Facts of the machine by area, {area: {name: value}}, and the findings."""

    facts: dict[str, dict[str, Any]]
    findings: tuple[Observation, ...]

    def of(self, *states: State) -> list[Observation]:
        """The findings in one of these states."""
        return [finding for finding in self.findings if finding.state in states]

    def content(self) -> dict[str, Any]:
        """Facts and findings as JSON has them."""
        return {"facts": self.facts, "findings": [asdict(finding) for finding in self.findings]}


def gathered(parts: Iterable[tuple[str, dict[str, Any], Iterable[Observation]]]) -> Examination:
    """An examination of parts: (area, facts, findings)."""
    found = [(area, facts, tuple(findings)) for area, facts, findings in parts]
    findings = tuple(finding for _, _, each in found for finding in each)
    return Examination({area: facts for area, facts, _ in found}, findings)
