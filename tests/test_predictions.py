"""View predictions: validated once, selected by name, kept in plain files."""

import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vbtta import ViewPredictions
from vbtta.distributions import CategoricalPrediction


def make(**options: object) -> ViewPredictions:
    mean = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    return ViewPredictions(mean, names=["identity", "flip", "noise"], **options)  # type: ignore[arg-type]


def test_single_precision_is_kept_without_a_copy() -> None:
    mean = np.zeros((2, 1, 1), dtype=np.float32)
    assert ViewPredictions(mean).outputs is mean
    assert ViewPredictions([[[1]]]).outputs.dtype == np.float64


def test_select_and_take() -> None:
    views = make(variance=np.ones((4, 3, 2)), ids=[10, 11, 12, 13])
    chosen = views.select(["noise", "identity"])
    assert chosen.names == ("noise", "identity")
    np.testing.assert_array_equal(chosen.outputs, views.outputs[:, [2, 0]])
    assert views.select(views.names) is views
    taken = views.take(np.array([2, 0]))
    assert taken.ids is not None
    assert taken.ids.tolist() == [12, 10]
    with pytest.raises(ValueError, match=r"\['rotate'\] are not among"):
        views.select(["rotate"])


def test_concat() -> None:
    views = make(ids=["a", "b", "c", "d"])
    shuffled = ViewPredictions(views.outputs[:, ::-1], names=views.names[::-1], ids=["e", "f", "g", "h"])
    both = views.concat(shuffled)
    assert both.outputs.shape == (8, 3, 2)
    np.testing.assert_array_equal(both.outputs[4:], views.outputs)
    assert both.ids is not None
    assert both.ids.tolist() == list("abcdefgh")
    more = ViewPredictions(views.outputs[:, :1], names=["blur"], ids=["a", "b", "c", "d"])
    assert views.concat([more], axis="views").names == ("identity", "flip", "noise", "blur")
    with pytest.raises(ValueError, match="different inputs"):
        views.concat(shuffled.select(["noise"]), axis="views")
    with pytest.raises(ValueError, match="some parts have variance"):
        views.concat(make(variance=np.ones((4, 3, 2))))
    with pytest.raises(ValueError, match="must differ"):
        views.concat(views)


@pytest.mark.parametrize("mmap", [False, True])
def test_files_round_trip(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "views.npz"
    views = make(variance=np.ones((4, 3, 2)), ids=["a", "b", "c", "d"], classes=["cat", "dog"])
    views.save(path)
    again = ViewPredictions.load(path, mmap=mmap)
    assert isinstance(again.outputs, np.memmap) == mmap
    np.testing.assert_array_equal(again.outputs, views.outputs)
    np.testing.assert_array_equal(again.variance, views.variance)  # type: ignore[arg-type]
    assert again.names == views.names
    assert again.ids is not None
    assert again.ids.tolist() == ["a", "b", "c", "d"]
    assert again.classes is not None
    assert again.classes.tolist() == ["cat", "dog"]
    assert list(tmp_path.iterdir()) == [path]  # no litter
    unnamed = ViewPredictions(np.zeros((1, 2, 1)))
    unnamed.save(path)
    assert ViewPredictions.load(path).generated_names


@pytest.mark.parametrize("groups", [["p", "q", "p", "q"], [3, 3, 1, 2]])
@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_groups_are_kept(groups: list[object], suffix: str, tmp_path: Path) -> None:
    views = make(ids=["a", "b", "c", "d"], groups=groups, variance=np.ones((4, 3, 2)), classes=["cat", "dog"])

    def kept(predictions: ViewPredictions) -> list[object]:
        assert predictions.groups is not None
        return predictions.groups.tolist()

    assert kept(views) == kept(views.select(["flip"])) == groups
    assert kept(views.take(np.array([2, 0]))) == [groups[2], groups[0]]
    more = make(ids=["e", "f", "g", "h"], groups=groups, variance=np.ones((4, 3, 2)), classes=["cat", "dog"])
    assert kept(views.concat(more)) == groups + groups
    views.save(tmp_path / f"views.{suffix}")
    again = ViewPredictions.load(tmp_path / f"views.{suffix}")
    assert kept(again) == groups
    assert again.names == views.names
    assert again.ids is not None
    assert again.ids.tolist() == list("abcd")
    np.testing.assert_array_equal(again.outputs, views.outputs)
    np.testing.assert_array_equal(again.variance, views.variance)  # type: ignore[arg-type]
    assert again.classes is not None
    assert again.classes.tolist() == ["cat", "dog"]
    series = pd.Series(groups, index=list("abcd"))[::-1]
    assert kept(make(ids=["a", "b", "c", "d"], groups=series)) == groups
    assert kept(make(groups=series.to_numpy())) == groups[::-1]
    with pytest.raises(ValueError, match=r"groups name rows by id \(such as 'd'\) but the predictions have no ids"):
        make(groups=series)
    with pytest.raises(ValueError, match="some parts have groups and some not"):
        views.concat(make(ids=["e", "f", "g", "h"], variance=np.ones((4, 3, 2)), classes=["cat", "dog"]))


def test_groups_of_a_table_with_a_row_a_view(tmp_path: Path) -> None:
    table = {"instance": ["b", "b", "a", "a"], "view": ["x", "y", "y", "x"], "output": [1.0, 2.0, 3.0, 4.0]}
    pq.write_table(pa.table({**table, "group": [7, 7, 5, 5]}), tmp_path / "views.parquet")
    views = ViewPredictions.load(tmp_path / "views.parquet")
    assert views.groups is not None
    assert (views.groups.tolist(), views.outputs[:, :, 0].tolist()) == ([7, 5], [[1.0, 2.0], [4.0, 3.0]])
    pq.write_table(pa.table({**table, "group": [7, 8, 5, 5]}), tmp_path / "views.parquet")
    with pytest.raises(ValueError, match="'group' differs between the views of an instance"):
        ViewPredictions.load(tmp_path / "views.parquet")


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        hnp.array_shapes(min_dims=3, max_dims=3, max_side=5),
        elements=st.floats(-1e6, 1e6, width=32),
    )
)
def test_mapped_files_hold_what_was_saved(mean: np.ndarray) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "views.npz"
        ViewPredictions(mean).save(path)
        np.testing.assert_array_equal(ViewPredictions.load(path, mmap=True).outputs, mean)


