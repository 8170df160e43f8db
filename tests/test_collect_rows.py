"""Inputs with one entry a row: texts, pictures, ragged rows, columns of tables; and views of texts."""

from collections import UserDict
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from vbtta import VBTTAClassifier, VBTTARegressor, collect_views, measure_cost
from vbtta.augment import (
    FeatureDropout,
    GaussianNoise,
    HorizontalFlip,
    Identity,
    RowStreams,
    as_view,
    load_views,
    save_views,
)
from vbtta.augment.text import Case, CharacterNoise, Paraphrase, Template, WordDropout, WordSwap, paraphrases

TEXTS = ["a good film", "the plot is thin", "fine", "not a good film at all"]
LENGTHS = np.array([float(len(text)) for text in TEXTS])


def lengths(batch):
    return [float(len(text)) for text in batch]


def longer(batch):
    return [text + "!" for text in batch]


@pytest.mark.parametrize("of", [list, tuple, np.array, pd.Series, lambda texts: pd.Series(texts, index=[9, 7, 5, 3])])
def test_texts_are_rows(of):
    predictions = collect_views(lengths, of(TEXTS), [Identity(), as_view(longer), Case("upper")], batch_size=3)
    np.testing.assert_array_equal(predictions.outputs[:, :, 0].T, [LENGTHS, LENGTHS + 1, LENGTHS])
    assert set(measure_cost(lengths, of(TEXTS), [Identity()], repeats=1)) == {"identity"}


def test_texts_in_dicts_and_loaders():
    for inputs in ({"text": TEXTS, "n": np.arange(4)}, [{"text": text, "n": n} for n, text in enumerate(TEXTS)]):
        predictions = collect_views(lambda batch: lengths(batch["text"]), inputs, [Identity(), Template("{}!")])
        np.testing.assert_array_equal(predictions.outputs[:, 1, 0], LENGTHS + 1)
        predictions = collect_views(lambda batch: lengths(batch["text"]), inputs, [as_view(longer)], key="text")
        np.testing.assert_array_equal(predictions.outputs[:, 0, 0], LENGTHS + 1)
    labelled = ([part, np.zeros(2)] for part in (TEXTS[:2], TEXTS[2:]))  # as a DataLoader of pairs gives them
    np.testing.assert_array_equal(collect_views(lengths, labelled, [Identity()]).outputs[:, 0, 0], LENGTHS)
    with pytest.raises(ValueError, match="view upper takes texts; row 0 is 1: make it a text or drop it"):
        Case("upper")([1])
    with pytest.raises(ValueError, match="view upper takes texts; row 1 is None"):
        collect_views(lengths, ["a", None, "b"], [Case("upper")])
    pairs = {"question": ["a", "b"], "answer": ["c", "d"]}
    with pytest.raises(ValueError, match="got a dict of 'question', 'answer': pass key="):
        collect_views(lambda batch: lengths(batch["answer"]), pairs, [Identity(), Case("upper")])
    with pytest.raises(ValueError, match="view one returned a str; return an array, or a list of texts"):
        collect_views(lengths, ["a", "b"], [Identity(), as_view(lambda texts: "ab", "one")])


def test_pictures_and_signals_of_different_sizes_are_rows():
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (8 + i, 6, 3), dtype=np.uint8)) for i in range(4)]

    def turned(batch):
        return [picture.rotate(90, expand=True) for picture in batch]

    collected = collect_views(lambda batch: [float(p.size[0]) for p in batch], pictures, [Identity(), as_view(turned)])
    np.testing.assert_array_equal(collected.outputs[:, :, 0], [[6, 8], [6, 9], [6, 10], [6, 11]])
    signals = [rng.normal(size=size) for size in (5, 9, 7)]
    for batch_size in (1, 3):
        collected = collect_views(lambda batch: [s.sum() for s in batch], signals, [Identity()], batch_size=batch_size)
        np.testing.assert_allclose(collected.outputs[:, 0, 0], [signal.sum() for signal in signals])
    images = [rng.normal(size=(3, 5 + i, 6)) for i in range(4)]
    collected = collect_views(lambda batch: [i.mean() for i in batch], images, [Identity()], batch_size=3)
    np.testing.assert_allclose(collected.outputs[:, 0, 0], [image.mean() for image in images])
    with pytest.raises(TypeError, match="list of arrays, which may be rows or batches"):
        collect_views(lambda batch: batch.mean(axis=(1, 2)), [np.ones((4, 2, 2)), np.ones((3, 2, 2))], [Identity()])


