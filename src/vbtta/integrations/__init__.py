"""Drop-ins for segmentation frameworks: :mod:`vbtta.integrations.monai` and :mod:`vbtta.integrations.nnunet`."""

__all__ = ["collect_items"]

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.dense import collect_dense


def collect_items(
    predictor: Any, n_items: int, load: Callable[[int], tuple[Any, Any]], views: Any, **options: Any
) -> tuple[ViewPredictions, LabelSets]:
    """Collect maps as :func:`vbtta.collect_dense`, with one item of the data in memory at a time.

    `load` takes an item's number, and returns its input (channels, H, W) or (channels, D, H, W) and its target.
    """
    cached = lru_cache(maxsize=1)(load)
    return collect_dense(
        predictor, (cached(i)[0][None] for i in range(n_items)), views, _Targets(n_items, cached), **options
    )


class _Targets(Sequence[Any]):
    """Targets that are read when they are asked for."""

    def __init__(self, n_items: int, load: Callable[[int], tuple[Any, Any]]) -> None:
        self.n_items, self.load = n_items, load

    def __len__(self) -> int:
        return self.n_items

    def __getitem__(self, item: Any) -> Any:
        return self.load(item)[1]
