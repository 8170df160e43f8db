"""Label sets: every way in leads to the same labels, and nonsense is named."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbtta import LabelSets, ViewPredictions, fit_policy


def test_array_table_and_frame_agree() -> None:
    Y = np.array([[1.0, np.nan, 2.0], [np.nan, np.nan, np.nan], [3.0, 4.0, np.nan]])
    wide = LabelSets.from_array(Y)
    frame = pd.DataFrame({"row": [2, 0, 0, 2], "y": [3.0, 1.0, 2.0, 4.0]})
    long = LabelSets.from_table(frame["row"], frame["y"], n_instances=3)
    for labels in (wide, long):
        assert labels.instance.tolist() == [0, 0, 2, 2]
        assert labels.value.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert labels.labelled.tolist() == [0, 2]
    assert wide.total == 4


@pytest.mark.parametrize("gap", [None, float("nan"), pd.NA])
def test_gaps_of_every_kind(gap: object) -> None:
    labels = LabelSets.from_array(np.array([["cat", gap], ["dog", "cat"]], dtype=object))
    assert labels.value.tolist() == ["cat", "dog", "cat"]
    assert LabelSets.from_array(pd.DataFrame({"a": [1, 2], "b": pd.array([3, None], dtype="Int64")})).total == 3


def test_masked_and_missing_value() -> None:
    masked = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
    assert LabelSets.from_array(masked).instance.tolist() == [0, 2]
    assert LabelSets.from_array([0, -1, 1], missing=-1).instance.tolist() == [0, 2]
    assert LabelSets.from_array(["a", "", "b"], missing="").value.tolist() == ["a", "b"]


def test_annotators() -> None:
    Y = [[1.0, 2.0], [3.0, np.nan]]
    assert LabelSets.from_array(Y).annotator is None
    assert LabelSets.from_array(Y, annotators="columns").annotator_names == ("annotator_0", "annotator_1")
    named = LabelSets.from_array(Y, annotators=["ann", "bob"])
    assert named.annotator is not None
    assert named.annotator.tolist() == [0, 1, 0]
    table = LabelSets.from_table([1, 0], [1.0, 2.0], annotator=["bob", "ann"])
    assert table.annotator_names == ("ann", "bob")


def test_vector_labels() -> None:
    Y = np.full((2, 2, 3), np.nan)
    Y[0, 0], Y[1, 1] = 1.0, 2.0
    labels = LabelSets.from_array(Y)
    assert labels.continuous(3).tolist() == [[1.0] * 3, [2.0] * 3]
    Y[0, 0, 1] = np.nan
    with pytest.raises(ValueError, match=r"Y\[0, 0\] is a vector label with gaps"):
        LabelSets.from_array(Y)
    with pytest.raises(ValueError, match="vector labels go in as"):
        LabelSets.from_array([1.0, 2.0]).continuous(2)


def test_counts() -> None:
    labels = LabelSets.from_counts([[0, 2, 1], [0, 0, 0], [3, 0, 0]])
    assert labels.instance.tolist() == [0, 0, 2]
    assert labels.count.tolist() == [2, 1, 3]
    assert labels.categorical(3, np.array(["a", "b", "c"])).tolist() == [1, 2, 0]
    assert labels.labels_per_instance.tolist() == [3, 0, 3]
    zero = LabelSets.from_table([0, 1], [1.0, 2.0], count=[0, 2])
    assert zero.instance.tolist() == [1]


def test_huge_counts_do_not_overflow() -> None:
    most = np.iinfo(np.int64).max
    for counts in ([most, most], [1.5e308, 1.5e308], np.array([most, 1], dtype=np.uint64)):
        with pytest.raises(ValueError, match="counts are too large"):
            LabelSets.from_table([0, 0], [1.0, 2.0], count=counts)
    thousand_billion = np.array([10**9, 10**9], dtype=np.int32)
    assert LabelSets.from_table([0, 0], [1.0, 2.0], count=thousand_billion).total == 2 * 10**9
    with pytest.raises(ValueError, match="size that a float can hold"):
        LabelSets.from_table([0], [1.0], count=np.array([10**400], dtype=object))


def test_pairing_by_row_and_by_id() -> None:
    by_row = LabelSets.from_array([1.0, 2.0])
    with pytest.raises(ValueError, match="labels are for 2 instances but the predictions for 3"):
        by_row.align(3)
    by_id = LabelSets.from_table(["b", "a", "b"], [1.0, 2.0, 3.0])
    paired = by_id.align(3, np.array(["a", "b", "c"]))
    assert paired.instance.tolist() == [0, 1, 1]
    assert paired.value.tolist() == [2.0, 1.0, 3.0]
    with pytest.raises(ValueError, match="but the predictions have no ids"):
        by_id.align(3)
    with pytest.raises(ValueError, match="instance 'b', which is not among"):
        by_id.align(1, np.array(["a"]))
    numbers = LabelSets.from_table([30, 10], [1.0, 2.0])
    assert numbers.align(2, np.array([10, 30])).instance.tolist() == [0, 1]
    assert numbers.align(40).instance.tolist() == [10, 30]
    assert numbers.align(2, np.array(["10", "30"])).instance.tolist() == [0, 1]
    with pytest.raises(ValueError, match="'10', which is not among the predictions' ids, such as 'face-0'"):
        numbers.align(40, np.array([f"face-{row}" for row in range(40)]))  # row numbers, or ids of something else?
    by_number = LabelSets.from_table([30, 10], [1.0, 2.0], n_instances=40)
    assert by_number.align(40, np.array([f"face-{row}" for row in range(40)])).instance.tolist() == [10, 30]
    with pytest.raises(ValueError, match="instance '30', which is not among"):
        numbers.align(2, np.array(["10", "20"]))
    with pytest.raises(ValueError, match="labels name instance 30"):
        numbers.align(20)


def test_take_keeps_labels_with_their_instances(rng: np.random.Generator) -> None:
    rows = rng.integers(0, 20, size=50)
    labels = LabelSets.from_table(rows, rows.astype(float), n_instances=20)
    places = np.array([7, 3, 11])
    taken = labels.take(places)
    assert taken.n_instances == 3
    np.testing.assert_array_equal(taken.value, places[taken.instance])
    assert taken.total == np.isin(rows, places).sum()


def test_classes() -> None:
    signs = LabelSets.from_array([-1, 1, 1])
    assert signs.categorical(2, np.array([-1, 1])).tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"label -1 is outside 0\.\.1; labels other than"):
        signs.categorical(2)
    words = LabelSets.from_array(["dog", "cat"])
    assert words.categorical(2, np.array(["cat", "dog"])).tolist() == [1, 0]
    assert LabelSets.from_array([1, 0]).categorical(2, np.array(["cat", "dog"])).tolist() == [1, 0]
    assert LabelSets.from_array([1, 2]).categorical(2, np.array(["2", "1"])).tolist() == [1, 0]
    gaps = LabelSets.from_array([1.0, np.nan, 0.0])  # as pandas stores whole numbers with gaps
    assert gaps.categorical(2, np.array(["cat", "dog"])).tolist() == [1, 0]
    with pytest.raises(ValueError, match="label 'dog' is not among the classes"):
        words.categorical(2, np.array(["cat", "cow"]))
    with pytest.raises(ValueError, match="not a class number"):
        words.categorical(2)
    with pytest.raises(ValueError, match="not a whole number"):
        LabelSets.from_array([0.5]).categorical(2)
    with pytest.raises(ValueError, match="one-hot"):
        LabelSets.from_array(np.eye(3)[[0, 2, 1, 1, 0]]).categorical(3)
    several = np.tile([[0, 1, 1], [1, 0, 0]], (20, 1))
    with pytest.raises(ValueError, match="multi-hot: 3 columns of 0 and 1; use task='multilabel'"):
        LabelSets.from_array(several).categorical(3)
    assert len(LabelSets.from_array(several, annotators="columns").categorical(3)) == 120
    with pytest.raises(ValueError, match=r"probabilities of the classes; use LabelSets\.from_probabilities"):
        LabelSets.from_array([[0.2, 0.8], [0.5, 0.5]]).categorical(2)
    classes = np.array(["cat", "cow", "dog"])
    with pytest.raises(ValueError, match="multi-hot"):  # columns named for the classes are no annotators
        LabelSets.from_array(pd.DataFrame(several, columns=classes)).categorical(3, classes)
    assert LabelSets.from_array([True, False]).categorical(2).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LabelSets.from_array(np.zeros((1, 1, 1, 1))), r"must be \(N,\), \(N, M\) or \(N, M, C\)"),
        (lambda: LabelSets.from_array([[1], [1, 2]]), "different lengths"),
        (lambda: LabelSets.from_array([0.0, np.inf]), "finite; instance 1"),
        (lambda: LabelSets.from_array([np.array([1, 2]), None, 3], missing=1), "different lengths|got int, ndarray"),
        (lambda: LabelSets.from_array([1 + 1j]), "real numbers or strings; got complex128"),
        (lambda: LabelSets.from_array([[1, 2]], annotators=5), "'columns' or a list"),  # type: ignore[arg-type]
        (lambda: LabelSets.from_table(np.array([2**63], dtype=np.uint64), [1.0]), "too large for a row number"),
        (lambda: LabelSets.from_table([0], [1.0], n_instances=2.5), "n_instances must be a whole"),  # type: ignore[arg-type]
        (lambda: LabelSets.from_array(["a", 1.0, None]), "all numbers or all strings|not a class"),
        (lambda: LabelSets.from_array(np.array(["2020-01-01"], dtype="datetime64[D]")), "numbers or strings"),
        (lambda: LabelSets.from_array([[1, 2]], annotators=["x"]), "2 different names"),
        (lambda: LabelSets.from_array([[1, 2]], annotators="rows"), "'columns' or a list"),
        (lambda: LabelSets.from_table([0, 1], [1.0]), "lists of one length"),
        (lambda: LabelSets.from_table([-1], [1.0]), "must not be negative"),
        (lambda: LabelSets.from_table([5], [1.0], n_instances=5), "instance 5 does not exist"),
        (lambda: LabelSets.from_table(["a"], [1.0], n_instances=5), "row numbers where n_instances"),
        (lambda: LabelSets.from_table([0, 1], [[1.0, 2.0], [1.0, np.nan]]), "must be finite"),
        (lambda: LabelSets.from_table([0], [1.0], annotator=[None]), "gaps"),
        (lambda: LabelSets.from_table([0], [1.0], annotator=["a", "b"]), "lists of one length"),
        (lambda: LabelSets.from_table([0], [1.0], count=[-1]), "not negative"),
        (lambda: LabelSets.from_table([0], [1.0], count=[np.nan]), "row 0 has no count"),
        (lambda: LabelSets.from_counts([1, 2]), r"\(N, C\)"),
        (lambda: LabelSets.from_counts([["a"]]), "must be numbers"),
    ],
)
def test_bad_input_is_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


@given(
    st.lists(
        st.lists(
            st.one_of(st.none(), st.floats(allow_nan=True, width=32), st.text(max_size=2)), min_size=2, max_size=2
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_table_is_read_or_refused(table: list[list[object]]) -> None:
    try:
        labels = LabelSets.from_array(np.array(table, dtype=object))
    except ValueError:
        return
    assert len(labels) == sum(entry is not None and entry == entry for row in table for entry in row)


# -- pandas ---------------------------------------------------------------------------------------

IDS = np.array([f"item-{row}" for row in range(40)])


def regression(rng: np.random.Generator, ids: np.ndarray | None = IDS) -> tuple[ViewPredictions, np.ndarray]:
    truth = rng.normal(size=40)
    outputs = truth[:, None, None] + rng.normal(size=(40, 2, 1)) * np.array([0.1, 2.0])[:, None]
    return ViewPredictions(outputs, names=["identity", "noise"], ids=ids), truth


@pytest.mark.parametrize("ids", [IDS, 100 + np.arange(40)])
def test_a_shuffled_series_is_paired_by_its_index(rng: np.random.Generator, ids: np.ndarray) -> None:
    predictions, truth = regression(rng, ids)
    series = pd.Series(truth, index=ids).sample(frac=1, random_state=0)
    labels = LabelSets.from_array(series)
    np.testing.assert_array_equal(labels.align(40, ids).value, truth)
    expected = fit_policy(predictions, truth, task="regression", model="mixture", guard=False)
    policy = fit_policy(predictions, series, task="regression", model="mixture", guard=False)
    np.testing.assert_array_equal(policy.weights, expected.weights)
    nameless = ViewPredictions(predictions.outputs, names=predictions.names)
    with pytest.raises(ValueError, match=r"but the predictions have no ids; give both ids"):
        fit_policy(nameless, series, task="regression")
    with pytest.raises(ValueError, match="is not among the predictions' ids"):
        labels.align(40, np.arange(500, 540))
    by_row = LabelSets.from_array(series.reset_index(drop=True))
    assert by_row.ids is None
    np.testing.assert_array_equal(by_row.align(40).value, series)
    with pytest.raises(ValueError, match=r"but labels have no ids; .*pair by row: labels\.to_numpy"):
        by_row.align(40, ids)


def test_a_pivot_table_is_paired_by_its_index_and_names_annotators(rng: np.random.Generator) -> None:
    truth = rng.integers(0, 3, 40)
    rows = np.repeat(np.arange(40), 2)
    frame = pd.DataFrame({"task": IDS[rows], "who": np.tile(["zoe", "ann"], 40), "answer": truth[rows]})
    frame.loc[frame.who == "ann", "answer"] = (truth + 1) % 3
    wide = frame.sample(frac=1, random_state=1).pivot_table(index="task", columns="who", values="answer")
    wide.iloc[3, 0] = np.nan
    labels = LabelSets.from_array(wide)
    assert labels.annotator_names == ("ann", "zoe")
    paired = labels.align(40, IDS)
    assert paired.annotator is not None
    assert len(paired) == 79
    expected = np.where(paired.annotator == 1, truth[paired.instance], (truth[paired.instance] + 1) % 3)
    np.testing.assert_array_equal(paired.value, expected)
    assert LabelSets.from_array(wide, annotators=["x", "y"]).annotator_names == ("x", "y")
    numbered = wide.set_axis(["label_1", "label_2"], axis=1)
    assert LabelSets.from_array(numbered).annotator is None
    counts = pd.crosstab(frame.task, frame.answer.map(dict(enumerate("abc"))))
    counted = LabelSets.from_counts(counts.sample(frac=1, random_state=2)).align(40, IDS)
    positions = counted.categorical(3, np.array(["c", "b", "a"]))
    assert counted.labels_per_instance.tolist() == [2.0] * 40
    assert {(i, 2 - p) for i, p in zip(counted.instance, positions, strict=True)} == (
        {(i, t) for i, t in enumerate(truth)} | {(i, (t + 1) % 3) for i, t in enumerate(truth)}
    )
    with pytest.raises(ValueError, match=r"several levels; use LabelSets\.from_table\(Y\.reset_index\(\)\)"):
        LabelSets.from_array(frame.set_index(["task", "who"])["answer"])


@pytest.mark.parametrize("key", ["instance", "id", "item"])
def test_a_long_frame_finds_its_columns(rng: np.random.Generator, key: str) -> None:
    order = rng.permutation(80)
    value, worker = rng.normal(size=80), np.array(["ann", "bob"])[np.arange(80) // 40]
    frame = pd.DataFrame({key: np.tile(IDS, 2), "label": value, "worker": worker, "count": 1 + np.arange(80) % 3})
    frame = frame.iloc[order]
    expected = LabelSets.from_table(*(frame[name].to_numpy() for name in (key, "label", "worker", "count")))
    for labels in (
        LabelSets.from_table(frame),
        LabelSets.from_array(frame),
        LabelSets.from_table(frame.to_dict("list")),
    ):
        for name in ("instance", "value", "count", "annotator", "ids"):
            np.testing.assert_array_equal(getattr(labels, name), getattr(expected, name))
        assert labels.annotator_names == ("ann", "bob")
    by_index = LabelSets.from_table(frame.set_index(key))
    np.testing.assert_array_equal(by_index.align(40, IDS).value, expected.align(40, IDS).value)
    gaps = frame.assign(label=frame.label.where(frame.worker == "ann"))
    assert len(LabelSets.from_table(gaps)) == 40


def test_frames_that_are_no_matrix_of_labels(rng: np.random.Generator) -> None:
    people = pd.DataFrame({"id": [3, 4], "ann": [1.0, 2.0], "bob": [1.0, 2.0]})
    for labels in (LabelSets.from_array(people), LabelSets.from_array(people.set_index("id"))):
        assert labels.annotator_names == ("ann", "bob")
        assert labels.align(2, np.array([4, 3])).value.tolist() == [2.0, 2.0, 1.0, 1.0]
    both = pd.DataFrame({"id": [3], "item": [4], "label": [1.0]})
    with pytest.raises(ValueError, match="'id' and 'item', which mean the same"):
        LabelSets.from_table(both)
    with pytest.raises(ValueError, match="names a column twice"):
        LabelSets.from_table(pd.DataFrame([[1, 2.0, 3.0]], columns=["id", "label", "label"]))
    with pytest.raises(ValueError, match="label must be given, or one table"):
        LabelSets.from_table([1, 2])
    frame = pd.DataFrame({"id": IDS, "label": rng.normal(size=40)})
    with pytest.raises(ValueError, match="id and label have different pandas indices"):
        LabelSets.from_table(frame["id"], frame["label"].sample(frac=1, random_state=0))
    gap = pd.DataFrame({"id": ["a", None], "label": [1.0, 2.0]})
    with pytest.raises(ValueError, match="the table, row 1 has no id; fill it in"):
        LabelSets.from_table(gap)
    assert LabelSets.from_array(pd.DataFrame({"label": [1.0, 2.0]})).instance.tolist() == [0, 1]
    gappy = pd.DataFrame({"id": [7, None, 5], "label": [1, None, 2], "count": [0.5, None, 2.5], "worker": [3, None, 4]})
    for table in (gappy, gappy.astype(object)):
        labels = LabelSets.from_table(table)
        assert (labels.ids.tolist(), labels.value.tolist(), labels.count.tolist()) == ([7, 5], [1, 2], [0.5, 2.5])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_in_another_order_are_paired_by_id(rng: np.random.Generator, suffix: str, tmp_path: Path) -> None:
    predictions, truth = regression(rng)
    order = rng.permutation(40)
    frame = pd.DataFrame({"id": IDS[order], "label": truth[order], "worker": np.tile(["a", "b"], 20)})
    path = tmp_path / f"labels.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    labels = LabelSets.load(path)
    assert labels.annotator_names == ("a", "b")
    np.testing.assert_allclose(labels.align(40, predictions.ids).value, truth)
    with pytest.raises(ValueError, match="but the predictions have no ids"):
        labels.align(40)
    rows = frame.drop(columns="id").assign(instance=order)
    rows.to_csv(path, index=False) if suffix == "csv" else rows.to_parquet(path)
    np.testing.assert_allclose(LabelSets.load(path).align(40).value, truth)  # `instance` may hold row numbers
    shifted = frame.assign(id=order + 1)
    shifted.to_csv(path, index=False) if suffix == "csv" else shifted.to_parquet(path)
    with pytest.raises(ValueError, match=r"such as '\d+'\) but the predictions have no ids.*a column 'instance'"):
        LabelSets.load(path).align(40)
    np.testing.assert_allclose(LabelSets.load(path).align(40, 1 + np.arange(40)).value, truth)


# -- weights --------------------------------------------------------------------------------------


def test_weights_count_like_labels_given_more_than_once(rng: np.random.Generator) -> None:
    predictions, truth = regression(rng)
    value = np.stack([truth, truth + 0.1], axis=1)
    weights = rng.integers(1, 4, 40)
    weighted = LabelSets.from_array(value).with_weights(weights)
    rows = np.repeat(np.arange(40), 2)
    repeated = LabelSets.from_table(rows, value.ravel(), count=weights[rows], n_instances=40)
    np.testing.assert_array_equal(weighted.count, repeated.count)
    assert weighted.total == 2 * weights.sum()
    assert weighted.labels_per_instance.tolist() == [2.0] * 40
    fits = [fit_policy(predictions, labels, task="regression", model="mixture", guard=False)
            for labels in (weighted, repeated)]  # fmt: skip
    np.testing.assert_array_equal(fits[0].weights, fits[1].weights)
    assert fits[0].elbo == fits[1].elbo
    single = LabelSets.from_array(truth).with_weights(3.0 * np.ones(40))
    assert not single.overlap  # weights are no further labels
    again = weighted.with_weights(np.ones(40))
    np.testing.assert_array_equal(again.count, np.ones(80))
    with pytest.raises(ValueError, match="must be positive"):
        weighted.with_weights(np.zeros(40))
    with pytest.raises(ValueError, match=r"40 numbers; got shape \(3,\)"):
        weighted.with_weights([1, 2, 3])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_weights_stay_with_their_instances(rng: np.random.Generator, suffix: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": IDS, "label": np.arange(40)})
    weight = pd.Series(1.0 + np.arange(40), index=IDS)
    labels = LabelSets.from_table(frame.sample(frac=1, random_state=0)).with_weights(weight[::-1])
    labels.save(tmp_path / f"labels.{suffix}")
    for label_sets in (labels, LabelSets.load(tmp_path / f"labels.{suffix}")):
        paired = label_sets.align(40, IDS)
        assert paired.instance_weights is not None
        np.testing.assert_array_equal(paired.instance_weights, 1.0 + np.arange(40))
        np.testing.assert_array_equal(paired.count, 1.0 + np.arange(40))
        taken = paired.take(np.array([7, 3]))
        assert taken.instance_weights is not None
        assert taken.instance_weights.tolist() == taken.count.tolist() == [8.0, 4.0]
    with pytest.raises(ValueError, match=r"instance_weights name rows by id .* have no ids"):
        LabelSets.from_array(np.zeros(40)).with_weights(weight)
    with pytest.raises(ValueError, match="one entry an id; 'item-0' has none"):
        labels.with_weights(weight[1:])
    (tmp_path / "two.csv").write_text("id,label,instance_weight\na,1,1\na,2,3\n")
    with pytest.raises(ValueError, match=r"two\.csv: instance_weight differs between labels"):
        LabelSets.load(tmp_path / "two.csv")


def test_an_index_that_pandas_sorted_still_holds_ids() -> None:
    """pivot_table, groupby and sort_index give an index 0..N-1 of ids, which pairs by id and not by row."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(30)
    value = rng.normal(size=30)
    frame = pd.DataFrame({"instance": ids, "annotator": "ann", "label": value})
    for labels in (
        frame.pivot_table(index="instance", columns="annotator", values="label"),
        frame.groupby("instance").label.mean(),
        pd.Series(value, index=ids).sort_index(),
        frame.set_index("instance")[["label"]].rename(columns={"label": "ann"}),
    ):
        aligned = LabelSets.from_array(labels).align(30, ids)
        np.testing.assert_allclose(aligned.value[:, 0] if aligned.value.ndim == 2 else aligned.value, value)
    with pytest.raises(ValueError, match="but labels have no ids"):  # pandas' default index says nothing
        LabelSets.from_array(pd.Series(value)).align(30, ids)


