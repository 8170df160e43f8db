"""Views to and from dictionaries, TOML and JSON."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbtta import augment
from vbtta.augment import (
    Affine,
    Blur,
    Brightness,
    Chain,
    Contrast,
    Crop,
    FeatureDropout,
    Flip,
    Gamma,
    GaussianNoise,
    HorizontalFlip,
    Identity,
    Mixup,
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
)
from vbtta.augment.base import BuiltIn
from vbtta.augment.keypoints import Keypoints
from vbtta.augment.text import Case, CharacterNoise, Template, WordDropout, WordSwap


@pytest.fixture
def views():
    return [
        Identity(),
        GaussianNoise(0.1, clip=(0, 1)),
        Affine([[1.0, 2.0], [3.0, 4.0]], [0.1, 0.2]),
        FeatureDropout(0.25, fill=1.5),
        FeatureDropout(np.float64(0.9), name='my "own" näme'),
        Chain([HorizontalFlip(), GaussianNoise(0.1), Chain([Rotate(3)])]),
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


def test_every_built_in_view_is_covered(views):
    public = (getattr(augment, name) for name in augment.__all__)
    built_in = {kind.__name__ for kind in public if isinstance(kind, type) and issubclass(kind, BuiltIn)}
    assert built_in | set(text.__all__) >= {type(view).__name__ for view in views} >= built_in - {"CutMix", "Mixup"}


def from_entries(entries, folder):
    (folder / "views.json").write_text(json.dumps({"views": entries}))
    return load_views(folder / "views.json")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_files_round_trip(views, tmp_path, suffix):
    save_views(views, tmp_path / f"views.{suffix}")
    again = load_views(tmp_path / f"views.{suffix}")
    assert again == views
    assert [view.name for view in again] == [view.name for view in views]


@pytest.mark.parametrize("make", [standard_images, d4])
def test_sets_round_trip(make, tmp_path):
    save_views(make(), tmp_path / "views.toml")
    assert load_views(tmp_path / "views.toml") == make()


def test_a_file_written_by_hand_is_short(tmp_path):
    (tmp_path / "views.toml").write_text('[[views]]\nview = "Identity"\n\n[[views]]\nview = "Rotate"\ndegrees = 15\n')
    assert [view.name for view in load_views(tmp_path / "views.toml")] == ["identity", "rotate(+15)"]


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
        ({"view": "Chain", "views": []}, "Chain needs at least one view"),
        ({"view": "Affine", "A": [[1.0]], "digest": "x"}, "no parameter digest"),
    ],
)
def test_wrong_descriptions_are_named(entry, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        from_entries([entry], tmp_path)


def test_wrong_files_are_named(tmp_path, views):
    with pytest.raises(FileNotFoundError, match=r"file of views .*none.toml not found"):
        load_views(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[[views\n")
    with pytest.raises(ValueError, match=r"bad.toml: "):
        load_views(tmp_path / "bad.toml")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list.json: the file must hold a list"):
        load_views(tmp_path / "list.json")
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ValueError, match=r'empty.json: .*key "views"'):
        load_views(tmp_path / "empty.json")
    with pytest.raises(ValueError, match=r"ending of .*views.yaml must be one of '\.toml', '\.json'"):
        save_views(views, tmp_path / "views.yaml")
    with pytest.raises(ValueError, match="identity occurs more than once"):
        from_entries([{"view": "Identity"}, {"view": "Identity"}], tmp_path)


def test_what_cannot_be_written_says_what_to_do(tmp_path):
    with pytest.raises(TypeError, match=r"mixup\(0.5\) .* has a pool and cannot be written to a file; keep the Python"):
        save_views([Mixup(0.5, np.ones((2, 2)))], tmp_path / "views.toml")
    double = as_view(lambda x: 2 * x, "double")
    for view in (double, Chain([Identity(), double])):
        with pytest.raises(TypeError, match=r"view double .* is not a built-in view"):
            save_views([view], tmp_path / "views.toml")


def test_a_name_in_a_file_is_a_string(tmp_path):
    with pytest.raises(ValueError, match="Identity: name must be a string; got 3"):
        from_entries([{"view": "Identity", "name": 3}], tmp_path)
