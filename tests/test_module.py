"""TTAModule says what collect_views and Policy.predict say, changes nothing, and can be exported."""

import copy
import warnings
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vbtta import ViewPredictions, collect_dense, conformalize, fit_policy
from vbtta.adapters import as_predictor
from vbtta.augment import Chain, GaussianNoise, Identity, as_view, d4, invert_view, volume_flips
from vbtta.augment.images import HorizontalFlip, Rotate, Rotate90, Shift, VerticalFlip, Zoom
from vbtta.collect import collect_views
from vbtta.inference.em import EM
from vbtta.models.base import Stack
from vbtta.models.categorical_latent.spec import CategoricalLatent
from vbtta.models.categorical_mixture.posterior import CategoricalPosterior
from vbtta.models.categorical_mixture.spec import CategoricalMixture
from vbtta.models.gaussian_mixture.spec import GaussianMixture
from vbtta.models.parts.link_densities import class_probabilities
from vbtta.models.parts.links import Calibration
from vbtta.module import TTAModule
from vbtta.policy import History, Policy
from vbtta.sequential import fit_sequential

CLASSES = 4


class ConvNet(nn.Module):
    """Small, with what depends on the mode: batch norm and dropout."""

    def __init__(self, outputs):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6 * 4, outputs)

    def forward(self, images):
        features = self.features(images)
        return self.head(nn.functional.adaptive_avg_pool2d(features, 2).flatten(1))


@pytest.fixture(scope="module")
def images():
    return torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def views():
    return [Identity(), HorizontalFlip(), Rotate(10.0), Shift(0.1, 0.0), Chain((HorizontalFlip(), Zoom(1.2)))]


def network(outputs, seed=0):
    torch.manual_seed(seed)
    net = ConvNet(outputs)
    net(torch.rand(20, 3, 8, 8))  # so that the batch norm's buffers are not those of a new one
    return net.train()


def regression_policy(net, images, views, model):
    predictions = collect_views(net, images, views)
    truth = predictions.outputs.mean(axis=1) + 0.01 * np.random.default_rng(0).normal(size=(len(images), 2))
    return fit_policy(predictions, truth[:, None], task="regression", model=model, guard=False)


def classification_policy(names, link="softmax", class_weights=None):
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.ones(len(names)))
    weights[1] = 0.0
    weights /= weights.sum()
    posterior = CategoricalPosterior(
        link=link,
        weights=weights,
        class_weights=class_weights,
        calibration=Calibration(0.3 * rng.normal(size=len(names)), 0.2 * rng.normal(size=CLASSES)),
        noise=None,
        information=None,
        gate=None,
    )
    return Policy(
        names=tuple(names),
        model=CategoricalMixture(link=link),
        engine=EM(),
        posterior=posterior,
        history=History(np.zeros(1), weights[None]),
        final_elbo=0.0,
        elbo_terms={},
        converged=True,
        n_outputs=CLASSES,
    )


def policies(net, images, views, kind):
    names = [view.name for view in views]
    if kind in ("mixture", "latent"):
        return regression_policy(net, images, views, kind)
    if kind == "class weights":
        by_class = np.random.default_rng(2).dirichlet(np.ones(len(views)), size=CLASSES).T
        return classification_policy(names, class_weights=by_class)
    if kind.startswith("pool"):
        labels = np.random.default_rng(3).integers(0, CLASSES, size=len(images))
        model = CategoricalLatent(link=kind.removeprefix("pool "), noise="none", shrinkage=1.0)
        predictions = collect_views(net, images, views)
        return fit_policy(predictions, labels, task="classification", model=model, guard=False)
    return classification_policy(names, link=kind)


def expected_of(net, images, views, policy):
    prediction = policy.predict(collect_views(net, images, views))
    return prediction.mean if policy.task == "regression" else prediction.proba


@pytest.mark.parametrize(
    "kind", ["mixture", "latent", "softmax", "probit", "class weights", "pool softmax", "pool probit"]
)
def test_equal_to_collecting_and_predicting_and_nothing_changes(images, views, kind):
    net = network(2 if kind in ("mixture", "latent") else CLASSES)
    before = copy.deepcopy(net.state_dict())
    policy = policies(net, images, views, kind)
    expected = expected_of(net, images, views, policy)
    for max_batch in (None, 1, 30):
        module = TTAModule(net, views, policy, max_batch=max_batch)
        np.testing.assert_allclose(module(images).detach().numpy(), expected, atol=1e-5)
        assert all(part.training for part in net.modules())
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name])
    if kind not in ("mixture", "latent"):
        logs = TTAModule(net, views, policy, output="log_probability")(images)
        np.testing.assert_allclose(logs.exp().detach().numpy(), expected, atol=1e-5)


def test_views_of_weight_zero_are_not_computed(images, views):
    net = network(CLASSES)

    def explode(batch):
        raise AssertionError("a view of weight zero was computed")

    policy = classification_policy([view.name for view in views])
    assert policy.weights[1] == 0
    module = TTAModule(net, [views[0], as_view(explode, name=views[1].name), *views[2:]], policy)
    without = TTAModule(net, [views[0], *views[2:]], policy)
    torch.testing.assert_close(module(images), without(images))
    assert len(module.views) == 4