def test_columns_that_look_like_ids_are_not_ignored() -> None:
    names = [f"img{i}" for i in range(4)]
    with pytest.raises(ValueError, match="'image_id' is not used; rename it to 'instance'"):
        LabelSets.from_table(pd.DataFrame({"image_id": names, "label": [0, 1, 0, 1]}))
    with pytest.raises(ValueError, match="'file' is not used"):
        LabelSets.from_table(pd.DataFrame({"file": names, "label_1": [0, 1, 0, 1], "label_2": [0, 1, 1, 1]}))
    with pytest.raises(ValueError, match="column 'image_id', which looks like ids"):
        LabelSets.from_array(pd.DataFrame({"image_id": [3, 1, 2, 0], "rating": [0.1, 0.2, 0.3, 0.4]}))
    with pytest.raises(ValueError, match="column 'index', which looks like ids"):
        LabelSets.from_array(pd.Series([0.1, 0.2], name="rating").reset_index())
    assert LabelSets.from_array(pd.DataFrame({"david": [0, 1], "ann": [1, 1]})).annotator_names == ("david", "ann")


def test_weights_with_a_default_index_are_refused_where_labels_have_ids() -> None:
    labels = LabelSets.from_array(pd.Series([0.0, 1.0], index=["b", "a"]))
    with pytest.raises(ValueError, match=r"the labels name rows by id .* but instance_weights have no ids"):
        labels.with_weights(pd.Series([1.0, 2.0]))
    weighted = labels.with_weights(pd.Series([1.0, 2.0], index=["b", "a"]))
    assert weighted.align(2, np.array(["a", "b"])).count.tolist() == [2.0, 1.0]


