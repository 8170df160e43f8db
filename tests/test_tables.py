"""Tables of any library: pairing by id, names of columns, and results as DataFrames."""

import re
import traceback
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.linear_model import LogisticRegression

from vbtta import (
    LabelSets,
    Policy,
    VBTTAClassifier,
    ViewPredictions,
    collect_views,
    compare,
    conformalize,
    diagnose,
    fit_baseline,
    fit_policy,
    fit_sequential,
    select_views,
)
from vbtta.augment import GaussianNoise, Identity
from vbtta.cli.app import app

N, K, C = 90, 3, 3
IDS = np.array([f"image-{i:02d}" for i in range(N)])
RNG = np.random.default_rng(0)
TRUTH = RNG.integers(0, C, size=N)
LOGITS = 2.0 * np.eye(C)[TRUTH][:, None] + RNG.normal(size=(N, K, C))
ORDER = RNG.permutation(N)
PREDICTIONS = ViewPredictions(LOGITS, names=["identity", "flip", "blur"], ids=IDS)


def shuffled(**columns):
    return pd.DataFrame({"id": IDS, **columns}).iloc[ORDER].reset_index(drop=True)


def paired(labels):
    aligned = PREDICTIONS.align(labels)
    return aligned.instance.tolist() == list(range(N)) and np.array_equal(aligned.value.ravel(), TRUTH)


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "narwhals"])
@pytest.mark.parametrize("names", [("id", "label"), ("task", "label"), ("ID", "Label")])
def test_labels_of_any_dataframe_are_paired_by_their_column_of_ids(library, names):
    frame = shuffled(label=TRUTH).set_axis(names, axis=1)
    if library == "pyarrow":
        frame = pa.Table.from_pandas(frame, preserve_index=False)
    if library == "narwhals":
        frame = pytest.importorskip("narwhals").from_native(frame)
    assert paired(LabelSets.from_table(frame))
    assert paired(frame)


def test_a_table_without_ids_is_not_paired_with_predictions_that_have_them():
    for labels in (pd.Series(TRUTH), pd.DataFrame({"label": TRUTH}), pa.table({"label": TRUTH})):
        with pytest.raises(ValueError, match=r"but labels have no ids.*labels\.to_numpy\(\)"):
            fit_policy(PREDICTIONS, labels, task="classification")
    assert paired(pd.Series(TRUTH).to_numpy())
    numbered = ViewPredictions(LOGITS, ids=np.arange(N))  # the rows' numbers: nothing is ambiguous
    assert np.array_equal(numbered.align(pd.Series(TRUTH)).value, TRUTH)


def test_an_index_is_ids_as_it_is():
    table = pd.DataFrame({"x": np.arange(3.0)}, index=["b", "c", "a"])
    for ids in (table.index, pd.Index([7, 8, 9])):
        views = collect_views(np.asarray, table, [Identity()], ids=ids)
        assert np.array_equal(views.ids, ids)


def test_groups_weights_and_features_of_tables_are_paired_by_id():
    group, weight = np.arange(N) // 5, 1.0 + np.arange(N)
    for groups in (shuffled(patient=group), shuffled(patient=group).set_index("id")["patient"]):
        assert np.array_equal(PREDICTIONS.with_groups(groups).groups, group)
        assert np.array_equal(ViewPredictions(LOGITS, ids=IDS, groups=groups).groups, group)
    with pytest.raises(ValueError, match=r"the predictions name rows by id .* but groups have no ids"):
        PREDICTIONS.with_groups(pd.Series(group))
    one_table = shuffled(patient=group)  # columns of one table belong together, whatever its index
    together = ViewPredictions(LOGITS[ORDER], ids=one_table["id"], groups=one_table["patient"])
    assert np.array_equal(together.groups, group[ORDER])
    labels = LabelSets.from_table(shuffled(label=TRUTH)).with_weights(shuffled(weight=weight))
    assert np.array_equal(PREDICTIONS.align(labels).count, weight)
    quality = RNG.normal(size=(N, K))
    long = pd.DataFrame({"id": np.repeat(IDS, K), "view": PREDICTIONS.names * N, "quality": quality.ravel()})
    known = ViewPredictions(LOGITS, names=PREDICTIONS.names, ids=IDS, features=long.sample(frac=1, random_state=0))
    assert known.feature_names == ("quality",)
    assert np.array_equal(known.features[:, :, 0], quality)  # type: ignore[index]
    with pytest.raises(ValueError, match="finite, for every input and view"):
        ViewPredictions(LOGITS, names=PREDICTIONS.names, ids=IDS, features=long[1:])


def test_predictions_go_through_a_table_and_back():
    features = RNG.normal(size=(N, K, 2))
    full = ViewPredictions(
        LOGITS, LOGITS**2, names=PREDICTIONS.names, ids=IDS, classes=list("abc"), groups=np.arange(N) // 2,
        features=features, feature_names=["sharp", "bright"],
    )  # fmt: skip
    back = ViewPredictions.from_table(full.to_frame())
    for name in ("outputs", "variance", "ids", "groups", "classes", "features"):
        assert np.array_equal(getattr(back, name), getattr(full, name)), name
    assert (back.names, back.feature_names) == (full.names, full.feature_names)
    arrow = pa.Table.from_pandas(PREDICTIONS.to_frame().sample(frac=1, random_state=1), preserve_index=False)
    back = ViewPredictions.from_table(arrow.rename_columns(["id", *arrow.column_names[1:]]))
    order = [back.ids.tolist().index(name) for name in IDS]
    assert np.array_equal(back.take(np.array(order)).select(PREDICTIONS.names).outputs, LOGITS)


