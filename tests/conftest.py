"""Shared by all tests: one thread (tiny models are slower on two), quiet transformers, fixtures for real data."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real models and text; skips the test where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the real models and texts of {SHARED}, which are not here")
    return SHARED