def test_an_annotator_who_labels_an_instance_twice_is_named() -> None:
    with pytest.warns(UserWarning, match=r"annotator 'bob' labels instance b twice \(1 such"):
        LabelSets.from_table(["a", "b", "b", "b"], [0, 1, 1, 0], ["bob", "bob", "ann", "bob"])
    LabelSets.from_table(["a", "b", "b"], [0, 1, 0], ["bob", "bob", "bob"], count=[1, 2, 1])  # repeats are meant


def test_odd_names_and_sizes_are_one_line_errors() -> None:
    table = pd.DataFrame({"instance": [0], "l\nbel": [1]})
    with pytest.raises(ValueError, match=r"its column 'l\\nbel' is not used; rename it to 'label'"):
        LabelSets.from_table(table)
    with pytest.raises(ValueError, match="instance_weight must be numbers of a size that a float can hold"):
        LabelSets.from_table(pd.DataFrame({"instance": [0], "label": [1], "instance_weight": [10**400]}, dtype=object))


@pytest.mark.parametrize("build", [LabelSets.from_probabilities, LabelSets.from_multilabel])
@pytest.mark.parametrize("values", [np.array([[1j, 0]]), [["a", "b"]], np.array([[1, 0]], dtype="m8[s]")])
def test_soft_and_multiple_labels_are_real_numbers(build, values) -> None:
    with pytest.raises(ValueError, match=r"^(proba|Y) must (be|hold real) numbers"):
        build(values)


