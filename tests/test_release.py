"""Wheel and sdist install where no checkout is, and run the demo there."""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def done(*words: object, folder: Path) -> str:
    """The output of a program that ends well, run in a folder, with nothing of this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the files that git has, and a wheel that is made of that sdist."""
    pytest.importorskip("build", reason="`build` makes wheels and sdists")
    source, place = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("dist")
    source.mkdir()
    files = done("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT).splitlines()
    with tarfile.open(place / "files.tar", "w") as packed:
        for name in files:
            if (ROOT / name).exists() or (ROOT / name).is_symlink():
                packed.add(ROOT / name, name)
    with tarfile.open(place / "files.tar") as packed:
        packed.extractall(source, filter="tar")
    (place / "files.tar").unlink()
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, source, folder=source)
    return place


def test_an_sdist_holds_sources_and_no_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "compress/kernels/routes.py"} <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_a_wheel_of_the_sdist_is_that_of_the_checkout(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name in (
            "compress/api/quantize.py",
            "compress/kernels/cpu/cpu_gemm.cpp",
            "compress/recipes/w4a16-gptq.yaml",
        ):
            own = (ROOT / name).read_bytes()
            assert hashlib.sha256(packed.read(name)).digest() == hashlib.sha256(own).digest()


@pytest.mark.parametrize("form", ["*.whl", "*.tar.gz"])
def test_it_installs_in_a_clean_environment_and_runs_the_demo(form: str, built: Path, tmp_path: Path) -> None:
    """Other packages are those of this environment, so that no network is needed."""
    (package,) = built.glob(form)
    place = tmp_path / "environment"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    home = Path(done(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    # Last on the path, so that an editable installation of the checkout there is not found before ours.
    others = sysconfig.get_path("purelib")
    borrowed = [others, *(line for path in Path(others).glob("packages.pth") for line in path.read_text().splitlines())]
    (home / "borrowed.pth").write_text("".join(f"import sys; sys.path.append({line!r})\n" for line in borrowed))
    if (home / "setuptools").exists():  # that of ensurepip may be too old to build the sdist
        done(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", folder=tmp_path)
    done(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", package, folder=tmp_path)
    where = done(python, "-c", "import compress; print(compress.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(place)
    table = done(place / "bin" / "compress", "demo", folder=tmp_path)
    assert "GPTQ w3a16 g128" in table
    assert "Nothing is broken." in done(place / "bin" / "compress", "doctor", folder=tmp_path)
