"""Experiments on images, in the smoke profile: structure of the rows, and what must be true of them."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from reproduction import age_paths, items, table1, table4
from reproduction.extensions import CORRUPTIONS, corrupt
from reproduction.networks import SETUPS, STRATEGIES, NetworkConfig, paper_views
from reproduction.records import PROFILES, DataMissing, Places, judge, run_all
from reproduction.samples import SampleConfig, draw_sample
from reproduction.scoring import fit_steps, scores, uniform
from reproduction.tallies import Spread, agreement, paired, select
from vbtta import CategoricalMixture, GaussianMixture

ITEMS = {name: items.ITEMS[name] for name in ("table1", "table4", "figure6", "figure7", "extensions", "input_weights")}
COMBINATIONS = [
    "+".join(letters)
    for size in range(1, 6)
    for letters in combinations("ABCDE", size)
    if size == 1 or letters[0] == "A"  # the paper lists only combinations with A
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(None, tmp_path_factory.mktemp("networks"), 1)


@pytest.fixture(scope="module")
def rows(places: Places) -> dict[str, list]:
    """All items in the smoke profile; networks are shared through the cache, as in a real run."""
    return {name: run_all(item, item.profiles["smoke"], places) for name, item in ITEMS.items()}


class TestEveryItem:
    @pytest.mark.parametrize("name", ITEMS)
    def test_rows_are_json_and_words_come_from_them_alone(self, name: str, rows: dict[str, list]):
        item, config = ITEMS[name], ITEMS[name].profiles["smoke"]
        again = json.loads(json.dumps(rows[name], allow_nan=False))
        assert again == rows[name]
        assert all(row["synthetic"] for row in again)
        text = item.table(again, config)
        assert "made-up" in text.lower()  # a smoke result says what it is
        assert all(all(verdict) for verdict in judge(item.claims, again))
        assert all("not comparable" in cell.verdict for cell in item.cells(again))

    @pytest.mark.parametrize("name", ITEMS)
    def test_profiles_differ_in_their_trials_only_by_fields(self, name: str):
        item = ITEMS[name]
        assert set(item.profiles) >= set(PROFILES)
        for config in item.profiles.values():
            trials = item.trials(config)
            assert len(set(map(repr, trials))) == len(trials) >= 1

    def test_missing_data_is_said(self):
        trial = replace(ITEMS["table1"].profiles["smoke"].trial, synthetic=False)
        with pytest.raises(DataMissing, match="mnist"):
            ITEMS["table1"].run_trial(trial, Places())

    def test_figures_have_a_curve_for_each_strategy(self, rows: dict[str, list]):
        assert [len(axes.lines) for axes in ITEMS["figure6"].figures(rows["figure6"])["figure6"].axes] == [3, 3]
        assert [len(axes.lines) for axes in ITEMS["figure7"].figures(rows["figure7"])["figure7"].axes] == [3]
        assert [len(axes.lines) for axes in ITEMS["extensions"].figures(rows["extensions"])["shift"].axes] == [5, 5, 5]


class TestUniformRows:
    @pytest.mark.parametrize("name", ["cifar10n", "utkface"])
    def test_are_the_average_of_the_views(self, name: str, places: Places, rows: dict[str, list]):
        views = paper_views(SETUPS["smoke"][name], places)
        names = STRATEGIES["Mixup + CutMix"]
        outputs = views.test.select(names).outputs.astype(np.float64)  # (N, K, C)
        [row] = select(
            rows["table4"], data_set=name, seed=0, method="uniform", strategy="Mixup + CutMix", identity=False
        )
        if name == "utkface":
            expected = np.abs(outputs.mean(axis=1)[:, 0] - views.sample.truth).mean()
            assert row["mae"] == pytest.approx(expected, rel=1e-9)
        else:
            proba = np.exp(outputs - outputs.max(axis=2, keepdims=True))
            proba /= proba.sum(axis=2, keepdims=True)
            expected = np.mean(proba.mean(axis=1).argmax(axis=1) == views.sample.truth)
            assert row["accuracy"] == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("name", ["cifar10n", "utkface"])
    def test_equal_the_first_step_for_the_same_calibration(self, name: str, places: Places):
        views = paper_views(SETUPS["smoke"][name], places)
        calibration, test = views.chosen(STRATEGIES["Mixup"])
        task, labels = views.sample.task, views.sample.labels
        model = CategoricalMixture(calibrate=False) if task == "classification" else GaussianMixture()
        first = fit_steps(calibration, labels, task, model, 5).at_step(1)
        np.testing.assert_allclose(first.weights, 1 / 3)
        if task == "classification":
            expected = scores(uniform(calibration, labels, test, task), views.sample.truth)
            assert scores(first.predict(test), views.sample.truth) == pytest.approx(expected)
        else:
            # The mixture's mean with equal weights is the average of its calibrated views.
            components = first.predict(test)
            np.testing.assert_allclose(components.mean, components.location.mean(axis=1))


class TestOptimisation:
    def test_bound_never_falls(self, rows: dict[str, list]):
        fitted = [row for row in rows["table4"] if "least_rise" in row]
        assert len(fitted) == 3 * 2 * 3 * 3 * 2  # data sets, with identity, strategies, models, first and last step
        assert min(row["least_rise"] for row in fitted) > -1e-7
        for row in rows["figure7"]:
            assert np.diff(row["bound"]).min() > -1e-7

    def test_weights_start_uniform_and_stay_on_the_simplex(self, rows: dict[str, list]):
        for row in rows["table4"]:
            if "weights" in row:
                assert sum(row["weights"]) == pytest.approx(1, abs=1e-5)
                if row["method"].startswith("mixture") and not row["last"]:
                    assert np.ptp(row["weights"]) < 1e-5

    def test_figures_follow_table4(self, rows: dict[str, list]):
        """The same network, views and updates: the curve passes the table's number at the table's step."""
        [path] = select(rows["figure6"], seed=0, strategy="CutMix")
        [first, last] = select(
            rows["table4"], data_set="utkface", seed=0, method="mixture", strategy="CutMix", identity=False
        )
        assert path["mae"][0] == pytest.approx(first["mae"], abs=1e-6)  # type: ignore[index]
        assert path["mae"][int(last["step"]) - 1] == pytest.approx(last["mae"], abs=1e-6)  # type: ignore[index]
        assert rows["figure6"] == rows["figure7"]  # two pictures of the same runs


class TestTable1:
    def test_has_the_papers_rows_and_two_fits(self, rows: dict[str, list]):
        assert list(table1.PAPER) == COMBINATIONS
        of_one_seed = select(rows["table1"], seed=0)
        assert len(of_one_seed) == 2 * 20 + 2 * 2 * 2  # draws; where fitted, pools, first and last step
        text = ITEMS["table1"].table(rows["table1"], ITEMS["table1"].profiles["smoke"])
        assert all(f"| {combination}" in text for combination in COMBINATIONS)

    def test_weights_start_uniform(self, rows: dict[str, list]):
        first = select(rows["table1"], model="mixture", step=1)
        assert len(first) == 2 * 2  # seeds; where fitted
        assert max(np.ptp(row["weights"]) for row in first) < 1e-6

    def test_deterministic_views_do_not_depend_on_draws(self, rows: dict[str, list]):
        many, once = (
            select(rows["table1"], seed=0, views="A+B+C", model="uniform", draws=draws)[0]["accuracy"]
            for draws in (ITEMS["table1"].profiles["smoke"].trial.draws, 1)
        )
        assert many == once

    def test_out_of_fold_networks_have_not_seen_the_image(self):
        """A network knows its own images; through out-of-fold networks they look as new as any other."""
        trial = replace(ITEMS["table1"].profiles["smoke"].trial, epochs=25)
        rng = np.random.default_rng(0)
        images = rng.integers(256, size=(40, 1, 28, 28), dtype=np.uint8)  # nothing to learn but by heart
        targets = np.arange(40) % 10
        seen = table1._collect(table1._network(trial, images, targets), table1._views(trial, images), images, 1, 0)
        unseen = table1._out_of_fold(trial, images, targets)
        assert np.mean(seen.outputs[:, 0].argmax(axis=1) == targets) > 0.9
        assert np.mean(unseen.outputs[:, 0].argmax(axis=1) == targets) < 0.5


class TestTable4:
    def test_paper_numbers_cover_every_strategy(self):
        assert set(table4.PAPER) == {(method, name) for method in ("uniform", "mixture") for name in STRATEGIES}

    def test_a_repeated_trial_gives_the_same_rows_without_the_cache(self, rows: dict[str, list]):
        trial = next(
            t for t in ITEMS["table4"].trials(ITEMS["table4"].profiles["smoke"]) if t.setup.sample.data_set == "utkface"
        )
        again = ITEMS["table4"].run_trial(trial, Places())
        for before, after in zip(select(rows["table4"], data_set="utkface"), again, strict=True):
            for key in ("mae", "bound"):
                if key in before:
                    assert after[key] == pytest.approx(before[key], rel=1e-7)


class TestExtensions:
    def test_both_parts_are_there(self, rows: dict[str, list]):
        table = rows["extensions"]
        assert len(select(table, part="inference")) == 6
        assert len(select(table, part="shift")) == 5 * (1 + 3 * len(CORRUPTIONS))
        [reference] = select(table, method="EM, normal")
        assert reference["from_em"] == 0

    def test_clean_and_shifted_weights_agree_without_a_shift(self, rows: dict[str, list]):
        clean, shifted = (
            select(rows["extensions"], corruption="none", method=f"weights of {which} images")[0]["weights"]
            for which in ("clean", "shifted")
        )
        assert clean == shifted


class TestCorruptions:
    def test_strength_orders_the_damage(self):
        rng = np.random.default_rng(0)
        images = np.clip(128 + 50 * rng.standard_normal((4, 3, 12, 12)), 0, 255).astype(np.uint8)
        for kind in CORRUPTIONS:
            damage = [np.abs(corrupt(images, kind, strength).astype(float) - images).mean() for strength in (1, 2, 3)]
            assert 0 < damage[0] < damage[1] < damage[2]

    def test_none_is_the_same_and_nonsense_is_refused(self):
        images = np.zeros((1, 3, 4, 4), dtype=np.uint8)
        assert corrupt(images, "none", 0) is images
        with pytest.raises(ValueError, match="strength 1, 2 or 3"):
            corrupt(images, "noise", 4)


class TestSamples:
    def test_parts_do_not_overlap_and_seed_decides(self):
        config = SampleConfig("cifar10n", 3, 30, 12, 10, size=8, synthetic=True)
        sample = draw_sample(config, Places())
        images, two = ({image.tobytes() for image in part} for part in (sample.images, sample.calibration))
        assert len(images) == 30
        assert len(two) == 12
        assert not images & two
        assert sample.labels.shape == (12, 3)
        np.testing.assert_array_equal(draw_sample(config, Places()).images, sample.images)
        assert not np.array_equal(draw_sample(replace(config, seed=4), Places()).images, sample.images)

    def test_second_age_has_the_stated_noise(self):
        sample = draw_sample(SampleConfig("utkface", 0, 5, 4000, 5, size=4, synthetic=True), Places())
        assert np.std(sample.labels[:, 1] - sample.labels[:, 0]) == pytest.approx(5, rel=0.05)

    def test_a_width_that_crashes_is_refused(self):
        with pytest.raises(ValueError, match="at least 8"):
            NetworkConfig(width=4)


class TestTallies:
    def test_agreement_counts_both_spreads(self):
        assert agreement(Spread(0.5, 0.1), 0.6, 0.0, larger_is_better=True).startswith("agrees")
        assert agreement(Spread(0.5, 0.01), 0.6, 0.01, larger_is_better=True) == "worse"
        assert agreement(Spread(5.0, 0.01), 6.0, 0.01, larger_is_better=False) == "better"

    def test_paired_differences_need_the_same_trials(self):
        with pytest.raises(ValueError, match="zip"):
            paired([{"x": 1.0}], [], "x")

    def test_bands_take_one_list_a_seed(self, rows: dict[str, list]):
        assert age_paths._along(rows["figure6"], "Mixup", "mae").shape == (2, 12)
