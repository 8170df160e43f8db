"""View predictions: validated once, selected by name, kept in plain files."""

import io
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vbtta import ViewPredictions
from vbtta.predictions import CategoricalPrediction


def make(**options: object) -> ViewPredictions:
    mean = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    return ViewPredictions(mean, names=["identity", "flip", "noise"], **options)  # type: ignore[arg-type]


def test_single_precision_is_kept_without_a_copy() -> None:
    mean = np.zeros((2, 1, 1), dtype=np.float32)
    assert ViewPredictions(mean).mean is mean
    assert ViewPredictions([[[1]]]).mean.dtype == np.float64


def test_select_and_take() -> None:
    views = make(variance=np.ones((4, 3, 2)), ids=[10, 11, 12, 13])
    chosen = views.select(["noise", "identity"])
    assert chosen.names == ("noise", "identity")
    np.testing.assert_array_equal(chosen.mean, views.mean[:, [2, 0]])
    assert views.select(views.names) is views
    some = views.take(np.array([2, 0]))
    assert some.ids is not None
    assert some.ids.tolist() == [12, 10]
    with pytest.raises(ValueError, match=r"\['rotate'\] are not among"):
        views.select(["rotate"])


def test_concat() -> None:
    views = make(ids=["a", "b", "c", "d"])
    shuffled = ViewPredictions(views.mean[:, ::-1], names=views.names[::-1], ids=["e", "f", "g", "h"])
    both = views.concat(shuffled)
    assert both.mean.shape == (8, 3, 2)
    np.testing.assert_array_equal(both.mean[4:], views.mean)
    assert both.ids is not None
    assert both.ids.tolist() == list("abcdefgh")
    more = ViewPredictions(views.mean[:, :1], names=["blur"], ids=["a", "b", "c", "d"])
    assert views.concat([more], axis="views").names == ("identity", "flip", "noise", "blur")
    with pytest.raises(ValueError, match="different inputs"):
        views.concat(shuffled.select(["noise"]), axis="views")
    with pytest.raises(ValueError, match="some parts have a variance"):
        views.concat(make(variance=np.ones((4, 3, 2))))
    with pytest.raises(ValueError, match="must differ"):
        views.concat(views)


@pytest.mark.parametrize("mmap", [False, True])
def test_files_round_trip(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "views.npz"
    views = make(variance=np.ones((4, 3, 2)), ids=["a", "b", "c", "d"], classes=["cat", "dog"])
    views.save(path)
    again = ViewPredictions.load(path, mmap=mmap)
    assert isinstance(again.mean, np.memmap) == mmap
    np.testing.assert_array_equal(again.mean, views.mean)
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
        np.testing.assert_array_equal(ViewPredictions.load(path, mmap=True).mean, mean)


def test_damaged_and_dangerous_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    with pytest.raises(FileNotFoundError, match="no predictions file"):
        ViewPredictions.load(path)
    path.write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match=r"not an \.npz file"):
        ViewPredictions.load(path)
    with open(path, "wb") as file:
        np.savez(file, other=np.zeros(3))
    with pytest.raises(ValueError, match="no array 'mean'"):
        ViewPredictions.load(path)
    with open(path, "wb") as file:
        np.savez(file, mean=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        ViewPredictions.load(path)
    member = io.BytesIO()
    np.save(member, np.zeros((3, 2, 1)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mean.npy", member.getvalue()[:-8])
    with pytest.raises(ValueError, match="cannot be read"):
        ViewPredictions.load(path)


def test_a_mapped_file_with_nan_is_caught_where_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "nan.npz"
    with open(path, "wb") as file:
        np.savez(file, mean=np.full((3, 2, 1), np.nan))
    with pytest.raises(ValueError, match="must be finite"):
        ViewPredictions.load(path)
    mapped = ViewPredictions.load(path, mmap=True)
    with pytest.raises(ValueError, match="must be finite"):
        mapped.check_finite()


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: ViewPredictions(np.zeros((3, 2))), "last axis of length 1"),
        (lambda: ViewPredictions(np.zeros((3, 0, 1))), "at least one view"),
        (lambda: ViewPredictions(np.zeros((3, 1, 0))), "one output"),
        (lambda: ViewPredictions([[["a"]]]), "real numbers"),
        (lambda: ViewPredictions(np.zeros((2, 1, 1), dtype=complex)), "real numbers"),
        (lambda: ViewPredictions(np.ma.zeros((2, 1, 1))), "masked"),
        (lambda: ViewPredictions([[[1.0]], [[np.nan]]]), "input 1, view 'view_0', output 0 is nan"),
        (lambda: ViewPredictions([[[np.inf]]]), "must be finite"),
        (lambda: ViewPredictions(np.zeros((2, 1, 1)), -np.ones((2, 1, 1))), "not negative"),
        (lambda: ViewPredictions(np.zeros((2, 1, 1)), np.ones((2, 1))), "shaped like mean"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names=["a", "a"]), r"\['a'\] occur more than once"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names=["a"]), "2 strings, one a view"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names="ab"), "list of 2 strings"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), names=3), "list of 2 strings"),  # type: ignore[arg-type]
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), ids=[1]), "2 integers or strings"),
        (lambda: ViewPredictions(np.zeros((2, 2, 1)), ids=[1, 1]), "must differ from each other; '1' occurs"),
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
