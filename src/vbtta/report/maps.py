"""Images of a segmentation for the report: input, truth, prediction, entropy and the views' maps."""

__all__ = ["MapExample", "map_examples"]

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vbtta import metrics
from vbtta._support.checks import require
from vbtta.data.labels import Array
from vbtta.plotting import COLOURS

_MAX_SIDE = 256  # pixels of a picture; larger maps are thinned
_MAX_VIEWS = 12  # the heaviest are shown


class MapExample(NamedTuple):
    """One image and its maps."""

    name: str
    dice: float
    panels: dict[str, Array]  # (H, W) or (H, W, 3) uint8 by title


def map_examples(
    module: Any, inputs: Iterable[Any], masks: Iterable[ArrayLike], *,
    names: Sequence[Any] | None = None, count: int = 2, ignore: int | None = None, background: int | None = None,
) -> list[MapExample]:  # fmt: skip
    """Make the pictures of the `count` worst and best predicted images, by Dice score; of volumes the middle slices.

    `module` is the TTAModule of a classification, `inputs` are tensors (channels, H, W) or (channels, D, H, W) and
    `masks` their classes. They are read one after another, so generators need little memory; images without a class to
    score are left out. `ignore` and `background` as in :func:`vbtta.metrics.dice`.
    """
    torch = require("torch", "torch")
    kept: list[tuple[float, int, Any, Array, Array]] = []
    with torch.no_grad():
        for i, (single, mask) in enumerate(zip(inputs, map(np.asarray, masks), strict=True)):
            proba = module(single[None])[0].cpu().numpy()
            scores = metrics.dice_scores(mask[None], proba[None], ignore=ignore)[0]
            scores = scores if background is None else np.delete(scores, background)
            if not np.isnan(scores).all():
                kept.append((float(np.nanmean(scores)), i, single, mask, proba))
                kept.sort(key=lambda example: example[:2])
                del kept[count : len(kept) - count]
        return [
            MapExample(str(i if names is None else names[i]), score, _panels(module, single, mask, proba))
            for score, i, single, mask, proba in kept
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
    weights = dict(zip(module.policy.names, module.policy.weights, strict=True))
    names = [view.name for view in module.views]
    shown = set(sorted(names, key=lambda name: -weights[name])[:_MAX_VIEWS])
    with evaluating(module.network):
        for (view,), outputs, seen in module._outputs(module._in_precision(single[None]), False):
            if names[view] in shown and names[view] not in panels:
                classes = outputs[0, 0].argmax(0)
                classes = classes if seen is None else classes.where(seen[0, 0], -1)
                panels[names[view]] = _colours(classes.cpu().numpy(), len(proba))
    step = -(-max(mask.shape[-2:]) // _MAX_SIDE)
    slices = {title: panel if mask.ndim == 2 else panel[len(panel) // 2] for title, panel in panels.items()}
    return {title: panel[::step, ::step] for title, panel in slices.items()}


def _colours(classes: Array, n_classes: int) -> Array:
    """Classes as colours, the first one black; values that are no classes are grey."""
    table = [[int(colour[start : start + 2], 16) for start in (1, 3, 5)] for colour in COLOURS]
    palette = np.array([[0, 0, 0], *(table[c % len(table)] for c in range(n_classes - 1)), [160] * 3], dtype=np.uint8)
    return palette[np.where((classes >= 0) & (classes < n_classes), classes, n_classes)]