def test_an_array_in_the_place_of_a_label_is_named() -> None:
    nested = np.empty(2, dtype=object)
    nested[0] = np.array([1, 2])
    with pytest.raises(ValueError, match=r"Y must hold real numbers or strings; got array\(\[1, 2\]\)"):
        LabelSets.from_array(nested)


def test_missing_is_one_value() -> None:
    with pytest.raises(ValueError, match="missing must be one value"):
        LabelSets.from_array([[1.0, 2.0]], missing=np.array([[1.0], [2.0]]))


def test_columns_of_classes_must_be_those_of_the_predictions():
    soft = LabelSets.from_probabilities([[0.8, 0.2], [0.0, 1.0]])
    assert soft.categorical(2).tolist() == [0, 1, 1]
    for labels in (soft, LabelSets.from_counts([[2, 1], [1, 1]])):
        with pytest.raises(ValueError, match="2 columns, one a class, but there are 3"):
            labels.categorical(3)


def test_blank_ids_are_refused():
    with pytest.raises(ValueError, match="instance has a blank id"):
        LabelSets.from_table({"instance": ["a", " "], "label": [0, 1]})


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_soft_labels_are_not_written_as_counts(suffix: str, tmp_path: Path) -> None:
    soft = LabelSets.from_probabilities(pd.DataFrame({"cat": [0.8, 0.0], "dog": [0.2, 1.0]}, index=["a", "b"]))
    with pytest.raises(ValueError, match="probabilities, rankings and vectors are not written; keep the arrays or tab"):
        soft.save(tmp_path / f"labels{suffix}")
    assert not list(tmp_path.iterdir())


