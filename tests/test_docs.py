"""The pages run and print what they show, the equation map is whole, and the site needs nothing from elsewhere."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import vbtta
from benchmarks import pages as result_pages
from machines import STORE, forget_processes, patiently

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pages, hooks, names, roles = (_tool(name) for name in ("pages", "hooks", "names", "roles"))
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
HERE = [path for path in PAGES if DOCS in path.parents and path.parent.name != "integrations"]
WITH_CODE = [path for path in HERE if pages.has_code(path)]
PICTURE = re.compile(r"assets/pictures/([\w-]+\.svg)")


RAY = [
    pytest.mark.slow,
    # Ray's own
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def _needs_ray(page: Path) -> bool:
    return "import vbtta.ray" in (text := page.read_text(encoding="utf-8")) or "from vbtta.ray" in text


@pytest.fixture
def machine(page: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small Ray for the pages that need one."""
    if not _needs_ray(page):
        yield
        return
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

    def start() -> None:
        ray.shutdown()  # what an attempt in vain has left
        quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
        ray.init("local", num_cpus=2, object_store_memory=STORE, **quiet)  # whatever else runs here

    patiently(start)
    yield
    ray.shutdown()
    forget_processes()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=RAY if _needs_ray(page) else (), id=str(page.relative_to(DOCS))) for page in WITH_CODE],
)
def test_pages_run_and_print_what_they_show(page: Path, machine: None, tmp_path: Path) -> None:
    steps = pages.run(page, tmp_path)
    problems = [problem for step in steps if (problem := pages.difference(step)) is not None]
    assert not problems, "\n".join(problems)
    shown = PICTURE.findall(page.read_text(encoding="utf-8"))
    assert {name for name in shown if not (tmp_path / name).is_file()} == set()  # pictures are of this very code
    assert {name for name in shown if not (pages.PICTURES / name).is_file()} == set()


def test_a_wrong_output_is_found() -> None:
    assert pages.difference(pages.Step("python", "", "NLL 0.51\n", "NLL 0.51\n")) is None
    assert pages.difference(pages.Step("python", "", "NLL 0.51\n", "NLL 0.52\n")) is None  # other machines round
    assert pages.difference(pages.Step("python", "", "NLL 0.51\n", "NLL 0.61\n")) is not None
    assert pages.difference(pages.Step("python", "", "NLL 0.51\n", "MSE 0.51\n")) is not None
    assert pages.difference(pages.Step("python", "", "NLL 0.51\n", None)) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_code_is_run(page: Path) -> None:
    assert pages.not_run(page.read_text(encoding="utf-8")) == []


def test_code_that_is_not_run_is_found() -> None:
    ran = "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    assert pages.not_run(ran + "\n```sh\npip install .\n```\n\n```\na ──▶ b\n```\n") == []
    for block in (
        "```py\nprint(1)\n```",
        "```sh\nvbtta demo\n```",
        "```\nvbtta demo\n```",
        "```text\n1\n```",
        "```json\n{}\n```",
        "In words.\n\n    print(1)\n",
    ):
        assert len(pages.not_run(f"{ran}\n{block}\n")) == 1, block


def test_no_picture_is_left_over() -> None:
    used = {name for path in DOCS.rglob("*.md") for name in PICTURE.findall(path.read_text(encoding="utf-8"))}
    assert {path.name for path in pages.PICTURES.glob("*")} == used


# -- examples ---------------------------------------------------------------------------------------------------------