def test_views_of_other_sizes_get_their_own_pass():
    wide = torch.rand(5, 3, 6, 10)
    net = network(CLASSES)
    turned = d4()
    policy = classification_policy([view.name for view in turned])
    np.testing.assert_allclose(
        TTAModule(net, turned, policy)(wide).detach().numpy(), expected_of(net, wide, turned, policy), atol=1e-5
    )


def test_stochastic_views_draw_what_collect_views_draws(images):
    views = [Identity(), GaussianNoise(0.1), GaussianNoise(0.3)]
    net = network(CLASSES)
    policy = classification_policy([view.name for view in views])
    expected = policy.predict(collect_views(net, images, views, draws=3, seed=5)).proba
    outputs = TTAModule(net, views, policy, draws=3, seed=5)(images)
    np.testing.assert_allclose(outputs.detach().numpy(), expected, atol=1e-5)


def test_one_forward_pass_for_all_views_that_fit(images, views):
    net = network(CLASSES)
    sizes = []
    net.register_forward_pre_hook(lambda module, arguments: sizes.append(len(arguments[0])))
    policy = classification_policy([view.name for view in views])
    TTAModule(net, views, policy, max_batch=64)(images)
    assert sizes == [4 * 12]
    sizes.clear()
    TTAModule(net, views, policy, max_batch=30)(images)
    assert sizes == [24, 24]
    sizes.clear()
    TTAModule(net, views, policy)(images[:1])
    assert sizes == [4]


def test_tensors_of_many_rows_go_through_in_parts_of_one_size(images, views):
    net = network(CLASSES)
    policy = classification_policy([view.name for view in views])
    whole = TTAModule(net, views, policy, max_batch=10_000)(images)
    sizes = []
    net.register_forward_pre_hook(lambda module, arguments: sizes.append(len(arguments[0])))
    outputs = TTAModule(net, views, policy, max_batch=5)(images)
    assert sizes == 4 * [4, 4, 4]
    torch.testing.assert_close(outputs, whole)


