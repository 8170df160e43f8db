# ruff: noqa: D100
# %% [markdown]
# # Tabular regression: views of rows
#
# A boosted model on scikit-learn's diabetes data, whose labels are noisy enough that intervals matter more than the
# last digit of the error. Views of a row are rows nearby.

# %%
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_score

from vbtta import VBTTARegressor
from vbtta.augment import FeatureDropout, GaussianNoise, Identity, Mixup
from vbtta.metrics import interval_coverage

X, y = load_diabetes(return_X_y=True)
X = X / X.std(axis=0)
order = np.random.default_rng(0).permutation(len(X))
train, calibration, test = np.split(order, [150, 290])

# %% [markdown]
# ## A frozen model
#
# The model is fitted once; the views are weighed on rows it has not seen.

# %%
model = GradientBoostingRegressor(n_estimators=60, random_state=0).fit(X[train], y[train])
views = [
    Identity(), GaussianNoise(0.1), GaussianNoise(0.3), GaussianNoise(0.6),
    FeatureDropout(0.2), Mixup(0.5, X[train]), Mixup(0.9, X[train]),
]  # fmt: skip
weighted = VBTTARegressor(model, views, draws=16).fit(X[calibration], y[calibration])
print(weighted.policy_)
print(weighted.policy_.guard.reason)

# %%
mean, std = weighted.predict(X[test], return_std=True)
for name, prediction in (("model", model.predict(X[test])), ("weighted views", mean)):
    print(f"{name:14s} absolute error {np.mean(np.abs(prediction - y[test])):.1f}")
lower, upper = weighted.predict_distribution(X[test]).interval(0.9)
print(f"90 % intervals hold {100 * interval_coverage(y[test][:, None], lower, upper):.0f} % of the labels")

# %% [markdown]
# ## Without a sample to spare
#
# With a splitter the model is fitted out of fold, the views are weighed on what each fold left out, and a last model is
# fitted to everything. Being an estimator, it can be cross-validated itself.

# %%
unfitted = GradientBoostingRegressor(n_estimators=60, random_state=0)
whole = VBTTARegressor(unfitted, views, cv=KFold(3), draws=8)
print(whole.fit(X[order[:290]], y[order[:290]]).policy_)
scores = {
    name: -cross_val_score(estimator, X[order[:290]], y[order[:290]], cv=3, scoring="neg_mean_absolute_error").mean()
    for name, estimator in (("model", unfitted), ("weighted views", whole))
}
print({name: round(float(score), 1) for name, score in scores.items()})
