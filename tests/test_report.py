"""The page is self-contained, escaped, and works in a browser."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import warnings
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from vbtta import (
    CategoricalMixture,
    LabelSets,
    Policy,
    TTAModule,
    ViewPredictions,
    collect_dense,
    compare,
    conformalize,
    diagnose,
    fit_policy,
    fit_sequential,
    plotting,
    select_views,
)
from vbtta.augment import GaussianNoise, Identity, Zoom, flips
from vbtta.report import comparison_document, diagnosis_document, map_examples, render_report, write_report
from vbtta.report.documents import gain_in_words, headline, provenance, views_in_words
from vbtta.report.html import Drawing, quality_figures

EVIL = "<script>alert(1)</script>"
ODD = (
    '"><img src=x onerror=alert(2)> $\\frac{1}{2}$ & \x07\x1b[31m\x9b\u202e'
    + "W" * 200
    + "犬" * 60
    + "z\u0301\u0330" * 40
)
CLASSES = np.array(["cat", "</style><b>cow", "犬"])
CHECKS = """
<script>
addEventListener("load", () => {
  const table = document.querySelector("table.sortable");
  const column = () => [...table.tBodies[0].rows].map(row => Number(row.cells[2].dataset.value));
  const button = table.tHead.rows[0].cells[2].querySelector("button");
  button.click(); const up = column();
  button.click(); const down = column();
  const seen = [...document.querySelectorAll("svg, main img")].map(element => element.getBoundingClientRect());
  const outside = box => box.width < 20 || box.height < 20 || box.left < 0 || box.right > innerWidth + 1;
  parent.postMessage(JSON.stringify({
    up, down, width: innerWidth, page: document.documentElement.scrollWidth,
    figures: document.querySelectorAll("svg").length,
    hidden: seen.filter(outside).length,
    requests: performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).length,
    scripts: document.scripts.length, hover: document.querySelectorAll("svg g > title").length,
  }), "*");
});
</script>
"""
# A window is at least 500 pixels wide, a frame is as wide as it is told.
FRAME = """
<!DOCTYPE html><pre id="outcome"></pre>
<script>addEventListener("message", event => { document.getElementById("outcome").textContent = event.data; });</script>
<iframe src="report.html" style="width: WIDTHpx; height: 2000px; border: 0"></iframe>
"""


@pytest.fixture(scope="module")
def page() -> str:
    """A classification with names that try to break out, and every part a page can have."""
    rng = np.random.default_rng(2)
    truth = rng.integers(0, 3, 120)
    logits = 2.5 * np.eye(3)[truth][:, None] + rng.normal(size=(120, 3, 3)) * np.array([1.0, 1.2, 4.0])[:, None]
    views = ViewPredictions(logits, names=["identity", EVIL, ODD], classes=CLASSES)
    train, test = np.arange(60), np.arange(60, 120)
    answers = np.where(rng.random((60, 2)) < 0.8, truth[train, None], rng.integers(0, 3, (60, 2)))
    labels = LabelSets.from_array(CLASSES[answers], annotators=[EVIL, "bob"])
    policy = select_views(views.take(train), labels, budget=2, task="classification", model="mixture")
    methods = {EVIL: "uniform", "original": "original", "vbtta": policy}
    held_out = LabelSets.from_array(CLASSES[truth[test]])
    outcome = compare(
        views.take(train), labels, views.take(test), held_out, task="classification", methods=methods, resamples=100
    )
    return render_report(
        policy,
        predictions=views.take(train),
        labels=labels,
        test=(views.take(test), held_out),
        comparison=comparison_document(outcome),
        diagnosis=diagnosis_document(diagnose(policy, views.take(train), labels, refit=False)),
        images=rng.integers(0, 255, (60, 5, 5), dtype=np.uint8),
        story={"title": EVIL, "text": [ODD]},
    )


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_names_are_escaped_everywhere(page: str) -> None:
    assert EVIL not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 8
    elements = Elements(page).found
    assert sum(tag == "script" for tag, _ in elements) == 1
    assert not any(name.startswith("on") for _, attributes in elements for name in attributes)
    assert {attributes.get("src", "")[:14] for tag, attributes in elements if tag == "img"} == {"data:image/png"}  # type: ignore[index]
    assert sum(tag == "b" for tag, _ in elements) == 0
    assert not set(page) & set("\x07\x1b\x9b\u202e")


def test_only_the_script_of_the_page_may_run(page: str) -> None:
    policy = next(
        a["content"] or "" for tag, a in Elements(page).found if a.get("http-equiv") == "Content-Security-Policy"
    )
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert {"default-src 'none'", "base-uri 'none'", "form-action 'none'"} <= set(policy.split("; "))


def test_hostile_names_leave_room_for_the_bars() -> None:
    names = [ODD, "W" * 300, "犬" * 300, "\n" * 50, "x\u0301" * 300]
    figure = plotting.weights(names, np.full(5, 0.2), np.tile([0.1, 0.3], (5, 1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # not in matplotlib's own font
        figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.4
    assert figure.axes[0].get_position().height > 0.4


def test_nothing_is_fetched(page: str) -> None:
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "xlink:href", "data", "action", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_every_part_is_there(page: str) -> None:
    names = ["comparison", "weights", "quality", "annotators", "cost", "examples", "advice"]
    assert re.findall(r'id="(\w+)-section"', page) == [*names, "provenance"]  # in the order of a reader's questions
    ids = [attributes["id"] for _, attributes in Elements(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    svgs = [attributes for tag, attributes in Elements(page).found if tag == "svg"]
    assert len(svgs) == 5  # weights, cost curve, differences, reliability, annotators
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in svgs)
    assert "Expected calibration error" in page
    assert (
        page.index("explain the same labels")
        < page.index('id="quality-section"')
        < page.index("look like the observed")
    )
    assert page.count("data:image/png") == 4  # of the inputs that the views disagree most about
    assert "#010101" not in page  # the placeholders have become the page's colour
    assert "#020202" not in page


def test_a_policy_alone_makes_a_page(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=60)
    views = ViewPredictions(truth[:, None, None] + rng.normal(size=(60, 2, 1)), names=["identity", "flip"])
    policy = fit_policy(views, truth, task="regression", guard=False)
    policy.save(tmp_path / "policy.json")
    write_report(tmp_path / "report.html", Policy.load(tmp_path / "policy.json"))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "comparison-section" not in text
    whole = render_report(policy, predictions=views, labels=LabelSets.from_array(truth))
    assert "Interval coverage on calibration labels" in whole
    assert whole.count('class="example"') == 4
    assert "Judge it on labels that took no part in the fit" in whole
    assert "Log score of the heaviest views alone" in whole
    assert re.search(r"Intervals of 50.% hold [\d.]+.% of the calibration labels", whole)
    assert re.search(r"Input \d+: [-\d.]+ ± [\d.]+, labelled [-\d.]+<", whole)
    assert "identity" in views_in_words(policy)[0]


@pytest.mark.parametrize("task", ["regression", "classification", "multilabel"])
def test_labels_may_be_arrays(task: str) -> None:
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(60, 2, 1 if task == "regression" else 3))
    views = ViewPredictions(outputs, names=["identity", "flip"])
    wanted = outputs.mean(axis=1) + rng.gumbel(size=(60, outputs.shape[2]))
    labels = {"regression": wanted[:, 0], "classification": wanted.argmax(1), "multilabel": wanted > 0}[task]
    policy = fit_policy(views, labels, task=task, model="mixture", guard=False)
    sets = LabelSets.from_multilabel(labels) if task == "multilabel" else LabelSets.from_array(labels)
    here: dict[str, Any] = {"circumstances": provenance(policy, {})}  # one time of day
    assert render_report(policy, predictions=views, labels=labels, **here) == render_report(
        policy, predictions=views, labels=sets, **here
    )
    several = np.stack([labels] * 3, axis=1)
    if task == "classification":
        noisy = fit_policy(views, LabelSets.from_array(several, annotators="columns"), task=task, guard=False)
        assert "annotator_2" in render_report(noisy, predictions=views, labels=several)
    assert render_report(policy, test=(views, labels), **here) == render_report(policy, test=(views, sets), **here)


def test_annotators_who_guess_are_named_without_a_diagnosis_too() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(3, size=(300, 1))
    views = ViewPredictions(2 * np.eye(3)[truth] + rng.normal(size=(300, 1, 3)), names=["identity"])
    votes = np.where(rng.random((300, 3)) < [0.9, 0.8, 0.0], truth, rng.integers(3, size=(300, 3)))
    labels = LabelSets.from_array(votes, annotators=["ann", "bob", "spam"])
    policy = fit_policy(views, labels, task="classification", model="mixture", guard=False)
    assert "No better than guessing, by their intervals of accuracy: spam." in render_report(policy)
    page = render_report(policy, predictions=views)
    least_certain = policy.predict(views).entropy.argmax()  # a single view does not disagree with itself
    assert page.index(f"Input {least_certain}:") == page.index("Input ")


def test_one_rule_for_kept_views_and_the_guards_verdict_is_there() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=2000)
    outputs = truth[:, None] + rng.normal(size=(2000, 3)) * [0.5, 7.0, 0.5]
    outputs[:, 2] = -outputs[:, 2]
    views = ViewPredictions(outputs[:, :, None], names=["identity", "poor", "negative"])
    policy = fit_policy(views, truth, task="regression", model="latent")
    heaviest, light, lost = np.sort(policy.weights)[::-1]
    assert heaviest > 0.99
    assert 0 == lost < light < 0.01
    first, little, none = views_in_words(policy)
    (guard,) = headline(policy)
    assert first.startswith("2 of 3 views are kept")
    assert little == "Of little weight (below 1 %): poor."
    assert none == "Suppressed (no weight): negative."
    assert diagnose(policy, views, refit=False).summary().startswith("2 of 3 views are kept")
    page = render_report(policy, predictions=views)
    assert guard == f"Against the network alone, by cross-validation: {policy.guard.reason}."
    assert guard.replace("+-", "±") in unescape(page)
    assert page.count('class="idle"') == 4 * 2  # of every example, those of less than 1 %


def test_labels_are_compared_with_what_their_annotators_make_of_the_truth() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=400)
    views = ViewPredictions(truth[:, None, None] + 0.3 * rng.normal(size=(400, 3, 1)), names=["identity", "a", "b"])
    estimates = truth[:, None] + [-1, 0, 1] + rng.normal(size=(400, 3)) * [0.3, 0.6, 1.5]
    labels = LabelSets.from_array(estimates, annotators="columns")
    policy = fit_policy(views, labels, task="regression", model="latent", guard=False)
    drawing = quality_figures(policy, views, labels, "calibration labels")["coverage"]
    assert "moved by the annotator's bias and widened" in drawing.caption
    assert _shown(drawing, r"of 90 % hold ([\d.]+) %") == pytest.approx(90, abs=2)
    clean = quality_figures(policy, views, LabelSets.from_array(truth), "test labels")["coverage"]
    assert "annotator" not in clean.caption
    assert "on test labels, taken as the truth" in clean.caption


def test_confidence_in_a_label_is_that_of_its_annotator() -> None:
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 3, size=600)
    logits = rng.normal(size=(600, 2, 3)) + 3 * np.eye(3)[truth][:, None]
    views = ViewPredictions(logits, names=["identity", "a"], ids=np.arange(600))
    wrong = rng.random((600, 2)) < [0.05, 0.5]
    votes = np.where(wrong, (truth[:, None] + rng.integers(1, 3, size=(600, 2))) % 3, truth[:, None])
    labels = LabelSets.from_array(votes, annotators="columns")
    policy = fit_policy(views, labels, task="classification", model="latent", guard=False)
    drawing = quality_figures(policy, views, labels, "calibration labels")["reliability"]
    confidence, right = (_shown(drawing, rf"{words} ([\d.]+) %") for words in ("a probability of", "is given in"))
    assert confidence == pytest.approx(right, abs=3)
    assert confidence < 80  # half of the labels are one annotator's, who is wrong every other time
    assert "the annotator's estimated error rates" in drawing.caption


def _shown(drawing: Drawing, pattern: str) -> float:
    """A number from the words for those who cannot see a figure."""
    match = re.search(pattern, drawing.svg)
    assert match is not None
    return float(match.group(1))


def test_words_say_whether_a_gain_may_be_chance() -> None:
    record = {"accuracy": 0.9, "nll": 0.3, "accuracy_minus_original": 0.02, "nll_minus_original": -0.1}
    record |= {"accuracy_minus_original_low": -0.01, "accuracy_minus_original_high": 0.05}
    record |= {"nll_minus_original_low": -0.2, "nll_minus_original_high": -0.05}
    methods = [{"method": "vbtta", **record}, {"method": "original", "accuracy": 0.88, "nll": 0.4}]
    first, second = gain_in_words({"task": "classification", "level": 0.95, "methods": methods})
    assert "90.0 % with the policy, 88.0 % without augmentation" in first
    assert "+2.0 points" in first
    assert "may be chance" in first
    assert "beyond chance" in second
    assert gain_in_words({"task": "classification", "level": 0.95, "methods": methods[1:]}) == []


def test_the_template_ships_with_the_package() -> None:
    from importlib.resources import files

    assert files("vbtta.report").joinpath("templates/report.html").is_file()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_works_in_a_browser(page: str, width: int, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        if os.environ.get("VBTTA_NEEDS_BROWSER"):
            pytest.fail("no browser found: install chromium (VBTTA_NEEDS_BROWSER is set)")
        pytest.skip("no browser is installed (Debian: apt-get install chromium)")
    check = CHECKS.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(check.encode()).digest()).decode()
    page = page.replace("script-src '", f"script-src 'sha256-{digest}' '", 1)
    (tmp_path / "report.html").write_text(page.replace("</body>", f"{CHECKS}</body>"), encoding="utf-8")
    path = tmp_path / "frame.html"
    path.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    options = f"--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size={width + 100},2000"
    options += " --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
    command = [browser, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    match = re.search(r'<pre id="outcome">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stdout
    outcome: dict[str, Any] = json.loads(unescape(match.group(1)))
    assert outcome["width"] == width
    assert outcome["page"] <= width
    assert outcome["figures"] == 5
    assert outcome["hidden"] == 0
    assert outcome["broken"] == 0
    assert outcome["requests"] == []
    assert outcome["scripts"] == 2  # the page's own and the one that checks
    assert outcome["hover"] == 3
    assert outcome["up"] == sorted(outcome["up"])
    assert outcome["down"] == sorted(outcome["up"], reverse=True)
    assert len(set(outcome["up"])) > 1


def test_the_worst_and_the_best_maps_are_shown() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    clean = rng.integers(0, 3, size=(6, 3, 4)).repeat(4, 1).repeat(4, 2)
    noise = np.array([0.1, 2.0, 0.2, 0.3, 0.2, 0.2])[:, None, None, None]
    images = torch.tensor(np.moveaxis(4.0 * np.eye(3)[clean], -1, 1) + noise * rng.normal(size=(6, 3, 12, 16)))
    network, views = torch.nn.Identity(), flips()
    predictions, labels = collect_dense(network, images, views, clean, positions=50)
    policy = fit_policy(predictions, labels, task="classification", guard=False)
    masks = clean.copy()
    masks[0, 0, 0] = 255
    names = [f"<scan {i}>" for i in range(6)]
    shown = map_examples(TTAModule(network, views, policy), images, masks, names=names, count=1, ignore=255)
    assert shown[0].name == "<scan 1>"
    assert shown[0].dice < shown[1].dice
    panels = shown[0].panels
    assert list(panels)[:4] == ["input", "truth", "prediction", "entropy"]
    assert set(list(panels)[4:]) == set(policy.used_names)
    assert {panel.shape[:2] for panel in panels.values()} == {(12, 16)}
    right = (panels["truth"] == panels["prediction"]).all(axis=-1)
    assert panels["entropy"][~right].mean() > panels["entropy"][right].mean()
    page = render_report(policy, maps=shown)
    assert "&lt;scan 1&gt;: Dice" in page
    assert page.count("data:image/png") == 2 * len(panels)
    assert "maps-section" not in render_report(policy)
    volume = map_examples(TTAModule(network, views, policy), images[:, :, None], masks[:, None], count=1, ignore=255)
    assert volume[0].panels["truth"].shape == (12, 16, 3)


def test_gates_stages_and_sets_have_pictures() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, size=1200)
    strength = np.where(rng.random(1200) < 0.7, 9.0, 1.0)[:, None, None]
    views = ViewPredictions(strength * np.eye(3)[truth][:, None] + rng.normal(size=(1200, 3, 3)), names=[EVIL, *"ab"])
    parts = [(views.take(rows), LabelSets.from_array(truth[rows])) for rows in np.split(np.arange(1200), [600, 900])]
    sequential = fit_sequential(*parts[0], task="classification", model="latent", tolerance=0.1)
    page = render_report(conformalize(sequential, *parts[1], level=[0.9, 0.5]), predictions=parts[0][0], test=parts[2])
    assert "an input stops early by its expected gain: at most" in page
    assert "Sets of classes (lac) hold the label with probability 0.9 and 0.5" in page
    assert all(f'id="{name}-' in page for name in ("cost-curve", "set-sizes"))
    low, high = re.findall(r"; by class from ([\d.]+)\D+%.* to ([\d.]+)\D+%", page)[0]
    assert 50 < float(low) <= float(high) <= 100
    assert f"of {len(sequential.names)} passes on average" in page
    gated = fit_policy(*parts[0], task="classification", model=CategoricalMixture(weights="input"), guard=False)
    page = render_report(gated, predictions=parts[0][0], labels=parts[0][1])
    assert 'id="gate-' in page
    assert EVIL not in page
    assert "its average is in brackets" in page
    average = {f"{weight:.3f}" for weight in gated.weights}
    shown = re.findall(r"weight ([\d.]+) \(average ([\d.]+)\)", page)
    assert {mean for _, mean in shown} == average
    assert len({here for here, _ in shown}) > len(average)  # weights of the inputs themselves
    own = [float(here) for here, _ in shown]
    assert all(own[at : at + 3] == sorted(own[at : at + 3], reverse=True) for at in range(0, len(own), 3))
    numbers = ViewPredictions(rng.normal(size=(400, 2, 1)), names=["identity", "a"])
    y = LabelSets.from_array(numbers.outputs[:, 0, 0] + rng.normal(size=400))
    halves = [(numbers.take(rows), y.take(rows)) for rows in (np.arange(200), np.arange(200, 400))]
    policy = fit_policy(*halves[0], task="regression", model="latent", guard=False)
    conformal = conformalize(policy, *halves[1], level=[0.5, 0.9])
    assert 'id="interval-coverage-' in render_report(conformal, test=halves[1])


def test_maps_of_views_are_grey_where_they_see_nothing() -> None:
    torch = pytest.importorskip("torch")
    images = torch.rand(4, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    masks, network = images.argmax(1).numpy(), torch.nn.Conv2d(3, 3, 1)
    views = [Identity(), Zoom(2.0), GaussianNoise(0.1)]
    model = CategoricalMixture(concentration=1000.0)
    sample = collect_dense(network, images, views, masks, positions=20)
    policy = fit_policy(*sample, task="classification", model=model, guard=False)
    panels = map_examples(TTAModule(network, views, policy), images.double(), masks, count=1)[0].panels
    assert list(panels)[4:] == ["identity", "zoom(2)", "noise(0.1)"]
    unseen = (panels["zoom(2)"] == 160).all(axis=-1)
    assert unseen.sum() == 12 * 16 - 6 * 8
    assert not (panels["noise(0.1)"] == 160).all(axis=-1).any()


def test_many_views_annotators_classes_and_outputs_are_cut() -> None:
    rng = np.random.default_rng(0)
    views = ViewPredictions(rng.normal(size=(60, 50, 1)), names=["identity", *(f"v{k}" for k in range(49))])
    policy = fit_policy(views, views.outputs[:, 0, 0], task="regression", model="latent", guard=False)
    assert "Weight of the 40 heaviest of 50 views" in render_report(policy)

    truth = rng.integers(0, 1000, size=60)
    names = np.array([f"class {c} of a thousand" for c in range(1000)])
    views = ViewPredictions(
        6 * np.eye(1000)[truth][:, None] + rng.normal(size=(60, 2, 1000)), names=["identity", "flip"], classes=names
    )
    policy = fit_policy(views, names[truth], task="classification", model="mixture", guard=False)
    page = render_report(policy, predictions=views, labels=LabelSets.from_array(names[truth]))
    assert page.count(" of a thousand") < 60
    assert len(page) < 200_000

    truth, skill = rng.integers(0, 3, size=600), np.linspace(0.4, 0.95, 100)
    who = np.stack([rng.permutation(100)[:8] for _ in range(600)])  # (N, 8)
    answers = np.where(rng.random(who.shape) < skill[who], truth[:, None], rng.integers(0, 3, who.shape))
    table = {"instance": np.repeat(np.arange(600), 8), "annotator": [f"p{u:03d}" for u in who.ravel()]}
    labels = LabelSets.from_table(pd.DataFrame({**table, "label": answers.ravel()}))
    views = ViewPredictions(2 * np.eye(3)[truth][:, None] + rng.normal(size=(600, 2, 3)), names=["identity", "flip"])
    policy = fit_policy(views, labels, task="classification", model="mixture", guard=False)
    shown = render_report(policy, labels=labels).partition("annotators-section")[2].partition("</table>")[0]
    assert [re.search(rf'<th scope="row" data-value="p{u:03d}"', shown) is None for u in range(100)] == [False] * 100
    count = int((who == 7).sum())
    assert f'data-value="p007">p007</th><td data-value="{count}.0">{count}</td>' in shown
    page = render_report(policy)
    assert "the 15 best and the 15 worst of 100 annotators" in page
    worst = re.findall(r"(p\d\d\d) \d+", page.partition("100 annotators, the worst first: ")[2].partition("<")[0])
    assert worst == [policy.annotators.names[u] for u in np.argsort(policy.annotators.accuracy, kind="stable")[:8]]
    assert "and 92 more" in page

    numbers = ViewPredictions(rng.normal(size=(80, 2, 30)), names=["identity", "flip"])
    labels = LabelSets.from_array(numbers.outputs[:, :1] + 0.1 * rng.normal(size=(80, 1, 30)))
    policy = fit_policy(numbers, labels, task="regression", model="mixture", guard=False)
    headings = re.findall(r"<h3>(.+?)</h3>", render_report(policy, predictions=numbers, labels=labels))
    assert len(headings) == 4
    assert all(heading.count("and 26 more") == 2 for heading in headings)  # predicted, and labelled
