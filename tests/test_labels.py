"""Label sets: every way in leads to the same labels, and nonsense is named."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbtta import LabelSets


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
    with pytest.raises(ValueError, match="but the predictions have none"):
        by_id.align(3)
    with pytest.raises(ValueError, match="instance 'b', which is not among"):
        by_id.align(1, np.array(["a"]))
    numbers = LabelSets.from_table([30, 10], [1.0, 2.0])
    assert numbers.align(2, np.array([10, 30])).instance.tolist() == [0, 1]
    assert numbers.align(40).instance.tolist() == [10, 30]
    assert numbers.align(2, np.array(["10", "30"])).instance.tolist() == [0, 1]
    assert numbers.align(40, np.array([f"face-{row}" for row in range(40)])).instance.tolist() == [10, 30]
    with pytest.raises(ValueError, match="instance '30', which is not among"):
        numbers.align(2, np.array(["10", "20"]))
    with pytest.raises(ValueError, match="labels name instance 30"):
        numbers.align(20)


def test_take_keeps_labels_with_their_instances(rng: np.random.Generator) -> None:
    rows = rng.integers(0, 20, size=50)
    labels = LabelSets.from_table(rows, rows.astype(float), n_instances=20)
    some = np.array([7, 3, 11])
    taken = labels.take(some)
    assert taken.n_instances == 3
    np.testing.assert_array_equal(taken.value, some[taken.instance])
    assert taken.total == np.isin(rows, some).sum()


def test_classes() -> None:
    signs = LabelSets.from_array([-1, 1, 1])
    assert signs.categorical(2, np.array([-1, 1])).tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"label -1 is outside 0\.\.1; name the classes"):
        signs.categorical(2)
    words = LabelSets.from_array(["dog", "cat"])
    assert words.categorical(2, np.array(["cat", "dog"])).tolist() == [1, 0]
    assert LabelSets.from_array([1, 0]).categorical(2, np.array(["cat", "dog"])).tolist() == [1, 0]
    assert LabelSets.from_array([1, 2]).categorical(2, np.array(["2", "1"])).tolist() == [1, 0]
    with pytest.raises(ValueError, match="label 'dog' is not among the classes"):
        words.categorical(2, np.array(["cat", "cow"]))
    with pytest.raises(ValueError, match="not a class number"):
        words.categorical(2)
    with pytest.raises(ValueError, match="not a whole number"):
        LabelSets.from_array([0.5]).categorical(2)
    with pytest.raises(ValueError, match="one-hot"):
        LabelSets.from_array(np.eye(3)[[0, 2, 1, 1, 0]]).categorical(3)
    assert LabelSets.from_array([True, False]).categorical(2).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LabelSets.from_array(np.zeros((1, 1, 1, 1))), r"must be \(N,\), \(N, M\) or \(N, M, C\)"),
        (lambda: LabelSets.from_array([[1], [1, 2]]), "different lengths"),
        (lambda: LabelSets.from_array([0.0, np.inf]), "finite; instance 1"),
        (lambda: LabelSets.from_array([1 + 1j]), "real numbers or strings; got complex128"),
        (lambda: LabelSets.from_array([[1, 2]], annotators=5), "'columns' or a list"),  # type: ignore[arg-type]
        (lambda: LabelSets.from_table(np.array([2**63], dtype=np.uint64), [1.0]), "too large for a row number"),
        (lambda: LabelSets.from_table([0], [1.0], n_instances=2.5), "n_instances must be a whole"),  # type: ignore[arg-type]
        (lambda: LabelSets.from_array(["a", 1.0, None]), "all numbers or all strings|not a class"),
        (lambda: LabelSets.from_array(np.array(["2020-01-01"], dtype="datetime64[D]")), "numbers or strings"),
        (lambda: LabelSets.from_array([[1, 2]], annotators=["x"]), "2 different names"),
        (lambda: LabelSets.from_array([[1, 2]], annotators="rows"), "'columns' or a list"),
        (lambda: LabelSets.from_table([0, 1], [1.0]), "same length"),
        (lambda: LabelSets.from_table([-1], [1.0]), "must not be negative"),
        (lambda: LabelSets.from_table([5], [1.0], n_instances=5), "instance 5 does not exist"),
        (lambda: LabelSets.from_table(["a"], [1.0], n_instances=5), "row numbers where n_instances"),
        (lambda: LabelSets.from_table([0, 1], [1.0, np.nan]), "missing in row 1"),
        (lambda: LabelSets.from_table([0], [1.0], annotator=[None]), "gaps"),
        (lambda: LabelSets.from_table([0], [1.0], annotator=["a", "b"]), "one a label"),
        (lambda: LabelSets.from_table([0], [1.0], count=[-1]), "not negative"),
        (lambda: LabelSets.from_table([0], [1.0], count=[np.nan]), "finite"),
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
