"""Where the tests' own files are."""

from pathlib import Path

SUPPORT = Path(__file__).parent
RANKS = SUPPORT / "ranks"
TESTS = SUPPORT.parent
ROOT = TESTS.parent
FIXTURES = TESTS / "fixtures"
GOLDEN = TESTS / "golden"
# Real models and texts, where somebody has put them; tests that use them skip, saying so, where nobody has.
SHARED = ROOT.parent / "shared" / "data"
