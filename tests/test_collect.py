"""collect_views: the same numbers whatever the batches, one batch of memory, errors that name view and row."""

import tracemalloc
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from vbtta import TTAModule, collect_dense, fit_policy
from vbtta._support.fingerprints import view_fingerprint
from vbtta.augment import (
    Affine,
    Brightness,
    Chain,
    CutMix,
    FeatureDropout,
    Gamma,
    GaussianNoise,
    HorizontalFlip,
    Identity,
    Mixup,
    Pool,
    as_view,
)
from vbtta.collect import collect_views, measure_cost
from vbtta.data.predictions import ViewPredictions


@pytest.fixture(scope="module")
def inputs():
    return np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


@pytest.fixture(scope="module")
def views(inputs):
    return [Identity(), GaussianNoise(0.2), Mixup(0.5, inputs), CutMix(0.5, inputs), FeatureDropout(0.3)]


@pytest.fixture(scope="module")
def reference(network, inputs, views):
    return collect_views(network, inputs, views, draws=3, seed=7, keep_draws=9)


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_batch_size_does_not_matter(network, inputs, views, reference, batch_size):
    predictions = collect_views(network, inputs, views, draws=3, seed=7, keep_draws=9, batch_size=batch_size)
    np.testing.assert_allclose(predictions.outputs, reference.outputs, atol=1e-5)
    np.testing.assert_allclose(predictions.variance, reference.variance, atol=1e-5)
    np.testing.assert_allclose(predictions.draws, reference.draws, atol=1e-5)


def test_source_does_not_matter(network, inputs, views, reference):
    tensor = torch.from_numpy(inputs)
    labelled = TensorDataset(tensor, torch.arange(len(tensor)))
    sources = [
        DataLoader(tensor, batch_size=11),
        DataLoader(labelled, batch_size=11),
        (tensor[start : start + 9] for start in range(0, 40, 9)),
        tensor,
    ]
    for source in sources:
        predictions = collect_views(network, source, views, draws=3, seed=7)
        np.testing.assert_allclose(predictions.outputs, reference.outputs, atol=1e-5)
        np.testing.assert_allclose(predictions.variance, reference.variance, atol=1e-5)


def test_seed_matters_and_moments_are_those_of_the_draws(network, inputs, views, reference):
    other = collect_views(network, inputs, views, draws=3, seed=8)
    assert np.abs(other.outputs[:, 1:] - reference.outputs[:, 1:]).min(axis=(0, 2)).max() > 0
    np.testing.assert_allclose(other.outputs[:, 0], reference.outputs[:, 0])
    assert reference.draws.shape == (9, 5, 3, 3)
    np.testing.assert_allclose(reference.draws.mean(axis=2), reference.outputs[:9], atol=1e-6)
    np.testing.assert_allclose(reference.draws.var(axis=2, ddof=1), reference.variance[:9], atol=1e-6)


def test_one_draw_has_no_variance(network, inputs):
    assert collect_views(network, inputs, [Identity(), GaussianNoise(0.2)]).variance is None
    assert collect_views(network, inputs, [Identity()], draws=5).variance is None


def test_draws_and_fingerprints_survive_files_and_choices(reference, tmp_path):
    reference.save(tmp_path / "views.npz")
    loaded = ViewPredictions.load(tmp_path / "views.npz")
    np.testing.assert_array_equal(loaded.draws, reference.draws)
    assert loaded.fingerprints == reference.fingerprints
    subset = loaded.select(["noise(0.2)"])
    assert subset.draws.shape == (9, 1, 3, 3)
    assert list(subset.fingerprints) == ["noise(0.2)"]
    assert loaded.take(np.arange(3)).draws is None
    both = loaded.select(["identity"]).concat(subset, axis="views")
    assert set(both.fingerprints) == {"identity", "noise(0.2)"}
    with pytest.raises(ValueError, match="draws must be"):
        ViewPredictions(np.zeros((2, 1, 1)), draws=np.zeros((3, 1, 4, 1)))


def test_fingerprints_tell_parameters_apart(inputs):
    pool = Pool(inputs)
    assert view_fingerprint(Mixup(0.5, pool)) == view_fingerprint(Mixup(0.5, Pool(inputs.copy())))
    assert view_fingerprint(Mixup(0.5, pool)) != view_fingerprint(Mixup(0.5, Pool(inputs + 1)))
    assert view_fingerprint(GaussianNoise(1)) == view_fingerprint(GaussianNoise(1.0))
    assert view_fingerprint(Affine(np.eye(2))) != view_fingerprint(Affine(2 * np.eye(2)))
    assert view_fingerprint(as_view(lambda x: 2 * x, name="double")) == "-"


