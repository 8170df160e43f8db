"""Tables of any library: pairing by id, names of columns, and results as DataFrames."""

import re
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from vbtta import LabelSets, ViewPredictions, fit_policy

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
        with pytest.raises(ValueError, match=r"labels are a table without ids.*labels\.to_numpy\(\)"):
            fit_policy(PREDICTIONS, labels, task="classification")
    assert paired(pd.Series(TRUTH).to_numpy())
    numbered = ViewPredictions(LOGITS, ids=np.arange(N))  # the rows' numbers: nothing is ambiguous
    assert np.array_equal(numbered.align(pd.Series(TRUTH)).value, TRUTH)


def test_groups_weights_and_features_of_tables_are_paired_by_id():
    group, weight = np.arange(N) // 5, 1.0 + np.arange(N)
    for groups in (shuffled(patient=group), shuffled(patient=group).set_index("id")["patient"]):
        assert np.array_equal(PREDICTIONS.with_groups(groups).groups, group)
        assert np.array_equal(ViewPredictions(LOGITS, ids=IDS, groups=groups).groups, group)
    with pytest.raises(ValueError, match=r"groups has a default index but the predictions have ids"):
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
    assert np.array_equal(known.features[:, :, 0], quality)
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
    found = policy.predict(PREDICTIONS)
    table = found.to_frame(index=IDS)
    assert np.array_equal(table[["proba_0", "proba_1", "proba_2"]], found.proba)
    assert table.loc["image-07", "label"] == found.label[7]
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