def test_annotators_without_a_name_are_one_unknown_annotator():
    frame = pd.DataFrame(
        {"id": np.tile(IDS, 3), "label": np.tile(TRUTH, 3), "worker": np.repeat(["ann", "bob", None], N)}
    )
    twice = pd.concat([frame, frame[frame.worker.isna()]])  # two strangers may label one item
    labels = LabelSets.from_table(twice)
    assert labels.annotator_names == ("ann", "bob", "unknown")
    assert labels.to_frame().annotator.value_counts().to_dict() == {"ann": N, "bob": N, "unknown": 2 * N}
    numbers = LabelSets.from_table(frame["id"], frame["label"], frame.worker.map({"ann": 1, "bob": 2}))
    assert numbers.annotator_names == ("1", "2", "unknown")
    with pytest.warns(UserWarning, match="annotator 'ann' labels instance image-00 twice"):
        LabelSets.from_table(pd.concat([frame, frame[:1]]))


def test_results_are_tables():
    labels = LabelSets.from_table(shuffled(label=TRUTH))
    back = LabelSets.from_table(labels.to_frame())
    assert paired(back)
    policy = fit_policy(PREDICTIONS, labels, task="classification", model="mixture", guard=False)
    frame = policy.to_frame()
    assert list(frame.index) == list(PREDICTIONS.names)
    assert ((frame.low <= frame.weight) & (frame.weight <= frame.high)).all()
    prediction = policy.predict(PREDICTIONS)
    table = prediction.to_frame(index=IDS)
    assert np.array_equal(table[["proba_0", "proba_1", "proba_2"]], prediction.proba)
    assert table.loc["image-07", "label"] == prediction.label[7]
    views = ViewPredictions(LOGITS[:, :, :1], names=PREDICTIONS.names)
    policy = fit_policy(views, LOGITS[:, 0, 0], task="regression", model="mixture", guard=False)
    numbers: Any = policy.predict(views)
    table = numbers.to_frame(level=0.5)
    assert list(table.columns) == ["mean", "std", "lower", "upper"]
    assert ((table.lower < table["mean"]) & (table["mean"] < table.upper)).all()


def test_ids_in_a_column_of_any_case_go_before_the_index():
    frame = pd.DataFrame({"ID": IDS, "label": TRUTH}, index=IDS[::-1])
    assert paired(LabelSets.from_table(frame))
    assert paired(LabelSets.from_array(frame))


def test_an_annotator_twice_on_one_row_of_a_wide_table_is_noticed():
    wide = pd.DataFrame({"ann": TRUTH, "bob": TRUTH}, index=IDS)
    with pytest.warns(UserWarning, match=rf"annotator 'ann' labels instance {IDS[3]} twice \(2 such repeats in all\)"):
        LabelSets.from_array(pd.concat([wide, wide[3:4]]))


