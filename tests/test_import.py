"""Importing the package needs NumPy and SciPy only, and loads nothing heavy."""

import itertools
import pydoc
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vbtta

SOURCE = Path(vbtta.__file__).parents[1]
REGRESSION = """
import numpy as np
from vbtta import LabelSets, Policy, ViewPredictions, fit_policy
rng = np.random.default_rng(0)
truth = rng.normal(size=80)
views = ViewPredictions(truth[:, None, None] + rng.normal(size=(80, 3, 1)) * 0.3, names=["identity", "a", "b"])
policy = fit_policy(views, truth, task="regression")
assert abs(policy.predict(views).mean[:, 0] - truth).mean() < 0.3
logits = ViewPredictions(rng.normal(size=(80, 3, 4)), names=["identity", "a", "b"])
fit_policy(logits, rng.integers(0, 4, size=80), task="classification").predict(logits)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the core dependencies and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    installed = Path(sysconfig.get_paths()["purelib"])
    for name in ("numpy", "numpy.libs", "scipy", "scipy.libs"):
        if (installed / name).exists():
            (folder / name).symlink_to(installed / name)
    return folder


def run(code: str, bare: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees the standard library, the bare folder and the source."""
    lines = f"import sys; sys.path[:0] = [{str(SOURCE)!r}, {str(bare)!r}]\n"
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", lines + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_core_works_with_numpy_and_scipy_alone(bare: Path) -> None:
    missing = run("import sklearn", bare)
    assert "ModuleNotFoundError" in missing.stderr  # the environment is bare indeed
    done = run(REGRESSION, bare)
    assert done.returncode == 0, done.stderr


def test_every_public_name_that_needs_no_extra_loads(bare: Path) -> None:
    names = ("EM", "LabelSets", "Policy", "fit_policy", "GaussianMixture", "select_views")
    done = run(f"import vbtta\nfor name in {names}: getattr(vbtta, name)", bare)
    assert done.returncode == 0, done.stderr


def test_import_is_light(bare: Path) -> None:
    code = """
import vbtta
names = ("scipy.stats", "scipy.optimize", "sklearn", "torch", "pandas", "matplotlib")
heavy = [name for name in names if name in sys.modules]
assert not heavy, heavy
assert "fit_policy" in dir(vbtta)
"""
    done = run(code, bare)
    assert done.returncode == 0, done.stderr


def test_help_names_types_as_the_source_does() -> None:
    for name in ("fit_policy", "ViewPredictions", "LabelSets", "Policy", "collect_views", "compare", "select_views"):
        text = pydoc.plain(pydoc.render_doc(getattr(vbtta, name)))
        assert "_NestedSequence" not in text, name
    assert "LabelSets | ArrayLike | None" in pydoc.plain(pydoc.render_doc(vbtta.fit_policy))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fit_polcy'"):
        _ = vbtta.fit_polcy
    assert set(vbtta.__all__) == set(dir(vbtta))


def test_imports_go_one_way() -> None:
    """The contracts of pyproject.toml, as `make lint` checks them."""
    contracts = str(Path(__file__).parents[1] / "pyproject.toml")
    program = (
        f"import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports({contracts!r}, no_cache=True))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "5 kept, 0 broken" in process.stdout


def calls_of_a_fit(**options: Any) -> Counter[tuple[str, str]]:
    """How often a fit calls each function: by file and name."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, 300)
    logits = 2 * np.eye(4)[truth][:, None] + rng.normal(size=(300, 5, 4))
    predictions, folder = vbtta.ViewPredictions(logits, names=["identity", *"abcd"]), SOURCE / "vbtta"
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and folder in path.parents and frame.f_code.co_name != "<module>":
            calls[path.relative_to(folder).as_posix(), frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        vbtta.fit_policy(predictions, truth, task="classification", **options)
    finally:
        sys.setprofile(None)
    return calls


def files_of_a_fit(**options: Any) -> set[str]:
    """Names of the files whose functions a fit calls."""
    return {file for file, _ in calls_of_a_fit(**options)}


def test_a_fit_validates_its_input_once() -> None:
    calls = calls_of_a_fit()
    checks = ("ViewPredictions.align", "ViewPredictions.check_finite", "require_views", "check_logits", "Policy._check")
    times = {name: sum(count for (_, called), count in calls.items() if called == name) for name in checks}
    assert times == dict.fromkeys(checks[:4], 1) | {"Policy._check": 0}


def test_the_walk_of_a_fit_passes_the_files_that_the_page_draws() -> None:
    page = (SOURCE.parent / "docs" / "contribute" / "architecture.md").read_text(encoding="utf-8")
    walk = page[page.index("## A walk") : page.index("## One step")]
    drawn = set()
    for pattern in re.findall(r"`([\w{},/]+\.py)`", walk):
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        drawn |= {"".join(choice) for choice in itertools.product(*parts)}
    named = {file for file in files_of_a_fit() if not any(file.endswith(each) for each in drawn)}
    assert not named, f"docs/contribute/architecture.md does not draw {sorted(named)}"
    stated, alone = map(int, re.findall(r"(\d+) files", walk))
    assert len(drawn) == stated
    assert len(files_of_a_fit(model="mixture", guard=False)) <= alone