def test_damaged_and_dangerous_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    with pytest.raises(FileNotFoundError, match="no predictions file"):
        ViewPredictions.load(path)
    path.write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match=r"not an \.npz file"):
        ViewPredictions.load(path)
    with open(path, "wb") as file:
        np.savez(file, other=np.zeros(3))
    with pytest.raises(ValueError, match="no array 'outputs'"):
        ViewPredictions.load(path)
    with open(path, "wb") as file:
        np.savez(file, outputs=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        ViewPredictions.load(path)
    member = io.BytesIO()
    np.save(member, np.zeros((3, 2, 1)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("outputs.npy", member.getvalue()[:-8])
    with pytest.raises(ValueError, match="cannot be read"):
        ViewPredictions.load(path)


def test_a_mapped_file_with_nan_is_caught_where_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "nan.npz"
    with open(path, "wb") as file:
        np.savez(file, outputs=np.full((3, 2, 1), np.nan))
    with pytest.raises(ValueError, match="must be finite"):
        ViewPredictions.load(path)
    mapped = ViewPredictions.load(path, mmap=True)
    with pytest.raises(ValueError, match="must be finite"):
        mapped.check_finite()


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: ViewPredictions(np.zeros((3, 2))), "last axis of 1"),
        (lambda: ViewPredictions(np.zeros((3, 0, 1))), "at least one view"),
        (lambda: ViewPredictions(np.zeros((3, 1, 0))), "one output"),
        (lambda: ViewPredictions([[["a"]]]), "real numbers"),
        (lambda: ViewPredictions(np.zeros((2, 1, 1), dtype=complex)), "real numbers"),
        (lambda: ViewPredictions(np.ma.zeros((2, 1, 1))), "masked"),
        (lambda: ViewPredictions([[[1.0]], [[np.nan]]]), "input 1, view 'view_0', output 0 is nan"),
        (lambda: ViewPredictions([[[np.inf]]]), "must be finite.* that input$"),
        (lambda: ViewPredictions([[[-np.inf]]]), r"must be finite.*clip log probabilities, as np\.maximum\("),
        (lambda: ViewPredictions(np.zeros((2, 1, 1)), -np.ones((2, 1, 1))), "not negative"),
        (lambda: ViewPredictions(np.zeros((2, 1, 1)), np.ones((2, 1))), "shaped like outputs"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names=["a", "a"]), r"\['a'\] occur more than once"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names=["a"]), "2 strings, one a view"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names="ab"), "list of 2 strings"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names=3), "list of 2 strings"),  # type: ignore[arg-type]
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), ids=[1]), "2 integers or strings"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), ids=[1, 1]), "must differ from each other; '1' occurs"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), groups=[1]), "groups must be 2 integers or strings"),
        (
            lambda: ViewPredictions(np.zeros((2, 2, 1)), groups=[np.nan, 1]),
            "groups must be integers or strings; got nan",
        ),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), groups=[None, "a"]), "groups must be .*; it has gaps"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), ids=[np.nan, 1]), "integers or strings; got nan"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1))).concat([3]), "others must be ViewPredictions"),  # type: ignore[list-item]
        (lambda: ViewPredictions(np.zeros((2, 2, 2)), classes=["a", "b", "c"]), "2 integers or strings"),
    ],
)
def test_bad_input_is_named(make_it, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make_it()


def test_categorical_prediction() -> None:
    prediction = CategoricalPrediction(np.array([[0.25, 0.75], [1.0, 0.0]]), np.zeros(2), np.array(["cat", "dog"]))
    assert prediction.label.tolist() == ["dog", "cat"]
    assert prediction.entropy == pytest.approx([0.5623351446, 0.0])
    np.testing.assert_allclose(prediction.log_prob(["dog", "cat"]), [np.log(0.75), 0.0])
    assert np.isfinite(prediction.log_prob(["dog", "dog"])).all()
    with pytest.raises(ValueError, match="not among the classes"):
        prediction.log_prob(["dog", "cow"])


def test_parts_whose_views_differ_are_not_joined():
    def part(text):
        return ViewPredictions(np.zeros((2, 1, 1)), names=["noise"], fingerprints={"noise": text})

    with pytest.raises(ValueError, match=r"view 'noise' of a part .* has other parameters"):
        part("-/raw").concat([part("aa/raw"), part("bb/raw")])
    with pytest.raises(ValueError, match="'log_probability' outputs"):
        part("aa/raw").concat(part("aa/log_probability"))
    assert len(part("aa/raw").concat([part("-/raw"), part("aa/raw")])) == 6


# -- features of inputs and views -----------------------------------------------------------------


def test_features_follow_rows_views_files_and_joins(tmp_path: Path) -> None:
    values = np.arange(24.0).reshape(4, 3, 2)
    views = ViewPredictions(
        np.zeros((4, 3, 1)), names=["identity", "flip", "crop"], features=values, feature_names=["blur", "tilt"]
    )
    chosen = views.take(slice(1, 3)).select(["crop", "identity"])
    np.testing.assert_array_equal(chosen.features, values[1:3][:, [2, 0]])
    assert chosen.feature_names == ("blur", "tilt")
    views.save(tmp_path / "views.npz")
    loaded = ViewPredictions.load(tmp_path / "views.npz")
    np.testing.assert_array_equal(loaded.features, values)
    assert loaded.feature_names == ("blur", "tilt")
    np.testing.assert_array_equal(views.take(slice(2)).concat(views.take(slice(2, 4))).features, values)
    halves = views.select(["identity"]).concat(views.select(["flip", "crop"]), axis="views")
    np.testing.assert_array_equal(halves.features, values)
    with pytest.raises(ValueError, match="files only; save to one"):
        views.save(tmp_path / "views.parquet")
    with pytest.raises(ValueError, match="different features"):
        views.concat(ViewPredictions(np.zeros((4, 3, 1)), names=views.names))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": np.zeros((4, 2, 1))}, r"features must be \(4, 3, F\)"),
        ({"features": np.full((4, 3, 1), np.nan)}, "features must be finite"),
        ({"features": np.zeros((4, 3, 2)), "feature_names": ["a"]}, "feature_names must be 2 strings"),
        ({"features": np.zeros((4, 3, 2)), "feature_names": ["a", "a"]}, "feature_names must differ"),
    ],
)
def test_features_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViewPredictions(np.zeros((4, 3, 1)), **options)


