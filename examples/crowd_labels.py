# ruff: noqa: D100
# %% [markdown]
# # Crowd labels: who is right, and what is true
#
# A long table of answers, as labelling platforms export it: one row an answer, some inputs with many, some with one,
# some with none. From the table and a model's predictions come the weights of the views, the skill of every annotator
# and the most probable label of every input.

# %%
import numpy as np

from vbtta import CategoricalMixture, LabelSets, ViewPredictions, fit_policy

rng = np.random.default_rng(0)
N, CLASSES = 800, np.array(["bird", "cat", "dog", "fox"])
truth = rng.integers(0, 4, size=N)

# %% [markdown]
# ## A model's logits under four views
#
# The model takes foxes for dogs now and then. `blur` is noise.

# %%
look = np.eye(4)[truth]
look[truth == 3, 2] += 0.7
logits = 2.2 * look[:, None] + rng.normal(size=(N, 4, 4)) * np.array([1.0, 1.0, 1.3, 3.0])[:, None]
ids = np.array([f"photo-{i:04d}" for i in range(N)])
predictions = ViewPredictions(logits, names=["identity", "flip", "zoom", "blur"], ids=ids, classes=CLASSES)

# %% [markdown]
# ## Twelve annotators
#
# Most are careful, two click at random, and one calls every fox a dog.

# %%
skill = np.array([0.95, 0.92, 0.9, 0.88, 0.85, 0.85, 0.8, 0.8, 0.75, 0.9, 0.25, 0.25])
instance, annotator, answer = [], [], []
for i in range(N):
    for person in rng.choice(12, size=rng.integers(0, 5), replace=False):
        right = rng.random() < skill[person]
        position = truth[i] if right else rng.choice(np.delete(np.arange(4), truth[i]))
        if person == 9 and truth[i] == 3:
            position = 2
        instance.append(ids[i])
        annotator.append(f"worker {person}")
        answer.append(CLASSES[position])
labels = LabelSets.from_table(instance, answer, annotator)
print(labels)

# %% [markdown]
# ## Fit
#
# With some two hundred answers a worker there is enough for a matrix each, which is the default where labels overlap.

# %%
policy = fit_policy(predictions, labels, task="classification", model=CategoricalMixture())
print(policy)
people = policy.annotators
for place in np.argsort(people.accuracy)[:3]:
    low, high = people.accuracy_interval[place]
    print(f"{people.names[place]} is right in {100 * people.accuracy[place]:.0f} % [{100 * low:.0f}, {100 * high:.0f}]")
worker = people.names.index("worker 9")
print("worker 9 calls a fox a dog with probability", people.confusion[worker][3, 2].round(2))

# %% [markdown]
# ## Consensus
#
# For every photo with an answer, from all answers and all views together.

# %%
consensus = policy.consensus(predictions, labels)
votes = np.zeros((N, 4))
np.add.at(votes, (np.searchsorted(ids, instance), np.searchsorted(CLASSES, answer)), 1)
asked = votes.sum(axis=1) > 0
majority = (votes + 1e-6 * rng.random(votes.shape)).argmax(axis=1)
print(f"majority right  {100 * np.mean(majority[asked] == truth[asked]):.1f} %")
print(f"consensus right {100 * np.mean(consensus.label[asked] == CLASSES[truth[asked]]):.1f} %")

# %% [markdown]
# ## Whom to ask again
#
# The least certain photos are where another answer is worth most.

# %%
doubt = 1 - consensus.proba.max(axis=1)
for i in np.argsort(-doubt)[:3]:
    best = consensus.proba[i].argsort()[::-1][:2]
    print(ids[i], ", ".join(f"{CLASSES[c]} {consensus.proba[i, c]:.2f}" for c in best))