def test_state_round_trip_and_other_policies_are_refused(images, views, tmp_path):
    policy = classification_policy([view.name for view in views])
    module = TTAModule(network(CLASSES), views, policy)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    again = TTAModule(network(CLASSES, seed=1), views, policy)
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    torch.testing.assert_close(module(images), again(images))
    other = TTAModule(network(CLASSES), views[1:], classification_policy([view.name for view in views[1:]]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(module.state_dict())


def test_wrappers_and_compilation(images, views):
    policy = classification_policy([view.name for view in views])
    module = TTAModule(network(CLASSES), views, policy).eval()
    expected = module(images)
    torch.testing.assert_close(nn.DataParallel(module)(images), expected)
    torch.testing.assert_close(copy.deepcopy(module)(images), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it traces
        compiled = torch.compile(module, backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(images), expected)


def test_few_sizes_of_batches_are_compiled_for():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    rolled = [Identity(), *(as_view(partial(torch.roll, shifts=k, dims=1), name=f"roll {k}") for k in (1, 2, 3))]
    module = TTAModule(nn.Linear(6, CLASSES), rolled, classification_policy([view.name for view in rolled])).eval()
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it traces
        compiled = torch.compile(module, backend=backend)
        for n_rows in (1, 3, 4, 5, 6, 7, 9, 11, 17, 20, 23, 40, 41, 50, 90, 91):
            rows = torch.rand(n_rows, 6)
            torch.testing.assert_close(compiled(rows), module(rows))
    assert len(compilations) <= 4


def test_export_and_onnx_on_any_batch_size(images, views, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    policy = classification_policy([view.name for view in views], class_weights=None)
    module = TTAModule(network(CLASSES), views, policy)
    rows = torch.export.Dim("rows", min=1, max=4096)
    with pytest.raises(Exception, match="training mode"):
        torch.export.export(module, (images,), dynamic_shapes=({0: rows},))
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it traces
        program = torch.export.export(module, (images,), dynamic_shapes=({0: rows},))
        torch.onnx.export(program, (), tmp_path / "tta.onnx", verbose=False)
    session = runtime.InferenceSession(tmp_path / "tta.onnx", providers=["CPUExecutionProvider"])
    for n_rows in (1, 5, 12):
        expected = module(images[:n_rows]).detach()
        torch.testing.assert_close(program.module()(images[:n_rows]), expected)
        (outputs,) = session.run(None, {session.get_inputs()[0].name: images[:n_rows].numpy()})
        np.testing.assert_allclose(outputs, expected.numpy(), atol=1e-5)


def test_stochastic_views_are_not_exported(images):
    views = [Identity(), GaussianNoise(0.1), GaussianNoise(0.3)]
    module = TTAModule(network(CLASSES), views, classification_policy([view.name for view in views])).eval()
    with pytest.raises(Exception, match="draw random numbers"):
        torch.export.export(module, (images,))


def test_parts_of_outputs_are_chosen_through_the_adapter(images, views):
    net = network(CLASSES)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, images):
            return {"logits": self.net(images), "other": images}

    policy = classification_policy([view.name for view in views])
    outputs = TTAModule(as_predictor(Wrapped(), "logits"), views, policy)(images)
    torch.testing.assert_close(outputs, TTAModule(net, views, policy)(images))


def test_probit_probabilities_of_two_classes_have_a_closed_form():
    from scipy.special import ndtr

    gap = torch.linspace(-6, 6, 25)
    proba = class_probabilities("probit", torch.stack([gap, torch.zeros(25)], dim=1))
    np.testing.assert_allclose(proba[:, 0].numpy(), ndtr(gap.numpy() / np.sqrt(2)), atol=2e-6)


def test_bad_input_is_named(images, views):
    names = [view.name for view in views]
    net, policy = network(CLASSES), classification_policy(names)
    with pytest.raises(ValueError, match="needs the views"):
        TTAModule(net, views[:2], policy)
    with pytest.raises(ValueError, match="'probability' or 'log_probability' for a classification policy"):
        TTAModule(net, views, policy, output="mean")
    with pytest.raises(ValueError, match="max_batch"):
        TTAModule(net, views, policy, max_batch=0)
    with pytest.raises(TypeError, match="torch modules"):
        TTAModule(lambda x: x, views, policy)
    with pytest.raises(ValueError, match="fitted to 4 outputs"):
        TTAModule(network(3), views, policy)(images)
    with pytest.raises(ValueError, match="turned a batch of 12 rows into 11"):
        TTAModule(net, [as_view(lambda x: x[1:], name=names[0]), *views[1:]], policy)(images)
    module = TTAModule(net, views, policy)
    with pytest.raises(TypeError, match=r"torch\.from_numpy"):
        module(images.numpy())
    one_row = nn.Module()
    one_row.forward = lambda batch: torch.zeros(1, CLASSES)
    with pytest.raises(ValueError, match="returned shape \\(1, 4\\) for 12 rows"):
        TTAModule(one_row, views, policy, max_batch=12)(images)
    with pytest.raises(ValueError, match="not finite; collect_views says under which view"):
        TTAModule(net, [as_view(lambda x: x / 0, name=names[0]), *views[1:]], policy)(images)
    with pytest.raises(ValueError, match="batch is on meta"):
        module(images.to("meta"))
    module.pools[0].offset = module.pools[0].offset.to("meta")
    with pytest.raises(ValueError, match="move the TTAModule"):
        module(images)


def test_other_parameters_than_those_of_the_fit_are_refused(images, views):
    net = network(2)
    policy = regression_policy(net, images, views, "latent")
    other = [Rotate(12.0, name="rotate(+10)") if view.name == "rotate(+10)" else view for view in views]
    with pytest.raises(ValueError, match="other parameters"):
        TTAModule(net, other, policy)
    with pytest.raises(ValueError, match="other parameters"):
        policy.predict(collect_views(net, images, other))


def test_unnamed_views_are_matched_by_place(images, views):
    net = network(CLASSES)
    policy = classification_policy([view.name for view in views])
    unnamed = replace(policy, names=tuple(f"view_{k}" for k in range(5)), generated_names=True)
    torch.testing.assert_close(TTAModule(net, views, unnamed)(images), TTAModule(net, views, policy)(images))
    with pytest.raises(ValueError, match="5 unnamed views and got 4"):
        TTAModule(net, views[:4], unnamed)
    assert ViewPredictions(np.zeros((1, 5, 4))).names == unnamed.names


def test_views_that_work_in_place_or_draw_do_as_in_collect_views(images):
    def zeroed(batch):
        return batch.mul_(0)

    net, before = network(CLASSES), images.clone()
    views = [as_view(zeroed), as_view(torch.neg, name="minus"), Identity(), as_view(nn.Dropout(0.5), name="dropout")]
    policy = classification_policy([view.name for view in views])
    expected = expected_of(net, images, views, policy)
    module = TTAModule(net, views, policy).eval()  # the view's dropout stays on
    np.testing.assert_allclose(module(images).detach().numpy(), expected, atol=1e-5)
    assert torch.equal(images, before)
    assert module.train().training


def test_double_inputs_are_cast_as_by_collect_views(images, views):
    net = network(CLASSES)
    module = TTAModule(net, views, classification_policy([view.name for view in views]))
    torch.testing.assert_close(module(images.double()), module(images))


def test_arguments_of_the_wrong_kind_are_refused_in_one_line(images, views):
    net, policy = network(CLASSES), classification_policy([view.name for view in views])
    with pytest.raises(TypeError, match=r"takes tensors, or dicts or tuples of them; use .*torch\.stack"):
        TTAModule(net, views, policy)(list(images))
    with pytest.raises(TypeError, match=r"policy must be a Policy; got str\. Read a file with Policy\.load"):
        TTAModule(net, views, "policy.json")
    x = collect_views(net, images, views)
    conformal = conformalize(policy, x, np.arange(len(images)) % CLASSES, level=0.5)
    with pytest.raises(TypeError, match=r"got ConformalPolicy\. Give conformal\.policy"):
        TTAModule(net, views, conformal)
    for options in ({"max_batch": 2.5}, {"draws": 2.5}, {"seed": None}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be a whole number"):
            TTAModule(net, views, policy, **options)


def test_a_network_that_works_in_place_leaves_the_batch_alone(images):
    net, before = nn.Sequential(nn.ReLU(inplace=True), network(CLASSES)), images.sub(0.5)
    batch, views = before.clone(), [Identity(), as_view(torch.tanh, name="tanh"), as_view(torch.neg, name="minus")]
    policy = classification_policy([view.name for view in views])
    module = TTAModule(net, views, policy, max_batch=len(images))
    np.testing.assert_allclose(module(batch).detach().numpy(), expected_of(net, before, views, policy), atol=1e-5)
    assert torch.equal(batch, before)


class MapNet(nn.Module):
    """Maps (B, C, H, W), not equivariant; at a stride where asked."""

    def __init__(self, outputs, stride=1):
        super().__init__()
        torch.manual_seed(1)
        self.outputs = outputs
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, outputs, 3, padding=1)
        )
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()

    def forward(self, images):
        return self.pool(self.layers(images))


MAP_VIEWS = [
    Identity(),
    HorizontalFlip(),
    Rotate90(1),
    Shift(0.25, 0.0),
    Zoom(1.3),
    Chain((HorizontalFlip(), Rotate(20.0))),
    HorizontalFlip(swap_classes=((0, 1),)),
]


def restored(net, images, views):
    """Outputs (K, B, H, W, C) and masks (K, 1, H, W) of views in the geometry of the images."""
    maps, masks = [], []
    with torch.no_grad():
        for view in views:
            augmented = view(images)
            outputs, seen = invert_view(view, net.eval()(augmented), augmented, images)
            maps.append(outputs.movedim(1, -1).numpy())
            masks.append(np.ones((1, 12, 16), dtype=bool) if seen is None else seen[:, 0].numpy())
    return np.stack(maps), np.stack(masks)


def map_policy(net, images, kind):
    """A policy of the kind with weight on several views."""
    rng = np.random.default_rng(0)
    names = [view.name for view in MAP_VIEWS]
    if kind in ("softmax", "probit"):
        return classification_policy(names, link=kind)
    if kind == "class weights":
        by_class = rng.dirichlet(np.ones(len(names)), size=CLASSES).T
        by_class[1] = 0  # as the view's weight
        return classification_policy(names, class_weights=by_class / by_class.sum(axis=0))
    maps = restored(net, images, MAP_VIEWS if net.outputs > 1 else MAP_VIEWS[:-1])[0]
    if "regression" in kind:  # the mean of the views, or one of them
        sampled_map = np.take_along_axis(maps, rng.integers(0, len(maps), size=(1, *maps.shape[1:])), 0)[0]
        targets = (maps.mean(0) if "latent" in kind else sampled_map)[..., 0]
        targets = targets + 0.05 * maps.std() * rng.normal(size=targets.shape)
        predictions, labels = collect_dense(net, images, MAP_VIEWS[:-1], targets, positions=60)
        return fit_policy(predictions, labels, task="regression", model=kind.split()[1], guard=False)
    masks = (8 * maps.mean(0) + rng.gumbel(size=maps.shape[1:])).argmax(-1)
    predictions, labels = collect_dense(net, images, MAP_VIEWS, masks, positions=60)
    if kind == "pooled":
        gate = CategoricalMixture(weights="input", features="pooled", gate_scale=1.0)
        return fit_policy(predictions, labels, task="classification", model=gate, guard=False)
    latent = CategoricalLatent(noise="none", shrinkage=0.01)
    model = latent if kind == "latent" else Stack(members=(latent, CategoricalMixture()), prior_count=1000.0)
    return fit_policy(predictions, labels, task="classification", model=model, guard=False)


def expected_maps(net, images, policy):
    """Policy.predict at every position, restricted to the views that see it."""
    views = [view for view in MAP_VIEWS if view.name in policy.used_names]
    maps, masks = restored(net, images, views)
    outputs = np.moveaxis(maps, 0, -2).reshape(-1, len(views), maps.shape[-1])
    seen = np.moveaxis(np.broadcast_to(masks, maps.shape[:-1]), 0, -1).reshape(-1, len(views))
    order = [view.name for view in views]
    fitted = list(policy.fitted or policy.names)
    values_by_name: dict[str, list] = {}
    for row in range(len(outputs)):
        names = [name for name, sees in zip(order, seen[row], strict=True) if sees]
        part = policy.restrict(sorted(fitted.index(name) for name in names)) if len(names) < len(order) else policy
        prediction = part.predict(ViewPredictions(outputs[row : row + 1, seen[row]], names=names))
        for name in ("proba", "entropy", "mutual_information", "mean", "variance"):
            if hasattr(prediction, name):
                values_by_name.setdefault(name, []).append(getattr(prediction, name)[0])
    return {name: np.array(values).reshape(len(images), 12, 16, -1) for name, values in values_by_name.items()}


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("softmax", 1),
        ("softmax", 4),
        ("probit", 1),
        ("class weights", 1),
        ("latent", 1),
        ("stack", 1),
        ("regression mixture", 1),
        ("regression latent", 1),
        ("regression latent", 4),
    ],
)
def test_maps_equal_predicting_every_position_from_the_views_that_see_it(kind, stride):
    images = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    net = MapNet(1 if "regression" in kind else CLASSES, stride)
    policy = map_policy(net, images, kind)
    assert len(policy.used_names) > 3
    expected = expected_maps(net, images, policy)
    module = TTAModule(net, MAP_VIEWS, policy).eval()
    value = expected["mean" if "regression" in kind else "proba"]
    with torch.no_grad():
        for max_batch in (None, 2, 64):
            result = TTAModule(net, MAP_VIEWS, policy, max_batch=max_batch).eval()(images)
            assert result.shape == (2, value.shape[-1], 12, 16)
            np.testing.assert_allclose(result.movedim(1, -1), value, atol=1e-5)
        maps = module.maps(images)
    if "regression" in kind:
        np.testing.assert_allclose(maps.mean.movedim(1, -1), expected["mean"], atol=1e-5)
        np.testing.assert_allclose(maps.variance.movedim(1, -1), expected["variance"], rtol=1e-4)
        assert maps.probability is maps.entropy is maps.mutual_information is None
        return
    np.testing.assert_allclose(maps.probability.movedim(1, -1), value, atol=1e-5)
    np.testing.assert_allclose(maps.entropy, expected["entropy"][..., 0], atol=1e-5)
    np.testing.assert_allclose(maps.mutual_information, expected["mutual_information"][..., 0], atol=1e-5)
    assert maps.mean is maps.variance is None
    logs = TTAModule(net, MAP_VIEWS, policy, output="log_probability").eval()(images)
    np.testing.assert_allclose(logs.exp().detach().movedim(1, -1), value, atol=1e-5)