def test_some_instances_by_a_slice_or_a_mask() -> None:
    labels = LabelSets.from_array([5, 6, 7, 8])
    for rows in (slice(2, 4), np.array([False, False, True, True]), [-2, -1]):
        np.testing.assert_array_equal(labels.take(rows).value, [7, 8])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows must be a slice, a mask or positions among 4; got"):
        labels.take([4])  # type: ignore[arg-type]


def test_values_that_are_no_numbers_are_named() -> None:
    nested = np.empty(2, dtype=object)
    nested[:] = [[1], "a"]
    with pytest.raises(ValueError, match=r"instance must hold real numbers or strings; got \[1\]"):
        LabelSets.from_table(nested, [0, 1])
    with pytest.raises(ValueError, match=r"annotator must hold real numbers or strings; got \[1\]"):
        LabelSets.from_table([0, 1], [0, 1], nested)
    with pytest.raises(ValueError, match="labels must be all numbers or all strings; got Decimal, float"):
        LabelSets.from_array(np.array([1.0, Decimal("sNaN")], dtype=object), missing=-1.0)
    with pytest.raises(ValueError, match="Y must hold real numbers or strings"):
        LabelSets.from_array(np.zeros(2, dtype=[("a", "f8")]), missing=-1)


def test_labels_of_another_byte_order_are_written(tmp_path: Path) -> None:
    labels = LabelSets.from_array(np.array([1, 0, 2], dtype=">i4"))
    labels.save(tmp_path / "labels.parquet")
    np.testing.assert_array_equal(LabelSets.load(tmp_path / "labels.parquet").value, [1, 0, 2])
    with pytest.raises(ValueError, match=r"ending of .*labels\.txt must be one of '\.csv', '\.parquet'"):
        labels.save(tmp_path / "labels.txt")