def test_tables_that_say_a_thing_twice_or_not_at_all_are_refused():
    for frame, message in (
        (pd.DataFrame({"ID": [*IDS, IDS[7]], "g": 0}), f"groups must have one entry an id; '{IDS[7]}' has none or"),
        (pd.DataFrame({"id": IDS}), "groups is a table of ids alone"),
    ):
        with pytest.raises(ValueError, match=message):
            PREDICTIONS.with_groups(frame)
    long = pd.DataFrame({"id": np.repeat(IDS, K), "view": list(PREDICTIONS.names) * N, "blur": 0.5})
    for frame, message in (
        (pd.concat([long, long[:1]]), "features have several rows of one instance and view"),
        (long.assign(blur="much"), "features: column 'blur' must be numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            ViewPredictions(LOGITS, names=PREDICTIONS.names, ids=IDS, features=frame)


def test_functions_take_tables_of_floats_and_of_none():
    floats, texts = pd.DataFrame({"a": np.arange(4.0), "b": np.ones(4)}), pd.DataFrame({"text": ["a", "bb", "c", "dd"]})
    of_floats = collect_views(lambda table: np.asarray(table), floats, [Identity(), GaussianNoise(0.1)])
    np.testing.assert_array_equal(of_floats.outputs[:, 0], floats)
    lengths = collect_views(
        lambda table: table["text"].str.len().to_numpy()[:, None].astype(float), texts, [Identity()]
    )
    np.testing.assert_array_equal(lengths.outputs[:, 0, 0], [1, 2, 1, 2])


def test_a_column_that_may_name_the_annotators_is_not_passed_over():
    table = {"id": ["a", "a", "b"], "label": [0, 1, 1]}
    for column in ({"who": ["ann", "bob", "ann"]}, {"rater_id": [1, 2, 1]}):
        with pytest.raises(ValueError, match="is not used; rename it to 'annotator' if it says who gave the labels"):
            LabelSets.from_table(pd.DataFrame(table | column))
    assert len(LabelSets.from_table(pd.DataFrame(table | {"seconds": [1.0, 2.0, 3.0]}))) == 3
    assert len(LabelSets.from_table(pd.DataFrame(table | {"worker": [1, 2, 1], "note": ["", "?", ""]}))) == 3


def test_tables_of_predictions_and_consensus_have_the_ids() -> None:
    pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    outputs, ids = rng.normal(size=(30, 2, 3)), [f"case {n}" for n in range(30)]
    views = ViewPredictions(outputs, names=["identity", "flip"], ids=ids)
    policy = fit_policy(views, LabelSets.from_array(rng.integers(0, 3, (30, 2))), task="classification", guard=False)
    labels = LabelSets.from_table([ids[3], ids[7]], [0, 2])
    assert list(policy.consensus(views, labels).to_frame().index) == ids
    part = policy.predict(views).take(np.array([4, 2]))
    assert list(part.to_frame().index) == ["case 4", "case 2"]
    assert list(part.to_frame(index=["a", "b"]).index) == ["a", "b"]
    regression = ViewPredictions(outputs[:, :, :1], names=["identity", "flip"], ids=ids)
    numbers = fit_policy(regression, rng.normal(size=30), task="regression", guard=False)
    assert list(numbers.predict(regression).to_frame().index) == ids
    several = fit_policy(views, rng.integers(0, 2, (30, 3)), task="multilabel", guard=False)
    assert list(several.predict(views).to_frame().index) == ids


def test_progress_of_a_fit_tells_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    views = ViewPredictions(rng.normal(size=(40, 2, 2)), names=["identity", "flip"])
    fit_policy(views, rng.integers(0, 2, 40), task="classification", progress=True)
    assert re.search(r"of \d+ held-out fits, \d+ s passed, about \d+ s left", capsys.readouterr().err)


# -- the matrix of pairings -------------------------------------------------------------------------

PEOPLE = {"ann": TRUTH, "bob": TRUTH}
ONE_HOT = np.eye(C, dtype=int)[TRUTH]
COLUMNS = {f"c{c}": ONE_HOT[:, c] for c in range(C)}
NUMBERS = 100 + np.arange(N)  # ids that are whole numbers
NAMELESS = ViewPredictions(LOGITS, names=PREDICTIONS.names)
NUMBERED = ViewPredictions(LOGITS, names=PREDICTIONS.names, ids=NUMBERS)
CLASSED = ViewPredictions(LOGITS, names=PREDICTIONS.names, ids=IDS, classes=list(COLUMNS))
BY_INDEX = pd.Series(TRUTH, index=IDS).iloc[ORDER]
NARWHALS = pytest.importorskip("narwhals").from_native
NO_IDS, HAVE_NONE = "the predictions name rows by id .* but labels have no ids", "labels name rows by id .* have no ids"
SEVERAL = "a list of pandas objects has several indices"


def numbered(**columns):
    return shuffled(**columns).assign(id=NUMBERS[ORDER])


def plain(frame):
    return frame.drop(columns="id")


# what labels are built from, the predictions they belong to, and the error, or None where they must be paired
PAIRINGS: dict[str, tuple[Any, Any, Any]] = {
    "array": (lambda: TRUTH, PREDICTIONS, None),
    "row numbers": (lambda: LabelSets.from_table(ORDER, TRUTH[ORDER]), NAMELESS, None),
    "row numbers of a table": (
        lambda: plain(shuffled(label=TRUTH)).assign(instance=ORDER), NAMELESS, None
    ),
    "series by index": (lambda: BY_INDEX, PREDICTIONS, None),
    "series in narwhals": (lambda: NARWHALS(BY_INDEX, series_only=True), PREDICTIONS, None),
    "frame by index in narwhals": (lambda: NARWHALS(BY_INDEX.to_frame("label")), PREDICTIONS, None),
    "series and its index": (lambda: LabelSets.from_table(BY_INDEX.index, BY_INDEX), PREDICTIONS, None),
    "series, ids on one side": (lambda: BY_INDEX, NAMELESS, HAVE_NONE),
    "series without ids": (lambda: pd.Series(TRUTH), PREDICTIONS, NO_IDS),
    "labels of a series without ids": (lambda: LabelSets.from_array(pd.Series(TRUTH)), PREDICTIONS, NO_IDS),
    "series without ids in narwhals": (lambda: NARWHALS(pd.Series(TRUTH), series_only=True), PREDICTIONS, NO_IDS),
    "arrow column": (lambda: pa.chunked_array([TRUTH]), PREDICTIONS, NO_IDS),
    "list of a series": (lambda: [BY_INDEX], PREDICTIONS, SEVERAL),
    "series beside each other": (lambda: [BY_INDEX, BY_INDEX[::-1]], PREDICTIONS, SEVERAL),
    "tuple of frames": (lambda: (BY_INDEX.to_frame(),), PREDICTIONS, SEVERAL),
    "array of instances, series by id": (
        lambda: LabelSets.from_table(np.arange(N), BY_INDEX), NAMELESS, "different pandas indices or ids"
    ),
    "series in different orders": (
        lambda: LabelSets.from_table(pd.Series(IDS), BY_INDEX), PREDICTIONS, "different pandas indices"
    ),
    "frame with whole numbers as ids": (lambda: numbered(label=TRUTH), NUMBERED, None),
    "whole numbers as ids, on one side": (lambda: numbered(label=TRUTH), NAMELESS, HAVE_NONE),
    "ids that count the rows, on one side": (
        lambda: shuffled(label=TRUTH).assign(id=ORDER), NAMELESS, HAVE_NONE
    ),
    "series of whole numbers as ids": (
        lambda: LabelSets.from_table(numbered()["id"], TRUTH[ORDER]), NAMELESS, HAVE_NONE
    ),
    "frame with text for whole numbers": (
        lambda: numbered(label=TRUTH).astype({"id": str}), NUMBERED, None
    ),
    "wide frame with ids": (lambda: shuffled(**PEOPLE), PREDICTIONS, None),
    "wide frame by index": (lambda: shuffled(**PEOPLE).set_index("id"), PREDICTIONS, None),
    "wide frame, numbered labels": (lambda: shuffled(label_1=TRUTH, label_2=TRUTH), PREDICTIONS, None),
    "wide frame without ids": (lambda: plain(shuffled(**PEOPLE)), PREDICTIONS, NO_IDS),
    "wide frame, arrow, index kept": (
        lambda: pa.Table.from_pandas(shuffled(**PEOPLE).set_index("id")), PREDICTIONS, None
    ),
    "wide frame, arrow, index without a name": (
        lambda: pa.Table.from_pandas(pd.DataFrame(PEOPLE, index=IDS)), PREDICTIONS, "'__index_level_0__', which looks"
    ),
    "wide frame, index of a CSV": (
        lambda: shuffled(**PEOPLE).set_axis(["Unnamed: 0", "ann", "bob"], axis=1), PREDICTIONS, "looks like ids"
    ),
    "unused ids": (
        lambda: shuffled(label=TRUTH).set_axis(["image_id", "label"], axis=1), PREDICTIONS, "'image_id' is not used"
    ),
    "unused ids beside an index": (
        lambda: shuffled(label=TRUTH, image_id=IDS).set_index(ORDER).drop(columns="id"), PREDICTIONS, "is not used"
    ),
    "ids beside an index of several levels": (
        lambda: shuffled(label=TRUTH, fold=0).set_index(["fold", "fold"], append=True), PREDICTIONS, None
    ),
    "two columns of ids": (lambda: shuffled(label=TRUTH, task=ORDER), PREDICTIONS, "which mean the same"),
    "two columns of ids, wide": (lambda: shuffled(item=ORDER, **PEOPLE), PREDICTIONS, "which mean the same"),
    "index of several levels": (
        lambda: shuffled(label=TRUTH, fold=0).set_index(["id", "fold"]), PREDICTIONS, "several levels"
    ),
    "dict of lists": (lambda: shuffled(label=TRUTH).to_dict("list"), PREDICTIONS, None),
    "dict of lists without ids": (lambda: {"label": TRUTH.tolist()}, PREDICTIONS, NO_IDS),
    "dict of series by index": (lambda: {"label": BY_INDEX}, PREDICTIONS, None),
    "dict of series in different orders": (
        lambda: {"label": BY_INDEX, "count": pd.Series(1, index=IDS)}, PREDICTIONS, "different pandas indices"
    ),
    "counts": (lambda: LabelSets.from_counts(shuffled(**COLUMNS)), CLASSED, None),
    "counts without ids": (lambda: LabelSets.from_counts(plain(shuffled(**COLUMNS))), CLASSED, NO_IDS),
    "counts, ids unused": (
        lambda: LabelSets.from_counts(numbered(**COLUMNS).rename(columns={"id": "image_id"})), CLASSED, "looks like ids"
    ),
    "probabilities": (lambda: LabelSets.from_probabilities(shuffled(**COLUMNS)), CLASSED, None),
    "probabilities without ids": (lambda: LabelSets.from_probabilities(plain(shuffled(**COLUMNS))), CLASSED, NO_IDS),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRINGS)
def test_labels_are_paired_by_id_or_refused(case):
    make, predictions, error = PAIRINGS[case]
    if error is not None:
        with pytest.raises(ValueError, match=error):
            predictions.align(make())
        return
    aligned = predictions.align(make())
    value = aligned.categorical(C, predictions.classes)
    assert np.array_equal(value, TRUTH[aligned.instance])
    assert np.array_equal(aligned.labelled, np.arange(N))


MULTILABEL = {
    "array": (lambda: ONE_HOT, CLASSED, None),
    "ids and names": (lambda: shuffled(**COLUMNS)[["c2", "id", "c0", "c1"]], CLASSED, None),
    "index and names": (lambda: shuffled(**COLUMNS).set_index("id")[["c2", "c0", "c1"]], CLASSED, None),
    "names alone": (lambda: pd.DataFrame(COLUMNS)[["c2", "c0", "c1"]], CLASSED, "instance '0/c2', which is not among"),
    "names, no ids": (
        lambda: pd.DataFrame(COLUMNS)[["c2", "c0", "c1"]], ViewPredictions(LOGITS, classes=list(COLUMNS)), None
    ),
    "names on one side": (lambda: pd.DataFrame(COLUMNS), NAMELESS, "'0/c0'.* classes="),
    "numbers of columns": (lambda: pd.DataFrame(ONE_HOT), NAMELESS, None),
    "numbers of columns, ids on one side": (lambda: pd.DataFrame(ONE_HOT), PREDICTIONS, NO_IDS),
    "two columns of ids": (lambda: shuffled(item=0, **COLUMNS), CLASSED, "which mean the same"),
    "ids unused": (lambda: shuffled(**COLUMNS).rename(columns={"id": "image_id"}), CLASSED, "looks like ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", MULTILABEL)
def test_several_labels_are_paired_by_id_and_name_or_refused(case):
    make, predictions, error = MULTILABEL[case]
    if error is not None:
        with pytest.raises(ValueError, match=error):
            predictions.as_binary().align(LabelSets.from_multilabel(make()))
        return
    aligned = predictions.as_binary().align(LabelSets.from_multilabel(make()))
    assert np.array_equal(aligned.value, ONE_HOT.ravel())
    assert np.array_equal(aligned.instance, np.arange(N * C))


def test_rankings_of_a_series_are_paired_by_its_index():
    orders = [list(row) for row in np.argsort(-LOGITS[:, 0], axis=1)]
    series = pd.Series(orders, index=IDS)
    aligned = PREDICTIONS.align(LabelSets.from_rankings(series.iloc[ORDER]))
    assert aligned.value.tolist() == [list(map(int, order)) for order in orders]
    for rankings, message in (
        (lambda: LabelSets.from_rankings(series.reset_index(drop=True)), NO_IDS),
        (lambda: LabelSets.from_rankings(series, np.arange(N)), "different pandas indices or ids"),
    ):
        with pytest.raises(ValueError, match=message):
            PREDICTIONS.align(rankings())


OPTIONS: Any = {"task": "classification", "model": "mixture", "guard": False}
POLICY = fit_policy(PREDICTIONS, TRUTH, **OPTIONS)
LONG = pd.DataFrame({"id": np.repeat(IDS, K), "view": list(PREDICTIONS.names) * N, "blur": 0.5})
ENTRIES = {
    "fit_policy": lambda views, labels: fit_policy(views, labels, **OPTIONS),
    "compare": lambda views, labels: compare(views, labels, views, labels, methods=["original"], task="classification"),
    "fit_baseline": lambda views, labels: fit_baseline("uniform", views, labels, task="classification"),
    "select_views": lambda views, labels: select_views(views, labels, budget=1, **OPTIONS),
    "fit_sequential": lambda views, labels: fit_sequential(views, labels, task="classification", model="mixture"),
    "conformalize": lambda views, labels: conformalize(POLICY, views, labels),
    "score": lambda views, labels: POLICY.score(views, labels),
    "consensus": lambda views, labels: POLICY.consensus(views, labels),
    "diagnose": lambda views, labels: diagnose(POLICY, views, labels, refit=False),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("labels", [pd.Series(TRUTH), LabelSets.from_array(pd.DataFrame({"ann": TRUTH, "bob": TRUTH}))])
def test_every_entry_refuses_a_table_without_ids(entry, labels):
    with pytest.raises(ValueError, match=NO_IDS):
        ENTRIES[entry](PREDICTIONS, labels)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: NAMELESS.with_groups(shuffled(patient=0)), "have no ids"),
        (lambda: PREDICTIONS.with_groups(shuffled(item=0, patient=0)), "which mean the same"),
        (lambda: PREDICTIONS.with_groups(shuffled(image_id=0, patient=0)), "looks like ids"),
        (lambda: PREDICTIONS.with_groups([BY_INDEX]), SEVERAL),
        (lambda: PREDICTIONS.with_groups(NARWHALS(pd.Series(TRUTH), series_only=True)), "but groups have no ids"),
        (lambda: LabelSets.from_array(TRUTH).with_weights(BY_INDEX + 1.0), "have no ids"),
        (lambda: LabelSets.from_array(BY_INDEX).with_weights(shuffled(task=0, weight=1.0)), "which mean the same"),
        (lambda: ViewPredictions.from_table(PREDICTIONS.to_frame().assign(id=0)), "which mean the same"),
        (lambda: ViewPredictions(LOGITS, features=LONG), "by 'id' but the predictions have no ids"),
        (lambda: ViewPredictions(LOGITS, ids=IDS, features=LONG.assign(item=0)), "which mean the same"),
    ],
)  # fmt: skip
def test_groups_weights_and_features_are_paired_by_id_or_refused(call, error):
    assert PREDICTIONS.with_groups(shuffled(patient_id=IDS)).groups.tolist() == IDS.tolist()
    with pytest.raises(ValueError, match=error):
        call()


@pytest.mark.parametrize(
    ("y", "error"),
    [
        (lambda y: y, None),
        (lambda y: y.to_numpy(), None),
        (lambda y: y.reset_index(drop=True), "another order"),
        (lambda y: LabelSets.from_array(y.iloc[::-1]), None),
        (lambda y: y.iloc[::-1], "another order"),
        (lambda y: y.set_axis([f"other-{i}" for i in range(len(y))]), "different pandas indices"),
        (lambda y: [y], SEVERAL),
        (lambda y: y.rename_axis("id").reset_index(name="label"), "y has a column 'id'"),
        (lambda y: y.rename_axis("image_id").reset_index(name="label"), "another order"),
    ],
)  # fmt: skip
def test_estimators_pair_rows_or_refuse(y, error):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(60, 2)), columns=["u", "v"], index=rng.permutation(60))
    target = (X.u + 0.3 * rng.normal(size=60) > 0).astype(int)
    network = LogisticRegression().fit(X, target)
    weighted = VBTTAClassifier(network, [Identity()], model="mixture", guard=False)
    if error is None:
        expected = weighted.fit(X.to_numpy(), target.to_numpy()).policy_.elbo
        assert weighted.fit(X, y(target)).policy_.elbo == pytest.approx(expected)
        assert weighted.score(X, y(target)) > 0.7
        views = collect_views(network, X, [Identity()])
        assert np.array_equal(views.align(target.iloc[::-1]).value, target)
        return
    for method in (weighted.fit, VBTTAClassifier(network, [Identity()], guard=False).fit(X, target).score):
        with pytest.raises(ValueError, match=error):
            method(X, y(target))


