"""What is published: the package alone, with its data files and licence, which works where nothing else of ours is."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")

TRIAL = """
import numpy as np, vbtta
truth = np.random.default_rng(0).integers(3, size=200)
logits = np.eye(3)[truth][:, None] * [[2.0], [1.0]] + np.random.default_rng(1).normal(size=(200, 2, 3))
views = vbtta.ViewPredictions(logits, names=["identity", "flip"])
policy = vbtta.fit_policy(views, truth, task="classification", model="mixture", guard=False)
policy.save("policy.json")
print(vbtta.__file__, policy.predict(views).proba.shape)
"""


def built(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = contents(wheel)
    packed = {name for name in names if ".dist-info/" not in name}
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "vbtta").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == source
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not any(part in name for name in packed for part in ("test", "result", ".npz", ".json", ".pyc"))
    assert {"vbtta/py.typed", "vbtta/report/templates/report.html", "vbtta/cli/demo_views.toml"} <= packed


def test_the_source_archive_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(built("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("vbtta-*")
    assert contents(built("wheel", folder, tmp_path / "wheel")) == contents(wheel)


def test_the_installed_wheel_fits_and_predicts(wheel: Path, tmp_path: Path) -> None:
    """By the README's line for a release, into a folder of its own; what it needs comes from this environment."""
    site = tmp_path / "site"
    options = ["--no-index", "--find-links", str(wheel.parent), "--no-deps", "--target", str(site)]
    install = [sys.executable, "-m", "pip", "install", "-q", *options, "vbtta[torch,cli]"]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def output(*command: str, folder: Path = tmp_path) -> str:
        call = subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True, capture_output=True)
        return call.stdout.decode()

    assert output("-c", TRIAL).startswith(str(site))
    assert "predict" in output("-m", "vbtta.cli", "--help")
    readme = ["tests/test_readme.py", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "readme")]
    assert "[100%]" in output("-m", "pytest", "-q", *readme, folder=ROOT)