def test_other_byte_orders_are_saved(tmp_path: Path) -> None:
    outputs = np.arange(6.0).reshape(3, 2, 1)
    predictions = ViewPredictions(
        outputs.astype(">f4"), ids=np.arange(3, dtype=">i4"), groups=np.arange(3, dtype=">i8")
    )
    predictions.save(tmp_path / "p.parquet")
    loaded = ViewPredictions.load(tmp_path / "p.parquet")
    np.testing.assert_array_equal(loaded.outputs, outputs)
    np.testing.assert_array_equal(loaded.groups, np.arange(3))


def test_selected_views_are_side_by_side_in_memory() -> None:
    predictions = ViewPredictions(np.zeros((5, 4, 3)), names=list("abcd"))
    assert predictions.select(["a", "c"]).outputs.flags.c_contiguous  # a transposed layout makes predictions slow


def test_rows_are_a_slice_a_mask_or_positions() -> None:
    views = ViewPredictions(np.arange(24.0).reshape(4, 3, 2), ids=["a", "b", "c", "d"])
    for rows in (slice(1, 3), [1, 2], np.array([False, True, True, False]), np.array([-3, -2])):
        np.testing.assert_array_equal(views.take(rows).outputs, views.outputs[1:3])
    np.testing.assert_array_equal(views.take(2).ids, ["c"])  # type: ignore[arg-type]
    assert len(views.take([])) == 0  # type: ignore[arg-type]
    prediction = CategoricalPrediction(np.full((4, 2), 0.5), np.zeros(4), np.arange(2))
    for wrong in ([4], [-5], "a", [0.5], np.ones(3, dtype=bool)):
        for taker in (views, prediction):
            with pytest.raises(ValueError, match="rows must be a slice, a mask or positions among 4; got"):
                taker.take(wrong)  # type: ignore[arg-type, attr-defined]


def test_tensors_with_gradients_are_arrays() -> None:
    outputs = torch.zeros(3, 2, 1, requires_grad=True)
    assert ViewPredictions(outputs).outputs.dtype == np.float32
    assert ViewPredictions(outputs.to(torch.bfloat16)).outputs.dtype == np.float32


@pytest.mark.parametrize("name", ["views.txt", "views", "views.csv", "views.NPZ"])
def test_predictions_are_written_only_where_they_can_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"ending of .*{name} must be one of '\.npz', '\.parquet'"):
        ViewPredictions(np.zeros((2, 1, 1))).save(tmp_path / name)
    assert not list(tmp_path.iterdir())