def test_partial_functions_are_told_apart_by_their_arguments():
    prints = [view_fingerprint(as_view(partial(np.roll, shift=n, axis=1), name="roll")) for n in (1, 1, 2)]
    assert prints[0] == prints[1] != prints[2]
    assert view_fingerprint(as_view(partial(np.roll, shift=lambda: 1), name="roll")) == "-"


def test_memory_is_the_result_and_one_batch():
    """20,000 images under 16 views: below twice the output plus one batch."""
    images = np.zeros((20_000, 1, 16, 16), dtype=np.float32)
    views = [Identity(), *(as_view(lambda x, k=k: x + k, name=f"plus {k}") for k in range(1, 16))]
    batch_size, outputs = 256, 10

    def model(batch):
        return batch.reshape(len(batch), -1)[:, :outputs]

    tracemalloc.start()
    try:
        result = collect_views(model, images, views, batch_size=batch_size)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    one_batch = 4 * batch_size * images[0].nbytes  # the batch, its view, the view's check, slack
    assert peak < 2 * result.outputs.nbytes + one_batch

    tracemalloc.start()
    try:
        stream = (images[start : start + batch_size] for start in range(0, len(images), batch_size))
        collect_views(model, stream, views)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * result.outputs.nbytes + one_batch


def test_ids_and_classes_are_carried(inputs):
    collected = collect_views(lambda x: x[:, :2], inputs, [Identity()], ids=np.arange(40) + 100, classes=["no", "yes"])
    assert collected.ids[0] == 100  # type: ignore[index]
    assert list(collected.classes) == ["no", "yes"]


def test_progress_goes_to_the_error_stream(inputs, capsys):
    collect_views(lambda x: x, inputs, [Identity()], progress=True)
    assert "40 of 40 inputs" in capsys.readouterr().err


def test_costs_are_positive_and_named(inputs):
    cost = measure_cost(lambda x: x, inputs, [Identity(), GaussianNoise(0.1)], draws=2)
    assert set(cost) == {"identity", "noise(0.1)"}
    assert min(cost.values()) > 0
    loader: DataLoader = DataLoader(torch.from_numpy(inputs), batch_size=8)
    sizes = []

    def sized(batch):
        sizes.append(len(batch))
        return batch

    measure_cost(sized, loader, [Identity()], repeats=1)
    assert sizes == [8, 8]
    with pytest.raises(ValueError, match="repeats"):
        measure_cost(lambda x: x, inputs, [Identity()], repeats=0)


class EndsEarly:
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(np.zeros((3, 2, 6), dtype=np.float32))