def test_an_equivariant_network_gets_one_map_from_all_views():
    net = nn.Conv2d(3, CLASSES, 1)
    images = torch.rand(2, 3, 9, 14)
    policy = classification_policy([view.name for view in d4()])
    posterior = replace(policy.posterior, calibration=Calibration(np.zeros(8), np.zeros(CLASSES)))
    maps = TTAModule(net, d4(), replace(policy, posterior=posterior)).maps(images)
    torch.testing.assert_close(maps.probability, net(images).softmax(1).detach())
    assert maps.mutual_information.abs().max() < 1e-6


def test_volumes_are_mapped_too():
    net, volumes, views = nn.Conv3d(1, CLASSES, 3, padding=1), torch.rand(2, 1, 4, 5, 6), volume_flips()
    policy = classification_policy([view.name for view in views])
    module = TTAModule(net, views, policy)
    result = module(volumes)
    assert result.shape == (2, CLASSES, 4, 5, 6)
    torch.testing.assert_close(module.maps(volumes).probability, result.detach(), atol=1e-5, rtol=0)


def test_random_views_of_maps_are_the_same_in_both_methods():
    net, images = MapNet(CLASSES), torch.rand(3, 3, 12, 16)
    views = [Identity(), GaussianNoise(0.3), HorizontalFlip()]
    policy = classification_policy([view.name for view in reversed(views)])
    module = TTAModule(net, views, policy, draws=2).eval()
    with torch.no_grad():
        torch.testing.assert_close(module.maps(images).probability, module(images), atol=1e-5, rtol=0)


