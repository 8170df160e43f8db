"""Views to and from dictionaries, TOML and JSON."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbtta import augment
from vbtta._support.random import RowStreams
from vbtta.augment import (
    Affine,
    Blur,
    Brightness,
    Chain,
    Contrast,
    Crop,
    CutMix,
    FeatureDropout,
    Flip,
    Gamma,
    GaussianNoise,
    HorizontalFlip,
    Identity,
    Mixup,
    Pool,
    Rotate,
    Rotate90,
    Shift,
    VerticalFlip,
    Zoom,
    as_view,
    d4,
    load_views,
    save_views,
    standard_images,
    text,
    views_from_dict,
    views_to_dict,
)
from vbtta.augment.base import BuiltIn
from vbtta.augment.keypoints import Keypoints
from vbtta.augment.text import Case, CharacterNoise, Template, WordDropout, WordSwap


def every_view(pool):
    return [
        Identity(),
        GaussianNoise(0.1, clip=(0, 1)),
        Affine([[1.0, 2.0], [3.0, 4.0]], [0.1, 0.2]),
        FeatureDropout(0.25, fill=1.5),
        Mixup(0.5, pool),
        CutMix(np.float64(0.9), pool, name='my "own" näme'),
        Chain([HorizontalFlip(), Mixup(0.1, pool), Chain([Rotate(3)])]),
        HorizontalFlip(),
        HorizontalFlip(swap_classes=[(1, 2), (3, 4)]),
        Flip((0, 2), name="depth and width"),
        VerticalFlip(),
        Rotate90(3),
        Rotate(-12.5, "zeros"),
        Zoom(1.1, padding="border"),
        Shift(0.1, -0.2),
        Crop("bottom_left", 0.8),
        Blur(0.7),
        Brightness(0.1, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2)),
        Contrast(0.8),
        Gamma(1.3, name="dark"),
        Keypoints([HorizontalFlip(), Rotate(3)], (8, 10), swap_classes=[(0, 1)]),
        WordDropout(0.1),
        WordSwap(0.1),
        CharacterNoise(0.1, name="typos"),
        Case("lower"),
        Template("Review: {}"),
    ]


@pytest.fixture
def views(tmp_path):
    (tmp_path / "data").mkdir()
    return every_view(Pool.save(np.arange(8.0).reshape(4, 2), tmp_path / "data" / "pool.npy"))


def test_every_built_in_view_is_covered(views):
    public = (getattr(augment, name) for name in augment.__all__)
    built_in = {kind.__name__ for kind in public if isinstance(kind, type) and issubclass(kind, BuiltIn)}
    assert built_in | set(text.__all__) >= {type(view).__name__ for view in views} >= built_in


def test_dictionaries_round_trip_through_json_and_back(views):
    described = views_to_dict(views)
    again = views_from_dict(json.loads(json.dumps(described)))
    assert again == views
    assert [view.name for view in again] == [view.name for view in views]
    assert views_to_dict(again) == described


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_files_round_trip_and_can_move_with_their_folder(views, tmp_path, suffix):
    folder = tmp_path / "old"
    (tmp_path / "data").rename(folder)
    moved = every_view(Pool.load(folder / "pool.npy"))
    save_views(moved, folder / f"views.{suffix}")
    assert load_views(folder / f"views.{suffix}") == moved
    folder.rename(tmp_path / "new")
    again = load_views(tmp_path / "new" / f"views.{suffix}")
    assert views_to_dict(again[:4]) == views_to_dict(moved[:4])
    mixup, before = (next(view for view in some if isinstance(view, Mixup)) for some in (again, moved))
    assert mixup.pool.sha256 == before.pool.sha256
    rows = np.zeros((3, 2))
    streams = [RowStreams(0, "mixup(0.5)", 0, range(3)) for _ in range(2)]
    np.testing.assert_array_equal(mixup(rows, streams[0]), Mixup(0.5, np.arange(8.0).reshape(4, 2))(rows, streams[1]))


def test_pool_elsewhere_is_found_by_its_full_path(views, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    save_views(views, folder / "views.toml")
    assert load_views(folder / "views.toml") == views


@pytest.mark.parametrize("make", [standard_images, d4])
def test_sets_round_trip(make, tmp_path):
    save_views(make(), tmp_path / "views.toml")
    assert load_views(tmp_path / "views.toml") == make()


def test_a_file_written_by_hand_is_short(tmp_path):
    np.save(tmp_path / "pool.npy", np.ones((2, 2)))
    (tmp_path / "views.toml").write_text(
        '[[views]]\nview = "Identity"\n\n[[views]]\nview = "Rotate"\ndegrees = 15\n\n'
        '[[views]]\nview = "Mixup"\nalpha = 0.5\npool = "pool.npy"\n'
    )
    assert [view.name for view in load_views(tmp_path / "views.toml")] == [
        "identity",
        "rotate(+15)",
        "mixup(0.5)",
    ]


@given(
    words=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="{}"), max_size=20),
    value=st.floats(allow_nan=False, allow_infinity=False, max_value=0.0),
)
def test_texts_and_numbers_of_toml_files_read_back(words, value):
    numbers = Affine([[value]], name="numbers"), GaussianNoise(1, clip=(value, 1))
    views = [text.Template(words + "{}", name="text"), *numbers]
    with tempfile.TemporaryDirectory() as folder:
        save_views(views, Path(folder) / "views.toml")
        assert load_views(Path(folder) / "views.toml") == views


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"view": "Rotat"}, "unknown view 'Rotat'; there are Affine, Blur"),
        ({"degrees": 3}, 'needs the key "view"'),
        ({"view": "Rotate", "angle": 3}, "view Rotate has no parameter angle; it has degrees, name, padding"),
        ({"view": "Rotate"}, "view Rotate: .*degrees"),
        ({"view": "Rotate", "degrees": "a"}, "Rotate: degrees must be a finite number; got 'a'"),
        ({"view": "Mixup", "alpha": 0.5, "pool": 3}, "a pool is described by path and sha256; got 3"),
        ({"view": "Chain", "views": []}, "Chain needs at least one view"),
        ({"view": "Affine", "A": [[1.0]], "digest": "x"}, "no parameter digest"),
    ],
)
def test_wrong_descriptions_are_named(entry, message):
    with pytest.raises(ValueError, match=message):
        views_from_dict({"views": [entry]})


def test_wrong_files_are_named(tmp_path, views):
    with pytest.raises(FileNotFoundError, match=r"file of views .*none.toml not found"):
        load_views(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[[views\n")
    with pytest.raises(ValueError, match=r"bad.toml: "):
        load_views(tmp_path / "bad.toml")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list.json: the file must hold a table"):
        load_views(tmp_path / "list.json")
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ValueError, match=r'empty.json: .*key "views"'):
        load_views(tmp_path / "empty.json")
    with pytest.raises(ValueError, match=r"\.toml or \.json files; got .*views.yaml"):
        save_views(views, tmp_path / "views.yaml")
    with pytest.raises(ValueError, match="identity occurs more than once"):
        views_from_dict({"views": [{"view": "Identity"}, {"view": "Identity"}]})


def test_what_cannot_be_written_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"mixup\(0.5\) has a pool in memory.*Pool.save"):
        views_to_dict([Mixup(0.5, np.ones((2, 2)))])
    double = as_view(lambda x: 2 * x, "double")
    for view in (double, Chain([Identity(), double])):
        with pytest.raises(TypeError, match=r"view double .* is not a built-in view"):
            views_to_dict([view])


def test_a_changed_pool_is_refused(views, tmp_path):
    save_views(views, tmp_path / "views.toml")
    np.save(tmp_path / "data" / "pool.npy", np.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"views.toml: pool file .* not the pool these views were made with"):
        load_views(tmp_path / "views.toml")


def test_a_name_in_a_file_is_a_string():
    with pytest.raises(ValueError, match="Identity: name must be a string; got 3"):
        views_from_dict({"views": [{"view": "Identity", "name": 3}]})