@pytest.mark.parametrize(
    ("header", "key", "ids", "error"),
    [
        ("id,label", IDS, IDS, None),
        ("instance,label", IDS, IDS, None),
        ("instance,label", np.arange(N), None, None),
        ("id,label", NUMBERS, NUMBERS, None),
        ("id,label", np.arange(N), None, "has no ids.*a column 'instance'"),
        ("id,label", IDS, None, "has no ids"),
        ("image_id,label", IDS, IDS, "'image_id' is not used"),
        (",label", np.arange(N), None, "is not used"),
        ("label", None, IDS, NO_IDS),
    ],
)  # fmt: skip
def test_the_command_line_pairs_by_id_or_refuses(header, key, ids, error, tmp_path, capsys):
    ViewPredictions(LOGITS, names=PREDICTIONS.names, ids=ids).save(tmp_path / "views.npz")
    keys = [""] * N if key is None else [f"{name}," for name in key]
    lines = [f"{keys[i]}{TRUTH[i]}" for i in ORDER]
    (tmp_path / "labels.csv").write_text("\n".join([header, *lines]) + "\n")
    arguments = ["fit", "views.npz", "labels.csv", "--task", "classification", "--model", "mixture", "--no-guard"]
    arguments = [str(tmp_path / name) if "." in name else name for name in arguments]
    with pytest.raises(SystemExit) as end:
        app([*arguments, "--out", str(tmp_path / "policy.json")])
    stderr = capsys.readouterr().err
    if error is None:
        assert end.value.code == 0
        assert Policy.load(tmp_path / "policy.json").elbo == pytest.approx(POLICY.elbo)
    else:
        assert end.value.code == 1
        assert re.search(error, stderr)


