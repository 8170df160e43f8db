# ruff: noqa: D100
# %% [markdown]
# # Prompts as views
#
# K prompts of a classifier are weighted by class. `classify` stands for a language model: log probabilities of prompts.

# %%
import numpy as np

from vbtta import CategoricalMixture, collect_views, fit_policy
from vbtta.augment.text import Template

CUES = {"awful": 0, "dull": 0, "fine": 1, "plain": 1, "superb": 2, "warm": 2}
TEMPLATES = ["{}", "Review: {} Sentiment:", "Is this praise? {}", "Is this a complaint? {}"]


def classify(prompts):
    """Log probabilities (B, 3): a question tells one class from the rest, and no prompt is calibrated."""
    logits = np.zeros((len(prompts), 3))
    for row, prompt in zip(logits, prompts, strict=True):
        asked = 2 if "praise" in prompt else 0 if "complaint" in prompt else None
        for word in set(CUES) & set(prompt.split()):
            row[CUES[word]] += 2.0 if asked is None else 6.0 if asked == CUES[word] else 1.0
        row += 1.5 * np.random.default_rng(list(prompt.encode())).normal(size=3)  # what a model does not know
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


rng = np.random.default_rng(0)
labels = rng.integers(3, size=600)
texts = [f"film {i} is {rng.choice([word for word, c in CUES.items() if c == y])}" for i, y in enumerate(labels)]
prompts, classes = [Template(template) for template in TEMPLATES], ["negative", "neutral", "positive"]
predictions = collect_views(classify, texts, prompts, classes=classes)
fitted, test = predictions.take(np.arange(300)), predictions.take(np.arange(300, 600))
policy = fit_policy(fitted, labels[:300], task="classification", model=CategoricalMixture(weights="view_class"))
answers = {"one prompt": test.outputs[:, 0].argmax(axis=1), "weighted": policy.predict(test).proba.argmax(axis=1)}
accuracy = {name: round(float(np.mean(answer == labels[300:])), 3) for name, answer in answers.items()}
print(accuracy)
print(policy.to_frame().round(2))