EXAMPLES = {
    "image_classification": lambda ran: sum(ran["weight"][view.name] for view in ran["turned"]) < 0.2,
    "tabular_regression": lambda ran: ran["weighted"].policy_.weights.sum() == pytest.approx(1),
    "crowd_labels": lambda ran: (ran["consensus"].label == ran["CLASSES"][ran["truth"]])[ran["asked"]].mean() > 0.95,
    "segmentation": lambda ran: (
        ran["weight"]["hflip"] < 0.02 < ran["weight"]["hflip/swap(1,2)"]
        and ran["scores"]["policy"][0] < min(ran["scores"]["network"][0], ran["scores"]["uniform"][0])
    ),
    "keypoints": lambda ran: ran["error"][1] < 0.95 * ran["error"][0] < 2,
    "prompts": lambda ran: ran["accuracy"]["weighted"] > ran["accuracy"]["one prompt"] + 0.1,
    "from_onnx": lambda ran: (ran["prediction"].label == ran["digits"].target[ran["test"]]).mean() > 0.9,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_do_what_they_say(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    assert EXAMPLES[name](ran)


def test_examples_are_notebooks_as_scripts() -> None:
    programs = {ROOT / "examples" / "imagenet.py", ROOT / "examples" / "serve.py"}  # a command and an app
    for path in {*(ROOT / "examples").glob("*.py")} - programs:
        cells = re.findall(r"^# %%.*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert cells[0] == "# %% [markdown]"
        assert "# %%" in cells, path


# -- the equation map -------------------------------------------------------------------------------------------------

MAP = (DOCS / "equations.md").read_text(encoding="utf-8")
_IN_CODE = re.compile(r"`([^`]+)`")


def _rows() -> list[list[str]]:
    lines = [
        line for line in MAP.splitlines() if line.startswith("|") and not line.startswith(("|---", "| paper", "| here"))
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_map_names_every_numbered_equation_once() -> None:
    numbers = [int(match[1]) for row in _rows() if (match := re.match(r"\**(\d+)\**,", row[0]))]
    assert numbers == list(range(1, 56))


def test_functions_and_tests_of_the_map_exist() -> None:
    assert len(_rows()) > 60
    for *_, function, test in _rows():
        module, _, name = _IN_CODE.findall(function)[0].rpartition(".")
        home = module if module.startswith("reproduction.") else f"vbtta.{module}"
        assert hasattr(importlib.import_module(home), name), function
        file, _, case = _IN_CODE.findall(test)[0].partition("::")
        text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert f"def {case}(" in text, test


def test_every_slip_of_the_map_has_its_numbers() -> None:
    slips = (DOCS / "slips.md").read_text(encoding="utf-8")
    headings = [int(number) for number in re.findall(r"^## (\d+)\.", slips, flags=re.MULTILINE)]
    assert headings == list(range(1, 13))
    for words in re.findall(r"slips? ([\d, and]+)", MAP):
        assert {int(number) for number in re.findall(r"\d+", words)} <= set(headings)
    sections = re.split(r"^## \d+\.", slips, flags=re.MULTILINE)[1:]
    assert all("```python" in section and "```text" in section for section in sections)


# -- the site ---------------------------------------------------------------------------------------------------------


def _config() -> dict[str, object]:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def test_the_site_needs_nothing_from_elsewhere() -> None:
    config = _config()
    for entry in (*config["extra_css"], *config["extra_javascript"]):  # type: ignore[misc]
        assert (DOCS / entry).is_file(), entry
    style = DOCS / "assets" / "katex" / "katex.min.css"
    fonts = re.findall(r"url\(([^)]+)\)", style.read_text(encoding="utf-8"))
    assert fonts
    assert all((style.parent / font).is_file() for font in fonts)
    assert config["theme"]["font"] is False  # type: ignore[index]
    assert config["strict"] is True


def test_long_lines_of_python_go_on_in_the_next_line() -> None:
    style = (DOCS / "assets" / "extra.css").read_text(encoding="utf-8")
    assert re.search(r"\.language-python pre > code \{[^}]*white-space: pre-wrap", style)
    extensions = [entry for entry in _config()["markdown_extensions"] if isinstance(entry, dict)]  # type: ignore[attr-defined]
    assert {"pymdownx.highlight": {"pygments_lang_class": True}} in extensions  # or no block has that class


def test_every_result_has_a_page() -> None:
    page_texts = hooks.result_pages()
    for path in (ROOT / "results").rglob("*.md"):
        assert f"results/{path.relative_to(ROOT / 'results')}" in page_texts
    assert next(iter(page_texts)) == "results/README.md"
    first = page_texts["results/README.md"]
    assert all(f"({name.removeprefix('results/')}" in first for name in page_texts if name != "results/README.md")


def test_a_dead_link_of_the_results_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "RESULTS", tmp_path / "results")
    (tmp_path / "results" / "item").mkdir(parents=True)
    for name in ("results/item/rows.json", "results/item/table.md", "script.py"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    page = tmp_path / "results" / "README.md"
    page.write_text("[t](item/table.md) [r](item/rows.json) [s](../script.py)", encoding="utf-8")
    assert hooks.result_pages()["results/README.md"].startswith("[t](item/table.md) [r](item/rows.json) s")
    page.write_text("[gone](item/figure.svg)", encoding="utf-8")
    with pytest.raises(Exception, match=r"results/README.md leads to item/figure.svg, which is not there"):
        hooks.result_pages()


def test_the_page_for_what_is_not_found_fetches_nothing() -> None:
    page = '<p>404</p><script src="https://unpkg.com/iframe-worker/shim"></script><script src="/a.js"></script>'
    assert hooks.on_post_template(page, template_name="404.html") == '<p>404</p><script src="/a.js"></script>'


def test_the_command_line_page_has_all_commands_and_options() -> None:
    main = importlib.import_module("typer.main")
    group = main.get_command(importlib.import_module("vbtta.cli.app").app)
    text = hooks.command_line()
    for name, command in group.commands.items():
        section = re.search(rf"^## vbtta {name}$(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
        assert section is not None, name
        for part in command.params:
            assert max(part.opts, key=len) in section[1] or (part.metavar or part.name.upper()) in section[1], part.name


def test_examples_of_the_commands_are_right_commands() -> None:
    main = importlib.import_module("typer.main")
    group = main.get_command(importlib.import_module("vbtta.cli.app").app)
    for name, command in group.commands.items():
        lines = inspect.cleandoc(command.help).partition("Example:")[2].strip().replace("\\\n", " ").splitlines()
        assert lines, name
        for line in lines:
            program, verb, *words = shlex.split(line, comments=True)
            assert (program, verb) == ("vbtta", name)
            command.make_context(name, words)  # raises where an option is unknown, missing or of another type


def test_the_reference_is_whole_and_every_name_has_a_docstring() -> None:
    hooks.check_reference(DOCS / "reference")


def test_a_missing_docstring_or_name_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("documented")

    class Silent:
        """It has one."""

        def method(self) -> None:
            pass

    module.Silent = Silent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "documented", module)
    assert hooks.undocumented("documented.Silent") == ["documented.Silent.method"]
    (tmp_path / "page.md").write_text("::: vbtta.LabelSets\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"the reference lacks .*vbtta\.fit_policy"):
        hooks.check_reference(tmp_path)


def test_a_missing_example_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("documented")
    docstrings = {
        "told": ">>> 1 + 1\n2\n",
        "fails": ">>> 1 / 0\nTraceback (most recent call last):\n    ...\nZeroDivisionError: division by zero\n",
        "silent": "No example.",
        "shows_nothing": ">>> 1 + 1\n",
        "skipped": ">>> 1 + 1  # doctest: +SKIP\n2\n",
    }
    for name, text in docstrings.items():
        setattr(module, name, type(name, (), {"__doc__": text}))
    monkeypatch.setitem(sys.modules, "documented", module)
    assert [name for name in docstrings if hooks.has_example(f"documented.{name}")] == ["told", "fails"]


def test_a_name_that_the_code_of_the_reference_uses_needs_no_example_of_its_own() -> None:
    page = "# Page\n\n```python\nfrom vbtta import a, b\nprint(a(1).shape)\n```\n\n```text\nb\n```\n"
    assert hooks.used_names(page) == {"print", "a", "shape"}


def test_baselines_and_the_delta_method_are_in_the_reference() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    assert "\n::: vbtta.baselines.Baseline\n" in text
    assert "\n::: vbtta.adapters.torch.delta_variance\n" in text


def test_roles_lead_to_what_is_there(tmp_path: Path) -> None:
    names.check_roles(ROOT / "src")
    package = tmp_path / "vbtta"
    package.mkdir()
    source = '"""Of :func:`here`, :meth:`Kind.act` and :class:`vbtta.Kind`."""\n'
    source += 'def here():\n    """Mine."""\nclass Kind:\n    def act(self):\n        """As :meth:`act`."""\n'
    (package / "__init__.py").write_text(source, encoding="utf-8")
    names.check_roles(tmp_path)
    for wrong in (":func:`vbtta.heer`", ":meth:`Kind.acts`", ":func:`there`"):
        (package / "other.py").write_text(f'"""See {wrong}."""\n', encoding="utf-8")
        with pytest.raises(Exception, match=r"no such name: vbtta\.other says"):
            names.check_roles(tmp_path)


def test_roles_are_links_where_the_reference_has_the_name() -> None:
    text = "As :func:`fit_policy`, :func:`vbtta.adapters.as_predictor`, :meth:`Policy.at_step` and :func:`to_plain`."
    thing = SimpleNamespace(docstring=SimpleNamespace(value=text))
    roles.Roles().on_instance(obj=thing)
    assert thing.docstring.value == (
        "As [`fit_policy`][vbtta.fit_policy], [`vbtta.adapters.as_predictor`][vbtta.as_predictor], "
        "[`Policy.at_step`][vbtta.Policy.at_step] and `to_plain`."
    )


def test_parameters_described_together_have_a_row_each() -> None:
    text = "Parameters\n----------\na, b : float\n    Both.\n\n    Of them.\nc : int\n    Last, but, not least.\n"
    thing = SimpleNamespace(docstring=SimpleNamespace(value=text))
    roles.Roles().on_instance(obj=thing)
    one_each = text.replace("a, b : float", "a : float\n    Both.\n\n    Of them.\nb : float")
    assert thing.docstring.value == one_each


def test_examples_of_docstrings_are_run() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert "--doctest-modules" in options["addopts"].split()
    assert "src" in options["testpaths"]


def test_the_import_order_is_drawn_as_it_is_enforced() -> None:
    drawn = re.findall(r"<code>(\w+)</code>", hooks.import_order())
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'^    "\(?(\w+)\)?",', text.partition("layers = [")[2].partition("]")[0], flags=re.MULTILINE)
    there = {path.stem for path in (ROOT / "src" / "vbtta").iterdir()}
    assert drawn == [layer for layer in layers if layer in there]
    assert drawn[0] == "cli"


def test_the_schema_names_what_a_policy_file_holds() -> None:
    schema = json.loads((DOCS / "reference" / "policy.schema.json").read_text(encoding="utf-8"))
    numbers = np.random.default_rng(0).normal(size=(20, 1, 1))
    policy = vbtta.fit_policy(vbtta.ViewPredictions(numbers), numbers[:, 0, 0], task="regression", guard=False)
    saved = {"format", "version", "vbtta", "checksum", *policy.to_dict()}
    assert set(schema["required"]) == saved == set(schema["properties"])
    table = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in table for key in saved)


# -- links ------------------------------------------------------------------------------------------------------------

_NO_LINKS = re.compile(r"^```.*?^```$|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    text = _NO_LINKS.sub("code", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)\s#]+)", text):
        assert (page.parent / target).exists(), target
    assert not re.search(r"\]\[", text)  # which only the site would resolve


def test_links_out_of_the_docs_lead_to_the_sites_pages() -> None:
    page = "[a](../method.md#b) [c](../../results/quality/README.md#d) ![e](../../results/quality/figure.svg)"
    expected = "[a](../method.md#b) [c](../results/quality/README.md#d) ![e](../results/quality/figure.svg)"
    assert hooks.site_links(page, "guides/x.md") == expected
    assert hooks.site_links("[`own`](../../examples/crowd_labels.py)", "guides/x.md") == "`own`"
    assert hooks.site_links("[r](../results/README.md)", "index.md") == "[r](results/README.md)"


# -- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


# -- guides that quote results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", result_pages.PAGES)
def test_pages_show_the_committed_results(page: str) -> None:
    """`python -m benchmarks.pages` would change nothing."""
    assert result_pages.rewritten(page) == (ROOT / page).read_text(encoding="utf-8")


def test_the_readme_table_has_the_values_of_the_rows() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line.startswith("| **vbtta, defaults** |")]
    sets = ("cifar10n-pretrained", "food101-pretrained", "utkface-pretrained", "mnist1000")
    for cell, name in zip(line.split("|")[2:6], sets, strict=True):
        [row] = [row for row in result_pages.compared()[name]["methods"] if row["method"] == "vbtta"]
        point, scale = ("mae", 1) if name.startswith("utkface") else ("accuracy", 100)
        first, nll = (float(part.strip(" *")) for part in cell.split(","))
        assert first == pytest.approx(scale * np.mean([trial[point] for trial in row["by_seed"]]), abs=0.051)
        assert nll == pytest.approx(np.mean([trial["nll"] for trial in row["by_seed"]]), abs=0.00051)


def test_what_the_guide_on_sizes_takes_from_the_learning_curve_is_there() -> None:
    curves = json.loads((ROOT / "results" / "learning_curve" / "results.json").read_text(encoding="utf-8"))["data_sets"]
    images, faces = curves["cifar10n-pretrained"], curves["utkface-pretrained"]

    def score(case: dict[str, Any], metric: str, size: int, each: int) -> float:
        rows = [row for row in case["rows"] if (row["instances"], row["labels_each"]) == (size, each)]
        return float(np.mean([row[metric] for row in rows]))

    for size in (25, 50, 100, 200, 500, 1000):
        for each, faces_each in ((1, 1), (3, 2)):
            assert score(images, "accuracy", size, each) > images["rules"]["original"]["accuracy"]
            assert score(images, "nll", size, each) < images["rules"]["original"]["nll"]
            assert score(faces, "mae", size, faces_each) < faces["rules"]["original"]["mae"]
            assert score(faces, "nll", size, faces_each) < faces["rules"]["original"]["nll"]
    gained = [score(images, "accuracy", size, 3) - images["rules"]["original"]["accuracy"] for size in (200, 1000)]
    assert gained[0] > 0.6 * gained[1]
    assert score(images, "nll", 25, 3) < score(images, "nll", 1000, 1)
    assert score(faces, "nll", 1000, 2) < score(faces, "nll", 1000, 1)


def test_the_page_of_the_learning_curve_is_made_of_its_numbers() -> None:
    folder = ROOT / "results" / "learning_curve"
    outcome = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    made = importlib.import_module("benchmarks.learning_curve").markdown(outcome)
    assert made == (folder / "README.md").read_text(encoding="utf-8")
    assert ("plus uncommitted changes" in made) == outcome["provenance"]["uncommitted_changes"]


def test_the_readme_installs_what_its_commands_need() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in text
    extras = {name for names in re.findall(r'"(?:vbtta|\.)\[([\w,]+)\]"', text) for name in names.split(",")}
    assert {"cli", "torch"} <= extras <= set(project["optional-dependencies"])


NEW_LINK = """
import sys
import numpy as np
from vbtta import ADVI, CategoricalLatent, CategoricalMixture, Policy, ViewPredictions, fit_policy
rng = np.random.default_rng(0)
truth = rng.normal(size=300)
label = (rng.random(300) < 1 - np.exp(-np.exp(truth))).astype(int)
difference = truth[:, None] + np.array([0.2, 0.3, 2.0]) * rng.normal(size=(300, 3))
views = ViewPredictions(np.stack([np.zeros((300, 3)), difference], axis=2), names=["identity", "a", "b"])
for model in (CategoricalMixture, CategoricalLatent):
    record = model(link="cloglog", noise="none")
    policy = fit_policy(views, label, task="classification", model=record, guard=False)
    assert (np.diff(policy.history.elbo) >= -1e-9).all()
    assert policy.weights[2] < 0.15
    policy.save("policy.json")
    assert np.array_equal(Policy.load("policy.json").predict(views).proba, policy.predict(views).proba)
record = CategoricalMixture(link="cloglog", noise="none")
engine = ADVI(steps=300, particles=2, learning_rate=0.05)
assert fit_policy(views, label, task="classification", model=record, engine=engine, guard=False).weights[2] < 0.25
"""


def test_the_diff_of_a_new_link_applies_and_works(tmp_path: Path) -> None:
    """The page that adds a link shows the whole change: EM and ADVI fit both models with it."""
    [diff] = re.findall(
        r"```diff\n(.*?\n)```", (DOCS / "contribute/extend.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert len(diff.splitlines()) < 60
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    subprocess.run([sys.executable, "-c", NEW_LINK], cwd=tmp_path, env=environment, check=True)