def test_memory_of_maps_does_not_grow_with_the_views():
    """Outputs of the network that are alive when it is called again."""
    alive, maps = [], list[Any]()

    class Counting(nn.Module):
        def forward(self, images):
            alive.append(sum(entry() is not None for entry in maps))
            outputs = torch.cat([images, images[:, :1]], 1)
            maps.append(weakref.ref(outputs))
            return outputs

    views = [HorizontalFlip(name=f"view {k}") for k in range(12)]
    policy = classification_policy([view.name for view in views])
    with torch.no_grad():
        TTAModule(Counting(), views, policy)(torch.rand(1, 3, 320, 330))
    assert len(alive) == 11  # one view has no weight
    assert max(alive) <= 1


def test_maps_that_cannot_be_pooled_are_refused(images):
    policy = classification_policy(["identity", "b", "sort"])
    net = MapNet(CLASSES).eval()
    sort = as_view(lambda batch: batch.sort(-1)[0], "sort")
    with pytest.raises(ValueError, match="view sort has no inverse, which maps need: leave it out"):
        TTAModule(net, [Identity(), sort], policy)(images)
    with pytest.raises(ValueError, match="returns rows"):
        TTAModule(network(CLASSES), [Identity(), as_view(torch.neg, "sort")], policy).maps(images)
    nan = nn.Module()
    nan.forward = lambda batch: torch.full((len(batch), CLASSES, 8, 8), torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        TTAModule(nan, [Identity(), as_view(torch.neg, "sort", inverse=torch.clone)], policy)(images)
    with pytest.raises(ValueError, match="gave NaN or infinity for input 0 under view identity"):
        TTAModule(nan, [Identity(), as_view(torch.neg, "sort", inverse=torch.clone)], policy).maps(images)
    with pytest.raises(ValueError, match="the batch is empty"):
        TTAModule(net, [Identity(), HorizontalFlip(name="sort")], policy).maps(images[:0])


@pytest.mark.parametrize("kind", ["one view", "two views", "class weights", "regression"])
def test_positions_that_no_view_sees_have_the_output_for_the_unchanged_input(kind):
    images, views = torch.rand(2, 3, 12, 16), [Shift(0.5, 0.0, name="half"), Shift(0.25, 0.0, name="quarter")]
    net = MapNet(1 if kind == "regression" else CLASSES).eval()
    if kind == "regression":
        sample = collect_dense(net, images, views, torch.rand(2, 12, 16).numpy(), positions=50)
        policy = fit_policy(*sample, task="regression", model="mixture", guard=False)
    else:
        by_class = np.array([[0.3, 0.6, 0.2, 0.5], [0.0] * 4, [0.7, 0.4, 0.8, 0.5]])
        options = {"class_weights": by_class} if kind == "class weights" else {}
        policy = classification_policy(["half", "b", "quarter"], **options)
    if kind == "one view":
        policy = policy.restrict([0])
    with torch.no_grad():
        module = TTAModule(net, views, policy).eval()
        result = module(images)
        own = as_view(lambda batch: batch, "half", inverse=lambda maps: maps)
        alone = TTAModule(net, [own, as_view(own, "quarter")], replace(policy, fingerprints={})).eval()(images)
        unseen = slice(8, None) if kind == "one view" else slice(12, None)
        torch.testing.assert_close(result[..., unseen], alone[..., unseen])
        maps = module.maps(images)
        torch.testing.assert_close(maps.mean if kind == "regression" else maps.probability, result, atol=1e-5, rtol=0)
        whole = torch.export.export(module, (images,)).module()
        torch.testing.assert_close(whole(images), result)


@pytest.mark.parametrize("order", [0, 1])
def test_an_exported_module_keeps_views_that_see_all_of_a_map(order):
    views = [Identity(), Shift(0.25, 0.0)][:: 1 - 2 * order]
    images = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    module = TTAModule(MapNet(CLASSES), views, classification_policy([view.name for view in views])).eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(module, (images,)).module()(images), module(images))


