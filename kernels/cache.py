"""Where what can be made again is kept: compiled libraries, tuned configurations."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$COMPRESS_CACHE_DIR, else $XDG_CACHE_HOME/compress, else ~/.cache/compress."""
    own = os.environ.get("COMPRESS_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "compress"