@pytest.mark.parametrize("kind", [dict, UserDict])  # BatchFeature of transformers is a UserDict
def test_lists_of_arrays_in_a_dict_are_stacked(kind):
    rng = np.random.default_rng(0)
    images = [rng.normal(size=(3, 5, 6)) for _ in range(4)]
    for part in (images, [torch.as_tensor(image) for image in images]):
        predictions = collect_views(lambda b: b["pixel_values"].mean((1, 2, 3)), kind(pixel_values=part), [Identity()])
        np.testing.assert_allclose(predictions.outputs[:, 0, 0], [image.mean() for image in images])
    unequal = kind(pixel_values=[rng.normal(size=(3, 5 + i, 6)) for i in range(4)])
    predictions = collect_views(lambda b: [i.mean() for i in b["pixel_values"]], unequal, [Identity()], batch_size=3)
    np.testing.assert_allclose(predictions.outputs[:, 0, 0], [image.mean() for image in unequal["pixel_values"]])


SIZED = {
    "random": (),
    "standard_normal": (),
    "exponential": (2.0,),
    "poisson": (3.0,),
    "choice": (5,),
    "normal": (1.0, 2.0),
    "uniform": (1.0, 2.0),
    "integers": (0, 5),
    "beta": (1.0, 2.0),
    "gamma": (1.0, 2.0),
}


def test_functions_draw_as_from_a_generator_of_numpy():
    def noisy(batch, rng):
        return batch + rng.normal(0.0, 0.1, size=batch.shape) + rng.poisson(3.0, size=batch.shape)

    def thinned(batch, rng):  # ragged rows, one generator each
        rows = zip(batch, rng, strict=True)
        return [[v for v, u in zip(row, own.random(len(row)), strict=True) if u < 0.5] for row, own in rows]

    def lengths(rows):
        return [float(len(row)) for row in rows]

    inputs = np.zeros((40, 3))
    whole, parts = (collect_views(lambda x: x, inputs, [as_view(noisy)], batch_size=size).outputs for size in (40, 7))
    np.testing.assert_array_equal(whole, parts)
    assert abs(whole.mean() - 3) < 4 * np.sqrt(3.01 / 120)
    ragged = [list(range(size)) for size in (20, 30, 10, 25)]
    whole, parts = (collect_views(lengths, ragged, [as_view(thinned)], batch_size=size).outputs for size in (4, 1))
    np.testing.assert_array_equal(whole, parts)
    assert 0 < whole.sum() < 85
    streams = RowStreams(0, "view", 0, range(6))
    assert streams.uniform(2, 3, size=(6, 4)).min() > 2
    assert set(streams.integers(1, 3, size=(6, 50)).ravel()) == {1, 2}
    assert streams.choice(5, size=(6, 2)).shape == streams.random((6, 2)).shape == (6, 2)
    assert streams.permutation(4).shape == (6, 4)
    spread = np.arange(1.0, 7.0)
    assert streams.normal(0.0, spread).shape == streams.uniform(0.0, spread).shape == (6,)
    assert set(streams.integers(0, 1, (6, 50), endpoint=True).ravel()) == {0, 1}
    by_name, by_place = (RowStreams(0, "view", 0, range(6)) for _ in range(2))
    shape = (6, 3)
    for name, parameters in SIZED.items():
        expected = getattr(by_name, name)(*parameters, size=shape)
        np.testing.assert_array_equal(getattr(by_place, name)(*parameters, shape), expected)
        assert expected.shape == shape
    first, again = ([generator.random() for generator in streams] for _ in range(2))
    assert len(set(first + again)) == 12
    with pytest.raises(ValueError, match=r"size must begin with the number of rows, 6; got \(3,\)"):
        streams.normal(size=(3,))
    with pytest.raises(AttributeError, match="iterate over it"):
        streams.shuffle([1])


def test_an_iterator_of_texts_gives_rows_and_one_of_lists_batches():
    def lengths(texts):
        return np.array([[float(len(text))] for text in texts])

    texts = ["two", "texts", "more"]
    expected = collect_views(lengths, texts, [Identity()]).outputs
    for inputs in ((text for text in texts), iter([texts[:2], texts[2:]])):
        np.testing.assert_array_equal(collect_views(lengths, inputs, [Identity()], batch_size=2).outputs, expected)


