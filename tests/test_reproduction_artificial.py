"""The items on artificial data, in their smallest profile: their parts, invariants, tables and figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproduction import artificial, clouds
from reproduction.artificial import Setting, collect, draw_inputs, make_sample, random_polynomial, train_all, views_of
from reproduction.items import ITEMS
from reproduction.records import Places, Row, judge, run_all
from reproduction.regression import SETS, error, fit_em
from reproduction.report import write_item, write_summary
from reproduction.running import Outcome
from reproduction.scoring import predicted_mean
from reproduction.tallies import number, select

TOYS = ("figure1", "figure3", "figure4", "table2", "table3", "figure5")
SMALL = Setting(instances=120, test_instances=100, epochs=5, width=16, folds=2)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    """Rows of every item, made once."""
    return {name: run_all(ITEMS[name], ITEMS[name].profiles["smoke"], Places()) for name in TOYS}


@pytest.mark.parametrize("name", TOYS)
def test_every_item_makes_its_table_and_figures(name: str, rows: dict[str, list[Row]], tmp_path: Path) -> None:
    item = ITEMS[name]
    facts = {"code": ["abc"], "seconds": 1.0}
    write_item(tmp_path / name, Outcome(name, "smoke", item.version, {}, facts, [{"trial": {}, "rows": rows[name]}]))
    write_summary(tmp_path)
    text = (tmp_path / name / "table.md").read_text()
    assert text.startswith(f"# {item.title}")
    assert "nan" not in text
    assert item.title in (tmp_path / "README.md").read_text()
    assert all(claim.verdict.startswith(("holds", "does not hold")) for claim in judge(item.claims, rows[name]))
    assert {path.stem for path in (tmp_path / name).glob("*.svg")} == set(item.figures(rows[name]))


@pytest.mark.parametrize("name", ["table2", "table3"])
def test_tables_have_every_strategy_reading_and_ablation(name: str, rows: dict[str, list[Row]]) -> None:
    config, table = ITEMS[name].profiles["smoke"], rows[name]
    for views in SETS:
        for reading in ("inductive", "transductive"):
            for draws in (config.draws, 1):
                for fitted_on in ("out-of-fold", "training"):
                    where: dict[str, Any] = {"views": views, "reading": reading, "draws": draws, "fitted_on": fitted_on}
                    assert len(select(table, method="uniform", **where)) == config.seeds
                    assert len(select(table, method="vb", engine="em", **where)) == config.seeds
            main = {"views": views, "reading": reading, "draws": config.draws, "fitted_on": "out-of-fold"}
            assert len(select(table, method="vb", engine="advi", **main)) == config.seeds
    for row in select(table, method="vb"):
        assert [key for key in row if key.startswith("mse_")] == [f"mse_{step}" for step in config.steps]
    for row in select(table, method="vb", reading="inductive"):
        assert np.allclose(row["first_weights"], 1 / len(SETS[str(row["views"])]), atol=1e-6)
        if row["engine"] != "advi":  # whose bound is estimated from draws
            assert np.all(np.diff(row["bound"]) > 0)


def test_uniform_rows_are_the_average_of_the_views(rows: dict[str, list[Row]]) -> None:
    config = ITEMS["table2"].profiles["smoke"]
    sample, views = _sample_and_views(config.setting, config.draws)
    for name, members in SETS.items():
        average = views.test.select(members).outputs.mean(axis=1)[:, 0]
        [row] = select(
            rows["table2"],
            method="uniform",
            views=name,
            draws=config.draws,
            reading="inductive",
            fitted_on="out-of-fold",
        )
        assert row["mse_1"] == pytest.approx(np.mean((average - sample.test_truth) ** 2), rel=1e-12)


def test_vb_starts_as_the_uniform_average_of_calibrated_views(rows: dict[str, list[Row]]) -> None:
    config = ITEMS["table2"].profiles["smoke"]
    sample, views = _sample_and_views(config.setting, config.draws)
    for name, members in SETS.items():
        test = views.test.select(members)
        policy = fit_em(views.out_of_fold.select(members), sample, config.steps[-1])
        first: Any = policy.at_step(1).predict(test)
        average = first.location.mean(axis=1)[:, 0]  # every view calibrated, equal weights
        assert np.allclose(predicted_mean(first), average, rtol=1e-10, atol=1e-12)
        [row] = select(
            rows["table2"],
            method="vb",
            engine="em",
            views=name,
            draws=config.draws,
            reading="inductive",
            fitted_on="out-of-fold",
        )
        assert row["mse_1"] == pytest.approx(error(average, sample.test_truth), rel=1e-9)
        assert np.all(np.diff(policy.history.elbo) > -1e-9 * abs(policy.elbo))


def test_figure5_starts_and_ends_where_table2_does(rows: dict[str, list[Row]]) -> None:
    config = ITEMS["figure5"].profiles["smoke"]
    assert replace(config.setting, distribution="gaussian") == ITEMS["table2"].profiles["smoke"].setting
    for name in SETS:
        [path] = select(rows["figure5"], distribution="gaussian", views=name)
        [row] = select(
            rows["table2"],
            method="vb",
            engine="em",
            views=name,
            draws=config.draws,
            reading="inductive",
            fitted_on="out-of-fold",
        )
        errors = path["mse"]
        assert isinstance(errors, list)
        assert errors[0] == pytest.approx(number(row, "mse_1"), abs=1e-6)
        assert errors[-1] == pytest.approx(number(row, f"mse_{config.steps}"), abs=1e-6)
        assert np.all(np.diff(path["bound"]) > -1e-3)


def test_views_depend_on_the_setting_alone() -> None:
    setting = replace(SMALL, epochs=1)
    first, second = (_sample_and_views(setting, 2)[1] for _ in range(2))
    other = _sample_and_views(replace(setting, seed=1), 2)[1]
    for first_views, two, three in zip(first[:3], second[:3], other[:3], strict=True):
        assert np.array_equal(first_views.outputs, two.outputs)
        assert not np.allclose(first_views.outputs, three.outputs)


def test_views_are_read_from_the_cache_as_they_were_written(tmp_path: Path) -> None:
    setting = replace(SMALL, epochs=1)
    sample = make_sample(setting)
    made = views_of(setting, sample, (2, 1), tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    read = views_of(setting, sample, (2, 1), tmp_path)
    assert len(kept) == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")} == kept
    for draws in (2, 1):
        assert made[draws].network_mse == read[draws].network_mse
        for written_views, two in zip(made[draws][:3], read[draws][:3], strict=True):
            assert written_views.names == two.names
            assert np.array_equal(written_views.outputs, two.outputs)


@pytest.mark.parametrize("distribution", ["gaussian", "gamma"])
def test_the_polynomial_has_the_scale_that_is_stated(distribution: str) -> None:
    rng = np.random.default_rng(3)
    values = [
        random_polynomial(rng, distribution, 40, 0.67)(draw_inputs(distribution, rng, 20_000, 40)) for _ in range(10)
    ]
    assert np.mean([value.mean() for value in values]) == pytest.approx(0, abs=0.01)
    assert np.mean([value.std() for value in values]) == pytest.approx(0.67, rel=0.02)


def test_a_share_of_the_instances_has_two_labels() -> None:
    sample = make_sample(replace(SMALL, instances=1000))
    assert np.bincount(sample.labels.labels_per_instance.astype(int), minlength=3).tolist() == [0, 700, 300]
    by_instance = sample.labels.continuous(1)[:, 0] - sample.truth[sample.labels.instance]
    first = np.unique(sample.labels.instance, return_index=True)[1]
    assert by_instance[first].std() == pytest.approx(SMALL.noise, rel=0.1)
    second = np.setdiff1d(np.arange(len(by_instance)), first)
    assert by_instance[second].std() == pytest.approx(np.hypot(SMALL.noise, SMALL.extra_noise), rel=0.15)


def test_networks_of_a_fold_have_not_seen_its_labels() -> None:
    setting = replace(SMALL, epochs=2)
    sample = make_sample(setting)
    networks = train_all(setting, sample)
    assert sorted(np.concatenate(networks.held_out)) == list(range(setting.instances))
    values = sample.labels.continuous(1).copy()
    values[np.isin(sample.labels.instance, networks.held_out[0])] += 5
    changed = sample._replace(labels=replace(sample.labels, value=values[:, 0]))
    again = train_all(setting, changed)
    inputs = sample.test_inputs
    assert np.array_equal(artificial.predict(networks.folds[0], inputs), artificial.predict(again.folds[0], inputs))
    assert not np.allclose(artificial.predict(networks.folds[1], inputs), artificial.predict(again.folds[1], inputs))
    assert not np.allclose(artificial.predict(networks.whole, inputs), artificial.predict(again.whole, inputs))


def test_unknown_distributions_are_refused() -> None:
    with pytest.raises(ValueError, match="'gaussian' or 'gamma'"):
        draw_inputs("cauchy", np.random.default_rng(0), 2, 2)


def test_mardia_moments() -> None:
    rng = np.random.default_rng(0)
    normal = rng.multivariate_normal([1, 2], [[2, 1], [1, 1]], size=50_000)
    assert clouds._mardia(normal) == pytest.approx((0, 0), abs=0.1)
    # Independent exponentials: each coordinate has squared skewness 4 and excess kurtosis 6.
    assert clouds._mardia(rng.exponential(size=(200_000, 2))) == pytest.approx((8, 12), rel=0.1)


def test_claims_follow_the_numbers() -> None:
    item = ITEMS["table3"]
    good, bad = (judge(item.claims, _made_up_rows(sign)) for sign in (1.0, -1.0))
    assert [good[place].verdict for place in (0, 2, 3)] == ["holds"] * 3
    assert [bad[place].verdict for place in (0, 2)] == ["does not hold"] * 2
    assert good[0].claim == "VB-TTA after 300 steps beats uniform TTA in every row (inductive)"
    assert [cell.paper for cell in item.cells(_made_up_rows(1.0))[:2]] == [0.176, 0.137]


def _made_up_rows(sign: float) -> list[Row]:
    """Errors that fall (or rise) by half, the more the more views there are; most of it by step 50."""
    table: list[Row] = []
    for seed in range(3):
        table.append({"seed": seed, "method": "network", "reading": "inductive", "mse_1": 0.3})
        for name, members in SETS.items():
            for reading in ("inductive", "transductive"):
                for draws in (32, 1):
                    for fitted_on in ("out-of-fold", "training"):
                        common: Row = {
                            "seed": seed,
                            "views": name,
                            "reading": reading,
                            "draws": draws,
                            "fitted_on": fitted_on,
                        }
                        end = 0.4 - sign * (0.1 + 0.01 * len(members)) + 0.001 * seed
                        table.append({**common, "method": "uniform", "mse_1": 0.4 + 0.001 * seed})
                        for engine in ("em", "advi", "em, offsets only"):
                            steps = {"mse_1": 0.4, "mse_50": end + 0.01 * sign, "mse_300": end}
                            table.append({**common, "method": "vb", "engine": engine, **steps})
    return table


def _sample_and_views(setting: Setting, draws: int) -> tuple[Any, Any]:
    sample = make_sample(setting)
    return sample, collect(setting, sample, train_all(setting, sample), draws)
