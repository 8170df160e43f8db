"""The picture that opens the README: an image of the demo under its views, and reliability before and after.

python docs/_site/first_picture.py          # some 20 seconds; writes docs/assets/demo.png
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from vbtta import TTAModule, collect_dense, metrics, select_views
from vbtta.augment.serial import load_views
from vbtta.cli import demo

torch.set_num_threads(1)
train, (inputs, cells), (test_images, test_cells) = (
    demo.draw_cells(n, light, np.random.default_rng([0, part]))
    for part, (n, light) in enumerate([(16, 1.0), (40, 0.8), (60, 0.8)])
)
network, views = demo.train_network(torch, *train, 0), load_views(demo.VIEWS)
drawn = demo.rate(cells, np.random.default_rng([0, 3]))
images = torch.from_numpy(test_images)
predictions, labels = collect_dense(
    network, torch.from_numpy(inputs), views, drawn, positions=50, raters=list(demo.RATERS)
)
policy = select_views(predictions, labels, budget=4, task="classification")
with torch.no_grad():
    before = network(images).softmax(1).numpy()
    after = TTAModule(network, views, policy).eval()(images).numpy()

masks, chosen = (test_cells > 0).astype(int), 7
weight = dict(zip(policy.names, policy.weights, strict=True))
by_weight = sorted(views, key=lambda view: -weight[view.name])
shown = [*by_weight[:3], *by_weight[-2:]]
figure, axes = plt.subplots(2, 5, figsize=(10, 4.5), layout="constrained")
for axis, view in zip(axes[0], shown, strict=True):
    axis.imshow(view(images[chosen : chosen + 1])[0, 0], cmap="gray", vmin=0, vmax=1)
    axis.set_title(view.name, fontsize=10)
    axis.set_xlabel(f"weight {weight[view.name]:.2f}", fontsize=10)
for axis, title, picture in [
    (axes[1, 0], "truth", masks[chosen]),
    (axes[1, 1], "network alone", before[chosen, 1]),
    (axes[1, 2], "policy", after[chosen, 1]),
]:
    axis.imshow(picture, cmap="viridis", vmin=0, vmax=1)
    axis.set_title(title, fontsize=10)
    score = metrics.dice(masks, {"network alone": before, "policy": after}.get(title, before), background=0)
    axis.set_xlabel("" if title == "truth" else f"Dice of {len(masks)} images: {score:.2f}", fontsize=9)
for axis, title, proba in [(axes[1, 3], "network alone", before), (axes[1, 4], "policy", after)]:
    confidence, hit = proba.max(1).ravel(), (proba.argmax(1) == masks).ravel()
    place = np.minimum(((confidence - 0.5) * 20).astype(int), 9)
    sums = [np.bincount(place, values, 10) for values in (confidence, hit, np.ones(len(place)))]
    axis.plot([0.5, 1], [0.5, 1], ":", color="gray")
    axis.plot(sums[0] / sums[2], sums[1] / sums[2], "o-", markersize=4)
    axis.set(title=f"reliability, {title}", xlabel="confidence", ylabel="share right", box_aspect=1)
    axis.title.set_fontsize(10)
for axis in [*axes[0], *axes[1, :3]]:
    axis.set(xticks=[], yticks=[])
figure.savefig(Path(__file__).parents[1] / "assets" / "demo.png", dpi=110)