def test_views_of_texts_do_what_they_say(tmp_path):
    text = " ".join(f"word{i}" for i in range(400))

    def under(view):
        return view([text], RowStreams(0, view.name, 0, [0]))[0]

    words = under(WordDropout(0.3)).split()
    assert set(words) < set(text.split())
    assert abs(len(words) - 280) < 5 * np.sqrt(400 * 0.21)
    assert under(WordDropout(0.999999)).count(" ") == 0 != len(under(WordDropout(0.999999)))
    swapped = under(WordSwap(0.3)).split()
    assert sorted(swapped) == sorted(text.split()) != swapped
    misspelt = under(CharacterNoise(0.05))
    assert 0 < sum(a != b for a, b in zip(misspelt.split(), text.split(), strict=True)) < 200
    assert Template("It says: {}.")(["x"]) == ["It says: x."]
    assert Template("{}").name == "identity"
    first_view, two = paraphrases({"a": ["b", "c"]})
    assert (first_view.name, first_view(["a"]), two(["a"])) == ("paraphrase_1", ["b"], ["c"])
    with pytest.raises(ValueError, match="no paraphrase of 'z'"):
        first_view(["z"])
    for wrong in (lambda: Template("x"), lambda: WordDropout(0), lambda: Case("loud"), lambda: paraphrases({"a": "b"})):
        with pytest.raises(ValueError, match="must"):
            wrong()
    views = [Identity(), WordDropout(0.1), WordSwap(0.2), CharacterNoise(0.1), Case("lower"), Template("Say: {}")]
    save_views(views, tmp_path / "views.toml")
    assert load_views(tmp_path / "views.toml") == views
    assert Paraphrase({"a": "b"}).fingerprint_data() == "Paraphrase"


def test_estimators_of_texts_and_of_mixed_tables():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, size=120)
    words = np.array([["dull", "weak", "film"], ["fine", "warm", "film"]])
    texts = [" ".join(rng.choice(words[label], size=5)) for label in y]
    options = {"cv": 3, "model": "mixture", "guard": False}
    for inputs in (texts, pd.Series(texts, index=np.arange(120)[::-1])):
        pipeline = make_pipeline(TfidfVectorizer(), LogisticRegression())
        weighted = VBTTAClassifier(pipeline, [Identity(), WordDropout(0.2)], **options).fit(inputs, y)
        assert weighted.score(inputs, y) > 0.9
    table = pd.DataFrame({"x": rng.normal(size=120), "kind": words[y, 0], "n": y, "flag": y > 0})
    encoder = make_column_transformer((OneHotEncoder(), ["kind"]), remainder="passthrough")
    views = [Identity(), GaussianNoise(0.1), FeatureDropout(0.2)]
    mixed = VBTTAClassifier(make_pipeline(encoder, LogisticRegression()), views, **options)
    assert mixed.fit(table, pd.Series(y, index=table.index)).score(table, y) == 1
    with pytest.raises(ValueError, match=r"same pandas index in another order: use y\.loc\[X\.index\]"):
        mixed.fit(table, pd.Series(y).sample(frac=1, random_state=0))
    numbers = table[["x", "n", "flag"]]
    regressor = VBTTARegressor(LinearRegression(), views, **options).fit(numbers, table.x + 0.1 * rng.normal(size=120))
    low, high = regressor.predict_interval(numbers, level=0.8)
    assert low.shape == (120,)
    assert 0.6 < np.mean((low < table.x) & (table.x < high)) <= 1


def test_lists_of_arrays_are_not_guessed_to_be_rows_or_batches() -> None:
    rows = [np.ones(4)] * 6
    with pytest.raises(TypeError, match=r"rows or batches: stack rows, as np\.stack\(inputs\)"):
        collect_views(lambda batch: np.asarray(batch), rows, [Identity()])
    assert collect_views(lambda batch: np.asarray(batch), np.stack(rows), [Identity()]).outputs.shape == (6, 1, 4)


def test_a_list_of_dicts_of_arrays_has_one_input_a_dict() -> None:
    rows = [{"x": np.full(4, float(n)), "mask": np.ones(4)} for n in range(6)]
    predictions = collect_views(lambda batch: batch["x"] * batch["mask"], rows, [Identity()], batch_size=4)
    assert predictions.outputs[:, 0].tolist() == [row["x"].tolist() for row in rows]
    with pytest.raises(TypeError, match="rows or batches"):
        collect_views(lambda batch: batch["x"], [*rows, {"x": np.ones(4)}], [Identity()])