def test_bad_input_is_named(network, inputs):
    identity = [Identity()]
    with pytest.raises(ValueError, match="turned a batch of 40 rows into 39"):
        collect_views(network, inputs, [as_view(lambda x: x[1:], name="shorter")])
    with pytest.raises(ValueError, match="view broken returned NaN"):
        collect_views(network, inputs, [as_view(lambda x: x * float("nan"), name="broken")])
    with pytest.raises(ValueError, match="ended after 3 of 5 batches"):
        collect_views(network, EndsEarly(), identity)
    with pytest.raises(ValueError, match="gave no batch"):
        collect_views(network, iter([]), identity)
    with pytest.raises(ValueError, match="shuffle=False"):
        collect_views(network, DataLoader(torch.from_numpy(inputs), shuffle=True), identity)
    rows = torch.from_numpy(inputs)
    with pytest.raises(ValueError, match="shuffle=False"):
        collect_views(network, DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 4, False)), identity)
    with pytest.raises(ValueError, match="shuffle=False"):
        collect_views(network, DataLoader(rows, sampler=DistributedSampler(rows, 1, 0)), identity)
    with pytest.raises(TypeError, match=r"list of numbers.*np\.asarray"):
        collect_views(network, inputs.tolist(), identity)
    with pytest.raises(TypeError, match=r"a dict of 'image', 'other' .*: apply it to a part by key="):
        collect_views(network, {"image": inputs, "other": inputs}, [GaussianNoise(0.1)])
    with pytest.raises(ValueError, match="the table has no column of floats"):
        collect_views(lambda x: x.a, pd.DataFrame({"a": np.arange(3)}), [GaussianNoise(0.1)])
    with pytest.raises(ValueError, match=r"returned nan for input 3 under view identity"):
        collect_views(lambda x: np.where(np.arange(len(x)) == 3, np.nan, 0.0), inputs, identity)
    with pytest.raises(ValueError, match="same number"):
        collect_views(lambda x: x[:, : len(x)], inputs[:5], identity, batch_size=3)
    with pytest.raises(ValueError, match="inputs are empty"):
        collect_views(network, inputs[:0], identity)
    with pytest.raises(TypeError, match="inputs must be an array"):
        collect_views(network, 3, identity)
    with pytest.raises(ValueError, match="same number of rows"):
        collect_views(network, (inputs, inputs[1:]), identity)
    for options in ({"draws": 0}, {"keep_draws": -1}, {"batch_size": 0}, {"variance": "exact"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            collect_views(network, inputs, identity, **options)


def test_ids_of_a_series_are_paired_by_the_index_of_the_inputs(network, inputs):
    table = pd.DataFrame(inputs[:3], index=["p", "q", "r"])
    ids = pd.Series(["c", "b", "a"], index=["r", "q", "p"])
    np.testing.assert_array_equal(collect_views(network, table, [Identity()], ids=ids).ids, ["a", "b", "c"])
    by_row = collect_views(network, inputs[:3], [Identity()], ids=ids.reset_index(drop=True))
    np.testing.assert_array_equal(by_row.ids, ["c", "b", "a"])
    with pytest.raises(ValueError, match=r"ids name rows by id .* but the inputs have no ids; .*ids\.to_numpy"):
        collect_views(network, inputs[:3], [Identity()], ids=ids)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_ids_and_groups_of_one_table_belong_together(network, inputs, order):
    table = pd.DataFrame({"name": ["a", "b", "c"], "patient": [7, 8, 9]}).iloc[order]
    X = pd.DataFrame(inputs[:3]).iloc[order]
    options = {"ids": table["name"], "groups": table["patient"]}
    collected = collect_views(network, X, [Identity()], **options)
    assert (collected.ids.tolist(), collected.groups.tolist()) == (table["name"].tolist(), table["patient"].tolist())
    if order == [0, 1, 2]:
        collected = collect_views(network, inputs[:3], [Identity()], **options)
        assert (collected.ids.tolist(), collected.groups.tolist()) == (["a", "b", "c"], [7, 8, 9])


def test_modules_take_tables_of_numbers(network, inputs):
    table = pd.DataFrame(inputs)
    views = [Identity(), GaussianNoise(0.1)]
    outputs = collect_views(network, table, views).outputs
    np.testing.assert_allclose(outputs, collect_views(network, inputs, views).outputs)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": np.zeros((2, 6), "f4"), "n": np.ones(2)}, "take the parts image, n; give one of them, or .*, input"),
        (["two", "texts"], "take a list of str; make one tensor of it"),
        (pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}), "take a DataFrame; make one tensor"),
        (np.zeros((2, 6), np.uint8), "take uint8 inputs; convert them, images as batch / 255"),
    ],
    ids=["dict", "texts", "table", "uint8"],
)
def test_what_a_module_does_not_take_is_named_with_a_remedy(batch, message):
    with pytest.raises(TypeError, match=f"the module does not {message}") as caught:
        collect_views(nn.Linear(6, 2), batch, [Identity()])
    assert "\n" not in str(caught.value)


def test_images_of_pillow_are_refused_with_a_remedy():
    image = pytest.importorskip("PIL.Image").new("L", (8, 8))
    with pytest.raises(TypeError, match=r"view hflip does not take a list of Image .*make one array of it"):
        collect_views(lambda batch: batch, [image, image], [HorizontalFlip()])
    with pytest.raises(TypeError, match="the module does not take a list of Image"):
        collect_views(nn.Flatten(), [image, image], [Identity(), Brightness(0.1)])


def test_a_policy_refuses_other_outputs_and_other_parameters(inputs):
    X, y = inputs, (inputs[:, 0] > 0).astype(int)
    model = LogisticRegression().fit(X, y)
    views = [Identity(), Affine(0.9 * np.eye(6), name="smaller")]
    spec = {"task": "classification", "model": "mixture", "guard": False}
    policy = fit_policy(collect_views(model, X, views), y, **spec)
    policy.predict(collect_views(model, X, views))
    with pytest.raises(ValueError, match="'decision' outputs instead of 'log_probability'"):
        policy.predict(collect_views(model, X, views, output="decision_function"))
    policy = fit_policy(collect_views(model, X, views[1:]), y, **spec)
    with pytest.raises(ValueError, match=r"view 'smaller' .* has other parameters"):
        policy.predict(collect_views(model, X, [Affine(0.8 * np.eye(6), name="smaller")]))


def zeroed(batch):
    batch *= 0
    return batch