ODD_TABLES: dict[str, Any] = {
    "empty": pd.DataFrame(),
    "no rows": pd.DataFrame({"id": [], "label": []}),
    "a column twice": pd.DataFrame([["x", "y", 1]], columns=["id", "id", "label"]),
    "categories": pd.DataFrame({"id": pd.Categorical(["a", "b"]), "label": pd.Categorical(["u", "v"])}),
    "nullable": pd.DataFrame({"id": pd.array([1, 2], dtype="Int64"), "label": pd.array([1, None], dtype="Int64")}),
    "dates": pd.DataFrame({"id": pd.to_datetime(["2020-01-01", None]), "label": [1, 2]}),
    "columns of two levels": pd.DataFrame(np.eye(2), columns=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)])),
    "gap in the index": pd.DataFrame({"ann": [1, 2]}, index=[np.nan, 1.5]),
    "tuples in the index": pd.DataFrame({"ann": [1, 2]}, index=pd.Index([("a", 1), ("b", 2)], tupleize_cols=False)),
    "lists in cells": pd.DataFrame({"id": ["a", "b"], "label": [[1, 2], [3]]}),
    "huge ids": pd.DataFrame({"id": [10**30, 1], "label": [1, 2]}),
    "lazy": NARWHALS(pd.DataFrame({"id": ["a"], "label": [1]})).lazy(),
    "objects": pd.Series([object(), 1]),
    "periods": pd.Series([1, 2], index=pd.period_range("2020", periods=2)),
    "an index": pd.RangeIndex(3),
    "numbers for columns": {"id": 1, "label": 2},
    "columns of two lengths": {"id": ["a"], "label": [1, 2]},
    "empty dict": {},
    "time": pd.Series(pd.to_timedelta([1, 2])),
    "complex": pd.Series([1j]),
}
READERS = {
    **{name: getattr(LabelSets, f"from_{name}")
       for name in ("array", "table", "counts", "probabilities", "multilabel", "rankings")},
    "instance": lambda table: LabelSets.from_table(table, [1, 2]),
    "weights": lambda table: LabelSets.from_array([1, 2]).with_weights(table),
    "groups": lambda table: ViewPredictions(np.zeros((2, 1, 1)), ids=["a", "b"], groups=table),
    "features": lambda table: ViewPredictions(np.zeros((2, 1, 1)), ids=["a", "b"], features=table),
    "predictions": ViewPredictions.from_table,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_odd_tables_are_read_or_refused_in_one_line(reader):
    fallen_through = []
    for name, table in ODD_TABLES.items():
        try:
            READERS[reader](table)
        except (ValueError, TypeError) as error:
            place = traceback.extract_tb(error.__traceback__)[-1].filename
            fallen_through += [name] if "\n" in str(error) or "vbtta" not in place else []
    assert not fallen_through


@pytest.mark.parametrize("key", ["sample", "row", "file"])
def test_a_shuffled_default_index_is_not_taken_for_ids_beside_another_column_of_ids(key):
    predictions = ViewPredictions(LOGITS, ids=ORDER)  # whole numbers below N, as the index of the table
    table = pd.DataFrame({key: ORDER, "label": TRUTH}).sample(frac=1, random_state=0)
    for reader in (LabelSets.from_table, LabelSets.from_array, predictions.align):
        with pytest.raises(ValueError, match=f"column '{key}' is not used; rename it to 'instance' if it holds ids"):
            reader(table)
    assert np.array_equal(predictions.align(table.rename(columns={key: "id"})).value, TRUTH)
    indexed = table.set_index(key).assign(comment=IDS)  # a named index holds ids, whatever is beside it
    assert np.array_equal(predictions.align(LabelSets.from_table(indexed)).value, TRUTH)


def test_an_unused_column_named_like_ids_is_named_first():
    table = pd.DataFrame({"": ORDER, "fold": 0, "image_id": IDS, "label": TRUTH})
    with pytest.raises(ValueError, match="column 'image_id' is not used"):
        LabelSets.from_table(table)


@pytest.mark.parametrize("index", ["worker", "Rater", ["id", "worker"]])
def test_annotators_and_ids_in_an_index_are_kept(index):
    table = pd.DataFrame({"id": np.repeat(IDS, 2), "worker": np.tile(["bo", "al"], N), "label": np.repeat(TRUTH, 2)})
    named = table.rename(columns={"worker": index}) if isinstance(index, str) else table
    labels = LabelSets.from_table(named.sample(frac=1, random_state=0).set_index(index))
    assert labels.annotator_names == ("al", "bo")
    assert np.array_equal(PREDICTIONS.align(labels).value, np.repeat(TRUTH, 2))


@pytest.mark.parametrize("name", ["patient", "Group", "fold", "split"])
def test_groups_beside_labels_are_no_annotator(name):
    predictions, age = ViewPredictions(LOGITS[:, :, :1], ids=IDS), LOGITS[:, 0, 0]
    for label in ("y", "age"):
        table = pd.DataFrame({"id": IDS, name: np.arange(N) // 4, label: age})
        with pytest.raises(ValueError, match=f"column '({name}|y)' is no annotator: name that of labels 'label'"):
            fit_policy(predictions, table, task="regression")
        aligned_labels = predictions.align(table.rename(columns={label: "label"}))
        assert np.array_equal(aligned_labels.value, age)
        assert aligned_labels.annotator is None
    assert np.array_equal(predictions.align(table[["id", "age"]].set_axis(["id", "y"], axis=1)).value, age)


def test_gaps_of_nullable_columns():
    table = pd.DataFrame({"id": IDS, "car": TRUTH > 0, "bus": TRUTH > 1}).astype({"car": "boolean", "bus": "Int64"})
    table.loc[3, "car"] = pd.NA
    plain = table.set_index("id").astype(object).replace({pd.NA: np.nan}).astype(float)
    expected = LabelSets.from_multilabel(plain)
    label_sets = LabelSets.from_multilabel(table.iloc[ORDER])
    assert len(label_sets) == 2 * N - 1
    ids = np.array([f"{key}/{name}" for key in IDS for name in ("car", "bus")])
    assert np.array_equal(label_sets.align(2 * N, ids).value, expected.align(2 * N, ids).value)
    proba = pd.DataFrame(np.eye(C)[TRUTH], index=IDS).astype("Float64")
    proba.iloc[3] = pd.NA
    assert len(LabelSets.from_probabilities(proba)) == N - 1
    with pytest.raises(ValueError, match=r"instance_weights must be numbers"):
        LabelSets.from_table(table[["id"]].assign(label=TRUTH)).with_weights(pd.Series("heavy", index=IDS))


@pytest.mark.parametrize("name", ["imageId", "ImageID", "uid", "image_id"])
def test_a_column_named_like_ids_is_no_annotator(name):
    table = pd.DataFrame({name: [10.0, 20.0, 30.0], "bo": [1.0, 2.0, 3.0]})
    with pytest.raises(ValueError, match=f"{name}.*looks like ids"):
        LabelSets.from_array(table)


@pytest.mark.parametrize("name", ["patient", "subject", "nr", "sample", "row", "case"])
def test_a_column_that_differs_in_every_row_is_no_annotator(name):
    predictions, age = ViewPredictions(LOGITS[:, :, :1]), LOGITS[:, 0, 0]
    for ids in (1000 + np.arange(N), [f"p{i}" for i in range(N)]):
        with pytest.raises(
            ValueError,
            match=rf"Y has a column '{name}', .*differs in every row: make it the index, as Y\.set_index\('{name}'",
        ):
            fit_policy(predictions, pd.DataFrame({name: ids, "age": age}), task="regression")
    labels = LabelSets.from_array(pd.DataFrame({"ann": age, "bob": age + 1}))
    assert labels.annotator_names == ("ann", "bob")
    assert LabelSets.from_array(pd.DataFrame({"ann": np.arange(20), "bob": 1})).annotator_names == ("ann", "bob")


def test_numbers_of_annotators_name_them():
    frame = pd.DataFrame({"item": np.repeat(IDS, 2), "worker": np.tile([11, 22], N), "label": np.repeat(TRUTH, 2)})
    wide = LabelSets.from_array(frame.pivot_table(index="item", columns="worker", values="label"))
    assert wide.annotator_names == ("11", "22")
    assert np.array_equal(PREDICTIONS.align(wide).value, np.repeat(TRUTH, 2))
    assert LabelSets.from_array(pd.DataFrame({11: TRUTH, 22: TRUTH})).annotator is None
    for reader in (frame.worker // 11, (frame.worker // 11).astype("Int64")):
        with pytest.raises(
            ValueError, match="column 'reader' is not used; rename it to 'annotator' if it says who gave"
        ):
            LabelSets.from_table(frame.drop(columns="worker").assign(reader=reader))
    assert len(LabelSets.from_table(frame.drop(columns="worker").assign(milliseconds=np.arange(2 * N)))) == 2 * N


def test_a_one_hot_table_is_no_table_of_annotators():
    one_hot = pd.get_dummies(pd.Series(np.array(["cat", "dog", "fox"])[TRUTH]))
    for labels in (one_hot, one_hot.astype(int), one_hot.to_numpy()):
        with pytest.raises(ValueError, match="labels look one-hot: 3 columns, one 1 a row; use"):
            fit_policy(NAMELESS, labels, task="classification")
    people = LabelSets.from_array(pd.DataFrame({"ann": TRUTH, "bob": TRUTH, "cy": TRUTH}))
    assert np.array_equal(people.categorical(C), np.repeat(TRUTH, 3))


@pytest.mark.parametrize(
    "values", [pd.array(TRUTH, dtype="Int64"), pd.Categorical(TRUTH), pd.array(TRUTH.astype(str), dtype="string")]
)
def test_the_array_of_a_pandas_column_is_an_array(values):
    aligned = PREDICTIONS.align(values)
    assert np.array_equal(aligned.value.astype(int), TRUTH)
    assert np.array_equal(PREDICTIONS.with_groups(values).groups.astype(int), TRUTH)


def test_features_may_have_their_ids_in_the_index():
    quality = RNG.normal(size=(N, K))
    long = pd.DataFrame({"id": np.repeat(IDS, K), "view": PREDICTIONS.names * N, "quality": quality.ravel()})
    for table in (long.set_index("id"), long.set_index(["id", "view"]), long.rename_axis("row")):
        known = ViewPredictions(LOGITS, names=PREDICTIONS.names, ids=IDS, features=table)
        assert known.feature_names == ("quality",)
        assert known.features is not None
        assert np.array_equal(known.features[:, :, 0], quality)


@pytest.mark.parametrize("name", ["weight", "Weights", "sample_weight"])
def test_weights_of_another_name_are_not_passed_over(name):
    with pytest.raises(ValueError, match=f"its column '{name}' is not used; rename it to 'instance_weight', or leave"):
        LabelSets.from_table(shuffled(label=TRUTH, **{name: 2.0}))


def test_a_blank_name_of_an_annotator_is_no_name():
    frame = pd.DataFrame({"id": ["a", "a", "b"], "label": [0, 1, 1], "worker": ["ann", "", None]})
    for table in (frame, frame.fillna(""), frame.fillna(" ")):
        labels = LabelSets.from_table(table)
        assert labels.annotator_names == ("ann", "unknown")
        assert labels.annotator.tolist() == [0, 1, 1]


def test_weights_in_an_array_are_in_the_order_of_the_table():
    weights = np.arange(1.0, N + 1)
    table = pd.DataFrame({"id": IDS, "label": TRUTH}).iloc[ORDER]
    for labels in (LabelSets.from_table(table), LabelSets.from_array(table.set_index("id").label)):
        assert labels.ids.tolist() == IDS[ORDER].tolist()
        aligned = PREDICTIONS.align(labels.with_weights(weights[ORDER]))
        np.testing.assert_array_equal(aligned.instance_weights, weights)
    twice = pd.concat([table, table.iloc[::-1]])
    assert LabelSets.from_table(twice).with_weights(weights[ORDER]).ids.tolist() == IDS[ORDER].tolist()
    weighted = LabelSets.from_table(twice.assign(instance_weight=np.r_[weights[ORDER], weights[ORDER][::-1]]))
    np.testing.assert_array_equal(PREDICTIONS.align(weighted).instance_weights, weights)


def test_an_index_of_one_level_and_ids_of_another_width_are_ids():
    assert paired(pd.Series(TRUTH, index=pd.MultiIndex.from_arrays([IDS])).iloc[ORDER])
    large = 2**60 + np.arange(N)
    predictions = ViewPredictions(LOGITS, ids=large.astype(np.uint64))
    aligned = predictions.align(pd.Series(TRUTH, index=large).iloc[ORDER])
    np.testing.assert_array_equal(aligned.value, TRUTH)


def test_tables_that_must_be_made_first_say_how():
    polars = pytest.importorskip("polars")
    with pytest.raises(ValueError, match=r"the table is lazy; give it as \.collect\(\)"):
        PREDICTIONS.align(polars.LazyFrame({"id": IDS, "label": TRUTH}))


def test_a_dict_of_ids_says_how_it_becomes_a_table():
    by_id = dict(zip(IDS.tolist(), TRUTH.tolist(), strict=True))
    assert paired(pd.Series(by_id))
    with pytest.raises(ValueError, match=r"'image-00' has shape \(\); a dict of ids goes in as pandas\.Series"):
        PREDICTIONS.align(by_id)
    with pytest.raises(ValueError, match=r"groups is a dict; give it as pandas\.Series\(groups\), or a table"):
        PREDICTIONS.with_groups(by_id)


@pytest.mark.parametrize("shape", [(C, N), (N // 2, 2 * C), (2 * N, C)])
def test_several_labels_of_another_shape_are_not_paired(shape):
    several = ViewPredictions(LOGITS)
    with pytest.raises(ValueError, match=r"labels .*(columns|instance)"):
        fit_policy(several, np.resize(TRUTH % 2, shape), task="multilabel")
    policy = fit_policy(several, (LOGITS[:, 0] > 0).astype(int), task="multilabel", guard=False)
    with pytest.raises(ValueError, match=r"labels .*(columns|instance)"):
        policy.score(several, np.resize(TRUTH % 2, shape))


def test_a_label_of_another_kind_is_the_one_that_is_named():
    mixed = np.array(["2", "1", "unsure", "0"])
    with pytest.raises(ValueError, match="label 'unsure' is not a class number"):
        ViewPredictions(LOGITS[:4]).align(mixed).categorical(C)
    numbers = ViewPredictions(LOGITS).align(TRUTH.astype(str))
    np.testing.assert_array_equal(numbers.categorical(C), TRUTH)


def test_columns_of_annotators_are_not_taken_for_a_misspelt_one():
    table = pd.DataFrame({"id": IDS, "rater1": TRUTH, "rater2": TRUTH})
    assert PREDICTIONS.align(LabelSets.from_array(table)).annotator_names == ("rater1", "rater2")
    with pytest.raises(ValueError, match=r"has no labels: give columns .*label_1.*; it has id, rater1, rater2"):
        LabelSets.from_table(table)


def test_scores_of_predictions_pair_a_series_by_id():
    policy = fit_policy(PREDICTIONS, TRUTH, task="classification", model="mixture", guard=False)
    predicted, labels = policy.predict(PREDICTIONS), pd.Series(TRUTH, index=IDS)
    expected = predicted.log_prob(TRUTH)
    np.testing.assert_array_equal(predicted.log_prob(labels.iloc[ORDER]), expected)
    np.testing.assert_array_equal(predicted.take(ORDER).log_prob(labels), expected[ORDER])
    with pytest.raises(ValueError, match=r"the prediction name rows by id .* but y have no ids.*y\.to_numpy"):
        predicted.log_prob(pd.Series(TRUTH))
    numbers = ViewPredictions(LOGITS[:, :, :1], ids=IDS)
    fit: Any = fit_policy(numbers, LOGITS[:, 0, 0], task="regression", model="mixture", guard=False).predict(numbers)
    values = pd.DataFrame({"id": IDS, "value": LOGITS[:, 0, 0]}).iloc[ORDER]
    for score in (fit.log_prob, fit.crps, fit.cdf):
        np.testing.assert_array_equal(score(values), score(LOGITS[:, 0, 0]))


def test_costs_in_a_series_are_those_of_the_views_it_names():
    cost = {"blur": 3.0, "identity": 1.0, "flip": 2.0}
    options: dict[str, Any] = {"task": "classification", "budget": 2.5, "model": "mixture"}
    expected = select_views(PREDICTIONS, TRUTH, cost=cost, **options)
    policy = select_views(PREDICTIONS, TRUTH, cost=pd.Series(cost), **options)
    assert policy.selection.cost == expected.selection.cost == {"identity": 1.0, "flip": 2.0, "blur": 3.0}
    with pytest.raises(ValueError, match="cost must have one entry an id; 'flip' has none"):
        select_views(PREDICTIONS, TRUTH, cost=pd.Series(cost).drop("flip"), **options)