def test_arrow_tables_and_columns_are_inputs() -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(30, 2)), columns=["a", "b"])
    model, views = LinearRegression().fit(table, rng.normal(size=30)), [Identity(), GaussianNoise(0.1)]
    expected = collect_views(model, table, views).outputs
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    of_arrow, nullable = table.convert_dtypes(dtype_backend="pyarrow"), table.convert_dtypes()
    for inputs in (arrow, arrow.to_batches()[0], of_arrow, nullable):
        np.testing.assert_array_equal(collect_views(model, inputs, views, batch_size=7).outputs, expected)
    for inputs in (table, of_arrow, nullable):  # beside words, too
        outputs = collect_views(lambda rows: np.asarray(rows["a"], float), inputs.assign(word="x"), views).outputs
        noise = collect_views(lambda rows: rows["a"], table, views).outputs
        np.testing.assert_array_equal(outputs, noise)
    gappy = nullable.assign(a=nullable["a"].where(nullable["a"] > 0))
    trees = HistGradientBoostingRegressor(min_samples_leaf=5).fit(gappy, expected[:, 0, 0])
    np.testing.assert_array_equal(collect_views(trees, gappy, views).outputs[:, 0, 0], trees.predict(gappy))
    missing = collect_views(lambda rows: rows["a"].isna(), gappy.assign(word="x"), views).outputs
    np.testing.assert_array_equal(missing[:, 1, 0], gappy["a"].isna())
    for texts in (pa.array(TEXTS), pa.chunked_array([TEXTS[:1], TEXTS[1:]])):
        upper = collect_views(lengths, texts, [Identity(), Case("upper")], batch_size=3)
        np.testing.assert_array_equal(upper.outputs[:, 1, 0], LENGTHS)


def test_estimators_of_tables_take_dicts_of_their_columns() -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(30, 2)), columns=["a", "b"])
    model, views = LinearRegression().fit(table, rng.normal(size=30)), [Identity(), GaussianNoise(0.1)]
    expected = collect_views(model, table, views).outputs
    rows = table.assign(name="x")[["name", "b", "a"]]
    for inputs in (rows.to_dict("records"), rows.to_dict("list"), iter([rows.to_dict("list")])):
        np.testing.assert_array_equal(collect_views(model, inputs, views, batch_size=7).outputs, expected)
    with pytest.raises(ValueError, match=r"inputs have the columns \['a'\]; the estimator was fitted to \['a', 'b'\]"):
        collect_views(model, table[["a"]].to_dict("list"), views)


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_a_column_of_a_table_is_the_part_that_views_work_on(kind: str) -> None:
    table: Any = pd.DataFrame({"text": TEXTS, "n": np.arange(4.0)})
    if kind == "polars":
        table = pytest.importorskip("polars").from_pandas(table)
    views = [Identity(), Case("upper"), as_view(longer)]
    outputs = collect_views(lambda batch: lengths(batch["text"]), table, views, key="text", batch_size=3).outputs
    np.testing.assert_array_equal(outputs[:, :, 0].T, [LENGTHS, LENGTHS, LENGTHS + 1])
    changed = collect_views(lambda batch: np.asarray(batch["n"]), table, [GaussianNoise(1.0)], key="n").outputs
    assert (changed[:, 0, 0] != np.arange(4)).all()
    with pytest.raises(ValueError, match="key='words' is not among the parts of the batch: 'text', 'n'"):
        collect_views(lambda batch: lengths(batch["text"]), table, views, key="words")


def test_views_of_arrays_pass_over_the_texts_of_a_dict() -> None:
    batch = {"image": torch.rand(4, 1, 2, 2), "file": ["a", "b", "c", "d"]}
    outputs = collect_views(lambda part: part["image"][:, 0, 0], batch, [Identity(), HorizontalFlip()]).outputs
    np.testing.assert_array_equal(outputs[:, 0], outputs[:, 1, ::-1])
    outputs = collect_views(lambda part: lengths(part["file"]), batch, [Template("{}!")]).outputs
    np.testing.assert_array_equal(outputs[:, 0, 0], 2)
    batch["mask"] = torch.rand(4, 1, 2, 2)
    with pytest.raises(TypeError, match=r"view hflip does not take a dict of 'image', 'file', 'mask' .*key="):
        collect_views(lambda part: part["image"][:, 0, 0], batch, [HorizontalFlip()])


