"""The name of this machine's processor."""

from pathlib import Path


def cpu_name() -> str:
    """The model of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
