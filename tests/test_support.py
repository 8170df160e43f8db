"""Small parts that everything uses: files that are whole or not there, and values in messages."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from vbtta import (
    CategoricalMixture,
    LabelSets,
    ViewPredictions,
    compare,
    diagnose,
    fit_baseline,
    fit_policy,
    fit_sequential,
    metrics,
)
from vbtta._support.checks import positive, whole_number
from vbtta._support.files import atomic_path


@pytest.mark.parametrize("name", ["a" * 250, "ä" * 120])
def test_any_name_that_a_file_may_have_can_be_written(name: str, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with atomic_path(tmp_path / name) as temporary:
            temporary.write_text("whole")
    finally:
        os.umask(mask)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_failures_name_the_target_and_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(FileNotFoundError) as caught, atomic_path(target) as temporary:
        temporary.unlink()
    assert caught.value.filename == str(target)
    with pytest.raises(FileNotFoundError) as caught, atomic_path(target):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other")
    assert list(tmp_path.iterdir()) == []


def test_messages_show_plain_values() -> None:
    with pytest.raises(ValueError, match=r"got -1.0$"):
        positive(scale=np.float64(-1))
    with pytest.raises(ValueError, match=r"got 2.5$"):
        whole_number("steps", np.float64(2.5), 1)
    views = ViewPredictions(np.zeros((2, 1, 1)), names=["identity"])
    with pytest.raises(ValueError, match=r"views \['flip'\] are not"):
        views.select(np.array(["flip"]))
    with pytest.raises(ValueError, match=r"got 'cow'$"):
        LabelSets.from_array(["1.0", "cow"]).continuous(1)


@pytest.mark.filterwarnings("ignore:test_predictions hold rows")
def test_control_characters_of_names_are_shown_escaped() -> None:
    rng = np.random.default_rng(0)
    red, truth = "\x1b[31mred", rng.integers(0, 2, 60)
    logits = 2 * np.eye(2)[truth][:, None] + rng.normal(size=(60, 2, 2))
    names = np.array(["plain", red])
    views = ViewPredictions(logits, names=["identity", red], classes=names, ids=[f"{red}{i}" for i in range(60)])
    labels = LabelSets.from_array(np.stack([names[truth]] * 2, axis=1), annotators=[red, "bob"])
    policy = fit_policy(views, labels, task="classification", model="mixture")
    comparison = compare(views, labels, views, labels, methods=["original"], task="classification")
    for shown in (views, labels, policy, policy.guard, policy.annotators, policy.predict(views), comparison):
        assert "\x1b" not in f"{shown!r} {shown}"
    assert "\x1b" not in diagnose(policy, views, labels, refit=False).summary()
    for wrong in (
        lambda: views.select(["x"]),
        lambda: policy.predict(views.select(["identity"])),
        lambda: views.align(LabelSets.from_table([f"{red}x"], ["plain"])),
        lambda: views.align(np.full(60, f"{red}x")).categorical(2, views.classes),
        lambda: views.concat(views),
    ):
        with pytest.raises(ValueError, match="31mred") as error:
            wrong()
        assert "\x1b" not in str(error.value)


def test_arrays_in_the_place_of_predictions_are_named() -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(2, size=20)
    views = ViewPredictions(rng.normal(size=(20, 2, 2)), names=["identity", "flip"])
    policy, array = fit_policy(views, label, task="classification", guard=False), views.outputs
    staged = fit_sequential(views, label, task="classification", tolerance=5.0)
    for wrong in (
        lambda: policy.score(array, label),
        lambda: policy.consensus(array, label),
        lambda: staged.score(array, label),
        lambda: fit_baseline("uniform", array, label, task="classification"),
        lambda: diagnose(policy, array, label),
        lambda: compare(array, label, views, label, task="classification"),
    ):
        with pytest.raises(TypeError, match="predictions must be ViewPredictions; got ndarray"):
            wrong()


def test_options_of_the_wrong_kind_are_named() -> None:
    views = ViewPredictions(np.zeros((6, 2, 1)), names=["identity", "flip"])
    prediction = fit_policy(views, np.arange(6.0), task="regression", model="latent", guard=False).predict(views)
    for wrong, message in (
        (lambda: whole_number("draws", np.timedelta64(3, "D"), 1), "draws must be a whole number"),
        (lambda: prediction.interval("a"), "level must be a number between"),
        (lambda: prediction.quantile([0.5, [0.1]]), "q must be numbers"),
        (lambda: fit_policy(views, np.zeros(6), task="regression", guard=np.zeros(2)), "guard must be one of"),
        (lambda: fit_policy(views, np.zeros(6), task="regression", engine=np.zeros(2)), "engine must be 'auto'"),
        (lambda: CategoricalMixture(confusion_prior=3.0), "confusion_prior must be two numbers; got 3.0"),
        (lambda: metrics.accuracy([[0], [1, 2]], np.full((2, 2), 0.5)), "y has rows of different lengths"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            wrong()
        assert "\n" not in str(caught.value)
