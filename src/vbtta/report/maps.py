"""Images of a segmentation for the report: input, truth, prediction, entropy and the views' maps."""

__all__ = ["MapExample", "map_examples"]

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta import metrics
from vbtta._support.checks import require
from vbtta.data.labels import Array
from vbtta.plotting import COLOURS


class MapExample(NamedTuple):
    """One image and its maps."""

    name: str
    dice: float
    panels: dict[str, Array]  # (H, W) or (H, W, 3) uint8 by title


def map_examples(
    module: Any,
    inputs: Sequence[Any],
    masks: Sequence[ArrayLike],
    *,
    names: Sequence[Any] | None = None,
    count: int = 2,
    ignore: int | None = None,
    background: int | None = None,
) -> list[MapExample]:
    """Make the pictures of the worst and the best predicted images, by Dice score; of volumes the middle slices.

    Parameters
    ----------
    module : TTAModule
        Of a classification; its network and the views of its policy are shown.
    inputs, masks : sequences of tensors and of arrays
        (channels, H, W) or (channels, D, H, W), and classes without the channels.
    names : sequence, optional
        Of the images; their numbers by default.
    count : int
        How many of the worst, and of the best.
    ignore, background : int, optional
        As in :func:`vbtta.metrics.dice`.

    Examples
    --------
    >>> page = render_report(policy, maps=map_examples(module, images, masks))  # doctest: +SKIP
    """
    torch = require("torch", "torch")
    names = list(range(len(inputs))) if names is None else names
    with torch.no_grad():
        maps = [module(single[None])[0].cpu().numpy() for single in inputs]
        options: dict[str, Any] = {"ignore": ignore, "background": background}
        truth = [np.asarray(mask) for mask in masks]
        scores = [metrics.dice(y[None], p[None], **options) for y, p in zip(truth, maps, strict=True)]
        order = np.argsort(scores, kind="stable").tolist()
        return [
            MapExample(str(names[i]), float(scores[i]), _panels(module, inputs[i], truth[i], maps[i]))
            for i in dict.fromkeys(order[:count] + order[-count:])
        ]


def _panels(module: Any, single: Any, mask: Array, proba: Array) -> dict[str, Array]:
    """Pictures by title."""
    from vbtta.adapters.torch import evaluating

    image, entropy = single.cpu().numpy().mean(axis=0), metrics.entropy(np.moveaxis(proba, 0, -1))
    low, high = image.min(), image.max()
    panels = {
        "input": (255 * (image - low) / max(high - low, 1e-12)).astype(np.uint8),
        "truth": _colours(mask, len(proba)),
        "prediction": _colours(proba.argmax(axis=0), len(proba)),
        "entropy": (255 * np.clip(entropy / np.log(len(proba)), 0, 1)).astype(np.uint8),
    }
    with evaluating(module.network):
        for (view,), outputs, seen in module._outputs(module._in_precision(single[None]), False):
            classes = outputs[0, 0].argmax(0)
            classes = classes if seen is None else classes.where(seen[0, 0], -1)
            panels[module.views[view].name] = _colours(classes.cpu().numpy(), len(proba))
    return {title: panel if mask.ndim == 2 else panel[len(panel) // 2] for title, panel in panels.items()}


def _colours(classes: Array, n_classes: int) -> Array:
    """Classes as colours, the first one black; values that are no classes are grey."""
    table = [[int(colour[start : start + 2], 16) for start in (1, 3, 5)] for colour in COLOURS]
    palette = np.array([[0, 0, 0], *(table[c % len(table)] for c in range(n_classes - 1)), [160] * 3], dtype=np.uint8)
    return palette[np.where((classes >= 0) & (classes < n_classes), classes, n_classes)]