@pytest.mark.parametrize("of", [np.array, torch.tensor])
def test_a_view_that_works_in_place_gets_a_copy(of):
    inputs = of([[1.0, 2.0], [3.0, 4.0]])
    chain = Chain([as_view(zeroed), Affine(np.eye(2), name="same")], name="chain")
    predictions = collect_views(lambda batch: batch, inputs, [as_view(zeroed), chain, Identity()])
    np.testing.assert_array_equal(inputs, [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(predictions.outputs[:, :2], np.zeros((2, 2, 2)))
    np.testing.assert_array_equal(predictions.outputs[:, 2], inputs)


def test_parts_of_a_batch_are_copied_too():
    def without(batch):
        batch["x"][:] = 0
        return batch

    inputs = {"x": np.ones((3, 2))}
    predictions = collect_views(lambda batch: batch["x"], inputs, [as_view(without), Identity()])
    np.testing.assert_array_equal(predictions.outputs[0], [[0, 0], [1, 1]])
    assert inputs["x"].all()


def test_dropout_as_a_view_follows_the_seed():
    inputs = torch.ones(30, 8)
    view = as_view(nn.Dropout(0.5))
    assert view.stochastic
    runs = [collect_views(lambda batch: batch, inputs, [view], seed=seed, batch_size=size).outputs
            for seed, size in ((0, 256), (0, 7), (1, 256))]  # fmt: skip
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any()


def test_a_function_gets_the_inputs_of_a_labelled_loader():
    inputs, labels = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    predictions = collect_views(lambda batch: batch.sum(1), DataLoader(TensorDataset(inputs, labels)), [Identity()])
    np.testing.assert_array_equal(predictions.outputs[:, 0, 0], [1, 5, 9])
    with pytest.raises(ValueError, match="lists of 3 parts"):
        collect_views(len, DataLoader(TensorDataset(inputs, labels, labels)), [Identity()])


def test_whole_images_are_refused_in_one_line():
    with pytest.raises(TypeError, match=r"does not take uint8 inputs; convert them.*batch / 255") as caught:
        collect_views(nn.Linear(2, 1), np.ones((3, 2), np.uint8), [Identity()])
    assert "\n" not in str(caught.value)


def test_a_numpy_batch_size_is_one_and_no_seed_is_none():
    inputs = np.ones((5, 1))
    assert len(collect_views(np.negative, inputs, [Identity()], batch_size=np.int64(2))) == 5
    with pytest.raises(ValueError, match="seed must be a whole number"):
        collect_views(np.negative, inputs, [Identity()], seed=None)


def test_a_model_that_works_in_place_changes_neither_inputs_nor_later_views():
    inputs = torch.tensor([[-1.0, 2.0]])
    predictions = collect_views(nn.ReLU(inplace=True), inputs, [Identity(), as_view(torch.neg, name="minus")])
    assert inputs.tolist() == [[-1.0, 2.0]]
    np.testing.assert_array_equal(predictions.outputs[0], [[0, 2], [1, 0]])


def test_a_policy_holds_for_the_draws_it_was_fitted_to():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(80, 2)).astype(np.float32)
    views = [GaussianNoise(0.5)]
    module = torch.nn.Linear(2, 1)
    truth = module(torch.from_numpy(inputs)).detach().numpy()[:, 0] + 0.1 * rng.normal(size=80)
    policy = fit_policy(collect_views(module, inputs, views, draws=8), truth, task="regression", guard=False)
    once = collect_views(module, inputs, views)
    for use in (policy.predict, policy.weights_for, partial(policy.score, labels=truth)):
        with pytest.warns(
            UserWarning, match=r"fitted to 8 draws of view .* and gets 1; .* collect with draws=8"
        ) as caught:
            use(once)
        assert caught[0].filename == __file__  # the caller's line, not the package's
    policy.predict(collect_views(module, inputs, views, draws=8))
    assert TTAModule(module, views, policy).draws == 8
    assert TTAModule(module, views, policy, draws=3).draws == 3


def test_images_that_colour_views_would_clip_are_warned_of_once():
    images, mean, std = torch.rand(6, 3, 8, 8), [0.5, 0.4, 0.3], [0.2, 0.2, 0.3]
    normalised = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    network, views = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), [Identity(), Chain([Brightness(0.1)]), Gamma(2.0)]
    message = (
        r"inputs are between -2\.\d+ and 2\.\d+, and brightness\(\+0.1\), gamma\(2\) clip them to 0 to 1: .* mean="
    )
    with pytest.warns(UserWarning, match=message) as caught:
        collect_views(network, normalised, views, batch_size=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    masks = np.zeros((6, 8, 8), dtype=int)
    with pytest.warns(UserWarning, match=message) as caught:
        collect_dense(nn.Conv2d(3, 2, 1), normalised, views, masks, positions=4, batch_size=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    collect_views(network, images, views)  # warnings are errors
    collect_views(network, normalised, [Brightness(0.1, mean=mean, std=std)])


def test_names_of_views_are_escaped_in_errors():
    hostile = as_view(lambda batch: -batch, name="\x1b[31mred\r\n")
    with pytest.raises(ValueError, match=r"under view \\x1b\[31mred\\r\\n; leave out") as error:
        collect_views(lambda batch: np.where(batch < 0, np.nan, batch), np.ones((2, 1)), [hostile])
    assert "\x1b" not in str(error.value)