def test_functions_that_take_no_dict_say_how_they_get_a_part() -> None:
    batch = {"image": torch.rand(4, 1, 2, 2), "label": torch.arange(4)}
    mirror = as_view(lambda images: images.flip(-1), "mirror")
    with pytest.raises(TypeError, match=r"mirror does not take a dict of 'image', 'label' .*attribute 'flip'.*key="):
        collect_views(lambda part: part["image"][:, 0, 0], batch, [mirror])
    outputs = collect_views(lambda part: part["image"][:, 0, 0], batch, [Identity(), mirror], key="image").outputs
    np.testing.assert_array_equal(outputs[:, 0], outputs[:, 1, ::-1])


def test_logits_are_found_among_the_outputs_of_a_function() -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    outputs = collect_views(lambda batch: {"loss": None, "logits": batch}, x, [Identity()]).outputs[:, 0]
    np.testing.assert_array_equal(outputs, x)
    named = collect_views(lambda batch: {"logits": batch, "depth": -batch}, x, [Identity()], output="depth")
    np.testing.assert_array_equal(named.outputs[:, 0], -x)
    with pytest.raises(ValueError, match=r"several outputs \('logits', 'depth'\); choose one"):
        collect_views(lambda batch: {"logits": None, "depth": -batch}, x, [Identity()])


def test_a_module_that_does_not_take_a_dict_names_its_parts() -> None:
    class Network(torch.nn.Module):
        def forward(self, pixels: Any = None, **options: Any) -> Any:
            return pixels.flatten(1)

    with pytest.raises(TypeError, match=r"does not take the parts image, label; give .*no attribute 'flatten'"):
        collect_views(Network(), {"image": torch.rand(4, 1, 2, 2), "label": torch.arange(4)}, [Identity()])


def test_inputs_whose_parts_would_be_mistaken_are_refused() -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    with pytest.raises(ValueError, match=r"inputs is a masked array: fill its gaps, as inputs\.filled"):
        collect_views(lambda batch: batch, np.ma.masked_array(x, x > 0), [Identity()])
    with pytest.raises(TypeError, match=r"noise\(0.1\) does not take a tuple .*: give its parts as a dict, and key="):
        collect_views(lambda batch: batch[0] + batch[1], (x, x), [GaussianNoise(0.1)])
    nothing: list[Any] = [[], {}, np.zeros((0, 3))]
    for empty in nothing:
        with pytest.raises(ValueError, match="inputs are empty; there must be at least one row"):
            collect_views(lambda batch: batch, empty, [Identity()])
    with pytest.raises(ValueError, match="ids is a table of ids alone; give it as a column, or add one of values"):
        collect_views(lambda batch: batch, x, [Identity()], ids=pd.DataFrame({"id": np.arange(5)}))
    with pytest.raises(FileNotFoundError, match=r"no ONNX file at network\.pt; other networks are given as objects"):
        collect_views("network.pt", x, [Identity()])


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_images_with_their_colours_last_are_refused(kind: Any) -> None:
    images = kind(np.random.default_rng(0).random((4, 16, 12, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"hflip takes images \(N, C, H, W\); \(4, 16, 12, 3\) has its colours last"):
        collect_views(lambda batch: batch.reshape(4, -1)[:, :2], images, [Identity(), HorizontalFlip()])
    narrow = kind(np.random.default_rng(0).random((4, 3, 12, 3), dtype=np.float32))
    mirrored = collect_views(lambda batch: batch[:, :, 0, 0], narrow, [HorizontalFlip()]).outputs
    np.testing.assert_array_equal(mirrored[:, 0], np.asarray(narrow)[:, :, 0, 2])


def test_built_in_views_of_rows_of_different_lengths_name_the_remedy():
    signals = [np.zeros(5), np.zeros(7), np.zeros(6)]
    with pytest.raises(TypeError, match=r"noise\(0\.1\) does not take a list of ndarray .* as_view\(f\) of such"):
        collect_views(lambda batch: np.ones((len(batch), 2)), signals, [GaussianNoise(0.1)])


@pytest.mark.parametrize("options", [{}, {"key": "review"}])
def test_an_estimator_of_texts_asks_for_one_column_of_a_table(options):
    texts = ["good film", "bad plot", "good plot", "bad film"] * 5
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, [0, 1] * 10)
    table = pd.DataFrame({"review": texts, "stars": 1})
    with pytest.raises(ValueError, match="or give it one column of a table"):
        collect_views(model, table, [Identity()], **options)
    assert collect_views(model, table["review"], [Identity()]).outputs.shape == (20, 1, 2)
