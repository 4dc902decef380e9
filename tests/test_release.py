"""Wheel and sdist install where no checkout is, and run the demo there."""

import hashlib
import json
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

from compress.kernels.cpu import build

QUANTIZE = ("quantize", "demo", "--method", "rtn", "--scheme", "w4a16")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def done(*words: object, folder: Path, **changed: str) -> str:
    """The output of a program that ends well, run in a folder, with nothing of this checkout on its path. changed:
    variables of its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changed
    ran = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that git has."""
    place = tmp_path_factory.mktemp("files")
    (source := place / "project").mkdir()
    files = done("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT).splitlines()
    with tarfile.open(place / "files.tar", "w") as packed:
        for name in files:
            if (ROOT / name).exists() or (ROOT / name).is_symlink():
                packed.add(ROOT / name, name)
    with tarfile.open(place / "files.tar") as packed:
        packed.extractall(source, filter="tar")
    return source


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the files that git has, and a wheel that is made of that sdist."""
    pytest.importorskip("build", reason="`build` makes wheels and sdists")
    place = tmp_path_factory.mktemp("dist")
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, checkout, folder=checkout)
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
            "compress/jobs/quantize.py",
            "compress/kernels/cpu/cpu_gemm.cpp",
            "compress/recipes/w4a16-gptq.yaml",
        ):
            own = (ROOT / name).read_bytes()
            assert hashlib.sha256(packed.read(name)).digest() == hashlib.sha256(own).digest()


def installed(package: Path, place: Path, folder: Path) -> Path:
    """The bin folder of a new environment with a package. Other packages are those of this environment, so that no
    network is needed."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    home = Path(done(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    # Last on the path, so that an editable installation of the checkout there is not found before ours.
    others = sysconfig.get_path("purelib")
    borrowed = [others, *(line for path in Path(others).glob("packages.pth") for line in path.read_text().splitlines())]
    (home / "borrowed.pth").write_text("".join(f"import sys; sys.path.append({line!r})\n" for line in borrowed))
    if (home / "setuptools").exists():  # that of ensurepip may be too old to build the sdist
        done(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", folder=folder)
    done(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", package, folder=folder)
    where = done(python, "-c", "import compress; print(compress.__file__)", folder=folder)
    assert Path(where.strip()).is_relative_to(place)
    return place / "bin"


@pytest.mark.parametrize("form", ["*.whl", "*.tar.gz"])
def test_it_installs_in_a_clean_environment_and_runs_the_demo(form: str, built: Path, tmp_path: Path) -> None:
    (package,) = built.glob(form)
    programs = installed(package, tmp_path / "environment", tmp_path)
    table = done(programs / "compress", "demo", folder=tmp_path)
    assert "GPTQ w3a16 g128" in table
    assert "Nothing is broken." in done(programs / "compress", "doctor", folder=tmp_path)


@pytest.mark.timeout(7200)  # five minutes of CPU time, which a busy machine takes long for
def test_a_wheel_with_compiled_kernels_runs_them_where_no_compiler_is(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("build", reason="`build` makes wheels and sdists")
    if reasons := build.machine_reasons():
        pytest.skip("; ".join(reasons))
    wheels = tmp_path / "wheels"
    # The tools of this environment are there already.
    variables = (f"VENV={Path(sys.executable).parent.parent}", "BUILD=--no-isolation", f"DIST={wheels}")
    skipped = (f"--old-file={Path(sys.executable).parent.parent / '.installed'}", "--old-file=release-tools")
    done("make", *skipped, *variables, "wheels", folder=checkout)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    programs = installed(wheel, tmp_path / "environment", tmp_path)
    cache = tmp_path / "cache"
    alone = {"PATH": str(programs), "COMPRESS_CACHE_DIR": str(cache), "CXX": ""}
    found = json.loads(done(programs / "compress", "doctor", "--json", "-", "--quiet", folder=tmp_path, **alone))
    states = found["facts"]["kernels"]["libraries"]
    assert {name for name, state in states.items() if state != "prebuilt"} == {"spill"}
    assert found["facts"]["kernels"]["compilers"] == []
    out = tmp_path / "out"
    done(programs / "compress", *QUANTIZE, "--output", out, folder=tmp_path, **alone)
    said = done(programs / "compress", "inspect", out, "--kernels", folder=tmp_path, **alone)
    assert "cpu strips" in said
    done(programs / "compress", "generate", out, "--prompt", "The", "--tokens", "4", folder=tmp_path, **alone)
    assert not list(cache.glob("kernels/*.so"))