def test_rows_have_their_classes_exchanged(images):
    net = network(CLASSES).eval()
    mirror = HorizontalFlip(swap_classes=((1, 3),))
    views = [Identity(), Identity(name="b"), mirror, VerticalFlip(), Chain((mirror, VerticalFlip()))]
    policy = classification_policy([view.name for view in views])
    expected = expected_of(net, images, views, policy)
    for max_batch in (None, 1, 64):
        result = TTAModule(net, views, policy, max_batch=max_batch)(images).detach()
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["latent", "class weights", "pooled"])
def test_maps_are_exported_to_onnx(tmp_path, kind):
    onnxruntime = pytest.importorskip("onnxruntime")
    images = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    net = MapNet(CLASSES)
    module = TTAModule(net, MAP_VIEWS, map_policy(net, images, kind)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = torch.export.Dim("batch", min=1, max=64)
        torch.onnx.export(
            module, (images,), tmp_path / "maps.onnx", dynamic_shapes=({0: batch},), dynamo=True, verbose=False
        )
    session = onnxruntime.InferenceSession(tmp_path / "maps.onnx")
    for inputs in (images, torch.rand(5, 3, 12, 16)):
        result = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
        with torch.no_grad():
            np.testing.assert_allclose(result, module(inputs), atol=1e-5)


# -- stages -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged():
    """A network, views with one that draws, and a sequential policy of which some inputs stop at every stage."""
    net = network(CLASSES).eval()
    inputs = torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    views = [Identity(), HorizontalFlip(), GaussianNoise(0.1), Rotate(10.0)]
    predictions = collect_views(net, inputs, views, draws=2, seed=5)
    rng = np.random.default_rng(0)
    scaled = ViewPredictions(
        3 * (predictions.outputs - predictions.outputs.mean(axis=(0, 1))) / predictions.outputs.std(),
        names=predictions.names,
    )
    labels = (scaled.outputs.mean(axis=1) + rng.gumbel(size=(300, CLASSES))).argmax(axis=1)
    stages = [["identity"], [predictions.names[1], predictions.names[2]], [predictions.names[3]]]
    model = CategoricalLatent(noise="none", shrinkage=1.0)
    policies = fit_sequential(predictions, labels, task="classification", model=model, stages=stages, tolerance=5.0)
    # of an untrained network the second stage expects a gain e^4 times smaller: made equal, so that both stop some
    first, second = policies.gains
    second = second._replace(coefficients=second.coefficients + 4 * np.eye(len(second.coefficients))[0])
    passes = np.array([point.passes for point in policies.curve])
    threshold = policies.curve[int(np.abs(passes - 1.7).argmin())].threshold
    return net, inputs, views, replace(policies, gains=(first, second), threshold=threshold)


@pytest.mark.parametrize("max_batch", [None, 7])
def test_stages_are_computed_for_the_rows_that_are_left(staged, max_batch):
    net, inputs, views, sequential = staged
    expected = sequential.predict(collect_views(net, inputs, views, draws=2, seed=5))
    assert set(expected.passes) >= {1, len(sequential.names)}
    module = TTAModule(net, views, sequential, max_batch=max_batch, seed=5)
    rows = []
    handle = net.register_forward_hook(lambda _module, _inputs, outputs: rows.append(len(outputs)))
    proba = module(inputs)
    handle.remove()
    np.testing.assert_allclose(proba.numpy(), expected.proba, atol=1e-5)
    draws = {name: 2 if name.startswith("noise") else 1 for name in sequential.names}
    passes = np.cumsum([sum(draws[name] for name in stage) for stage in sequential.stages])
    computed = dict(zip(np.cumsum([len(stage) for stage in sequential.stages]).tolist(), passes.tolist(), strict=True))
    assert sum(rows) == sum(computed[count] for count in expected.passes.tolist())
    logs = TTAModule(net, views, sequential, output="log_probability", seed=5)(inputs)
    np.testing.assert_allclose(logs.exp().numpy(), expected.proba, atol=1e-5)
    assert list(module.state_dict()) == list(TTAModule(net, views, sequential.policies[-1]).state_dict())


def test_stages_of_numbers(images, views):
    net = network(2).eval()
    inputs = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    predictions = collect_views(net, inputs, views)
    truth = predictions.outputs.mean(axis=1) + 0.001 * np.random.default_rng(0).normal(size=(200, 2))
    sequential = fit_sequential(
        predictions, truth[:, None], task="regression", model="latent", stages=predictions.names, tolerance=50.0
    )
    sequential = replace(sequential, threshold=float(np.median([point.threshold for point in sequential.curve])))
    expected = sequential.predict(collect_views(net, images, views))
    outputs = TTAModule(net, views, sequential)(images)
    np.testing.assert_allclose(outputs.numpy(), expected.mean, atol=1e-5)


def test_a_stage_of_rows_is_one_forward_pass_with_a_gate_too():
    net = network(2).eval()
    inputs = torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    views = [Identity(), HorizontalFlip(), Shift(0.25, 0.0), Rotate(10.0)]
    collected = collect_views(net, inputs, views)
    truth = collected.outputs.mean(axis=1) + 0.001 * np.random.default_rng(0).normal(size=(300, 2))
    stages = [[view.name for view in part] for part in (views[:2], views[2:])]
    model = GaussianMixture(weights="input", gate_scale=1.0)
    options = {"task": "regression", "model": model, "stages": stages, "tolerance": 50.0}
    sequential = replace(fit_sequential(collected, truth[:, None], **options), threshold=0.0)
    assert sequential.policies[-1].gate is not None
    sizes = []
    handle = net.register_forward_hook(lambda _module, _inputs, outputs: sizes.append(len(outputs)))
    module = TTAModule(net, views, sequential)
    for rows in (inputs[:1], inputs[:8]):
        sizes.clear()
        means = module(rows)
        assert sizes == [len(stage) * len(rows) for stage in sequential.stages]
        expected = sequential.predict(collected.take(slice(len(rows)))).mean
        np.testing.assert_allclose(means.numpy(), expected, atol=1e-5)
    handle.remove()


def test_stages_are_exported_one_by_one(staged, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    net, inputs, views, sequential = staged
    noise = next(name for name in sequential.names if name.startswith("noise"))
    kept = [name for name in sequential.policies[-1].used_names if name != noise]
    policies = (
        sequential.policies[0],
        sequential.policies[-1].restrict([k for k, name in enumerate(sequential.policies[-1].fitted) if name in kept]),
    )
    sequential = replace(sequential, policies=policies)
    module = TTAModule(net, views, sequential).eval()
    rows = torch.export.Dim("rows", min=1, max=4096)
    with pytest.raises(Exception, match=r"export each of module\.stages"):
        torch.export.export(module, (inputs,), dynamic_shapes=({0: rows},))
    sessions = []
    for place, stage in enumerate(module.stages):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(stage, (inputs,), dynamic_shapes=({0: rows},))
            torch.onnx.export(program, (), tmp_path / f"stage{place}.onnx", verbose=False)
        sessions.append(runtime.InferenceSession(tmp_path / f"stage{place}.onnx", providers=["CPUExecutionProvider"]))

    def compute(stage, left):
        session = sessions[stage]
        return session.run(None, {session.get_inputs()[0].name: inputs.numpy()[left]})[0]

    np.testing.assert_allclose(sequential.run(compute, len(inputs)).proba, module(inputs).numpy(), atol=1e-5)


def test_stages_are_compiled_one_by_one(staged):
    net, inputs, views, sequential = staged
    module = TTAModule(net, views, sequential, seed=5)
    expected = [module(inputs[:40]), module(inputs[40:90])]
    compilations = []

    def backend(graph, _inputs):
        compilations.append(graph)
        return graph

    torch._dynamo.reset()
    for stage in module.stages:
        stage.compile(backend=backend)
    for rows, result in zip((inputs[:40], inputs[40:90]), expected, strict=True):
        torch.testing.assert_close(module(rows), result)
    for row in inputs[:5]:
        module(row[None])
    assert 1 <= len(compilations) <= 3  # of the network: for one size, any size and one row


def test_stages_move_with_their_module(staged):
    net, _, views, sequential = staged
    module = TTAModule(copy.deepcopy(net), views, sequential).to("meta")
    assert {tensor.device.type for stage in module.stages for tensor in stage.state_dict().values()} == {"meta"}


@pytest.mark.filterwarnings("ignore:the views help with probability")
@pytest.mark.parametrize(
    "model",
    [
        CategoricalLatent(noise="none"),
        CategoricalMixture(noise="none", weights="view_class"),
        CategoricalMixture(noise="none", weights="input", features="own", gate_scale=1.0),
        CategoricalMixture(noise="none", weights="input", features="all", gate_scale=1.0),
        CategoricalMixture(noise="none", link="probit"),
        "auto",
    ],
)
def test_stages_predict_as_the_policy_does(model):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, CLASSES)).eval()
    inputs = 6 * torch.randn(400, 3, 8, 8)
    views = [Shift(0.25, 0.0), Identity(), Rotate(10.0), HorizontalFlip()]
    collected = collect_views(net, inputs, views)
    rng = np.random.default_rng(0)
    seen = collected.outputs[np.arange(400), rng.integers(4, size=400)]  # one of the views has the label
    labels = (seen + rng.gumbel(size=(400, CLASSES))).argmax(axis=1)
    stages = [[view.name for view in part] for part in (views[:1], views[1:3], views[3:])]
    options = {"task": "classification", "model": model, "stages": stages, "tolerance": 5.0}
    sequential = fit_sequential(collected, labels, **options)
    rules = [replace(sequential, threshold=point.threshold) for point in sequential.curve]
    sequential = max(rules, key=lambda rule: len(np.unique(rule.passes(collected))))
    expected = sequential.predict(collected)
    assert len(np.unique(expected.passes)) > 1
    module = TTAModule(net, views, sequential)
    for size in (1, 64, 400):
        proba = torch.cat([module(batch) for batch in inputs.split(size)])
        np.testing.assert_allclose(proba.numpy(), expected.proba, atol=1e-5)


