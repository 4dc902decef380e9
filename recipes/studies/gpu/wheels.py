"""Fetches the packages that a GPU machine without a network may lack, as wheels for Python 3.12 on x86-64 Linux.

    python recipes/studies/gpu/wheels.py [--to build/gpu-wheels]

`day.py` installs whatever lies in that folder into a temporary one. greenlet is a dependency of compress; the others
are the peers that are measured, and what these import. torch, transformers and what comes with them are not fetched.
"""

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "build" / "gpu-wheels"
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28, 31, 34, 35, 39)  # pip matches each exactly
LIMIT = 64 * 2**20
# llm-compressor 0.14 takes transformers up to 5.17, and compressed-tensors 0.19.0 alone.
WHEELS = (
    "greenlet>=3.1",
    "llmcompressor==0.14.0.1",
    "compressed-tensors==0.19.0",
    "auto-round==0.15.1",
    "loguru==0.7.3",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
)
SOURCES = ("gemlite==0.6.0.post2",)  # published without wheels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER")
    folder = parser.parse_args().to
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    target = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", *target, "--dest", str(folder), *WHEELS], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), *SOURCES], check=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} files, {size / 2**20:.1f} MiB in {folder}")
    if size > LIMIT:
        sys.exit(f"more than {LIMIT / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
