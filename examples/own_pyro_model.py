# ruff: noqa: D100
# %% [markdown]
# # A model of your own: annotators with heavy tails
#
# The built-in noise models give every annotator a bias and a Gaussian noise. Here one annotator is careful and the
# other now and then types nonsense. A likelihood for that takes a few lines of Pyro: it replaces the built-in one,
# and everything else (weights, calibration, predictions, files) stays as it is.

# %%
import numpy as np
import pyro
import pyro.distributions as dist
import torch

from vbtta import ADVI, GaussianMixture, LabelSets, ViewPredictions, fit_policy

# %% [markdown]
# ## Data
#
# Three views of 300 inputs: labels follow the first view in 60 % of the cases, the second in 40 %, the third never. Of
# the second annotator's labels, one in six is far off.

# %%
rng = np.random.default_rng(0)
N = 300
views = rng.normal(size=(N, 1)) + rng.normal(size=(N, 3))
source = rng.choice(3, size=N, p=[0.6, 0.4, 0.0])
truth = views[np.arange(N), source]
noise = np.stack([0.1 * rng.normal(size=N), 0.1 * rng.normal(size=N)], axis=1)
noise[:, 1] += 6 * (rng.random(N) < 1 / 6) * rng.normal(size=N)
labels = LabelSets.from_array(truth[:, None] + noise, annotators=["careful", "careless"])
predictions = ViewPredictions(views[:, :, None], names=["identity", "flip", "blur"])

# %% [markdown]
# ## The model
#
# The function gets tensors in standard units. `prior.sample` draws weights and calibration with their usual priors and
# returns the calibrated views; the rest is up to us: annotator u adds Student-t noise of its own width and degrees of
# freedom. The view a label follows is summed out.


# %%
def heavy_tailed_annotators(predictions, labels, prior):
    """Labels are Student-t around their view, with a width and a tail for every annotator."""
    views = prior.sample(predictions)  # weights (K,), location and scale (n, K, C)
    people = (labels.n_annotators,)
    ones = torch.ones(people, dtype=torch.float64)
    width = pyro.sample("width", dist.HalfNormal(ones).to_event(1))
    tail = pyro.sample("tail", dist.Gamma(2 * ones, 0.1 * ones).to_event(1))
    who = labels.annotator[:, None, None]  # (j, 1, 1)
    scale = torch.sqrt(views.scale[labels.instance] ** 2 + width[who] ** 2)  # (j, K, C)
    noise = dist.StudentT(1 + tail[who], views.location[labels.instance], scale)
    each = noise.log_prob(labels.value[:, None]).sum(dim=-1)  # (j, K)
    mixed = torch.logsumexp(views.log_weights + each, dim=-1)
    pyro.factor("labels", (labels.count * mixed).sum())


# %% [markdown]
# ## Fit and compare
#
# A model without tails keeps a view for the nonsense: `blur`, which has nothing to do with the labels, gets the weight
# of the careless annotator's slips. With tails the slips are the annotator's.

# %%
engine = ADVI(steps=600, particles=2, learning_rate=0.1)
plain = fit_policy(predictions, labels, task="regression", model=GaussianMixture(noise="none"), guard=False)
robust = fit_policy(predictions, labels, task="regression", model=heavy_tailed_annotators, engine=engine)

draws = robust.draws(1000)
tail = dict(zip(labels.annotator_names, 1 + np.median(draws["tail"], axis=0), strict=True))

print("without tails:", dict(zip(plain.names, plain.weights.round(3), strict=True)))
print("with tails:   ", dict(zip(robust.names, robust.weights.round(3), strict=True)))
print("degrees of freedom:", {name: round(float(value), 1) for name, value in tail.items()})