@pytest.mark.parametrize("features", [None, "own", "pooled"])
def test_maps_in_blocks_with_and_without_gradients_agree(features, monkeypatch):
    """Blocks of two rows that are added in place, and one block with gradients."""
    images = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    net, views = MapNet(CLASSES).eval(), [Identity(), HorizontalFlip(), Shift(0.25, 0.0), Zoom(1.3)]
    maps, seen = restored(net, images, views)
    masks = (30 * (maps * seen[..., None]).mean(0) + np.random.default_rng(0).gumbel(size=maps.shape[1:])).argmax(-1)
    collected = collect_dense(net, images, views, masks, positions=60)
    weights = {} if features is None else {"weights": "input", "features": features, "gate_scale": 1.0}
    policy = fit_policy(*collected, task="classification", model=CategoricalMixture(**weights), guard=False)
    module = TTAModule(net, views, policy).eval()
    monkeypatch.setattr("vbtta.module._NUMBERS_ON_CPU", 64)
    whole = module(images)
    (gradient,) = torch.autograd.grad(whole[:, 0].sum(), net.layers[0].weight)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    with torch.no_grad():
        torch.testing.assert_close(module(images), whole.detach(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("features", ["own", "all"])
def test_logits_that_share_an_offset_keep_their_digits_in_a_gate(features):
    """Weights that depend on log-sum-exp enlarge its rounding errors: 2e-5 where the offset is not removed first."""
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(400, 4))
    logits -= np.log(np.exp(logits).sum(1, keepdims=True)) + 0.1 * rng.normal(size=(400, 1))
    x = torch.tensor(logits, dtype=torch.float32)
    views = [Identity(), as_view(lambda batch: batch.flip(1) + 0.1 * batch[:, :1].sin(), "flip")]
    network = nn.Linear(4, 4).requires_grad_(False)
    network.weight.copy_(torch.eye(4))
    network.bias.fill_(30.0)
    predictions = collect_views(network, x, views)
    larger = np.log(np.exp(predictions.outputs.astype(float) - 30).sum(2)).argmax(1)
    labels = (predictions.outputs[np.arange(400), larger] + rng.gumbel(size=(400, 4))).argmax(1)
    model = CategoricalMixture(weights="input", features=features, gate_scale=1.0)
    policy = fit_policy(predictions, labels, task="classification", model=model, guard=False)
    expected = policy.predict(predictions).proba
    np.testing.assert_allclose(TTAModule(network, views, policy)(x), expected, atol=5e-6)


def test_a_module_is_no_predictor():
    views = [Identity(), HorizontalFlip()]
    predictions = ViewPredictions(np.random.default_rng(0).normal(size=(20, 2, 3)), names=[view.name for view in views])
    policy = fit_policy(predictions, np.arange(20) % 3, task="classification", model="mixture", guard=False)
    with pytest.raises(ValueError, match=r"applies its views by itself; pass the network, \.network"):
        collect_views(TTAModule(nn.Flatten(), views, policy), torch.rand(2, 1, 1, 3), views)


def test_stages_refuse_results_that_are_not_finite(staged):
    net, inputs, views, sequential = staged
    broken = nn.Sequential(net, nn.Threshold(1e9, float("nan")))
    with pytest.raises(ValueError, match="the result is not finite; collect_views says under which view"):
        TTAModule(broken, views, sequential)(inputs[:4])


def test_a_network_without_a_result_and_a_batch_of_nothing_are_named(images, views):
    policy = classification_policy([view.name for view in views])

    class Silent(nn.Module):
        def forward(self, batch):
            return None

    with pytest.raises(ValueError, match=r"the network returned shape \(\) for \d+ rows; the policy was fitted to"):
        TTAModule(Silent(), views, policy)(images)
    with pytest.raises(TypeError, match="TTAModule takes tensors, or dicts or tuples of them"):
        TTAModule(network(CLASSES), views, policy)(None)
