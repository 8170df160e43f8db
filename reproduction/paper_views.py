"""The views of the paper's experiments."""

from collections.abc import Sequence
from typing import Any

from vbtta.augment import CutMix, Mixup, Pool


def mixup_and_cutmix(pool: Any, alphas: Sequence[float] = (0.1, 0.5, 0.9)) -> list[Mixup | CutMix]:
    """Mixup and cutmix at three strengths; `pool` are the training inputs, `alphas` parameters of the Beta."""
    shared = Pool(pool)
    return [kind(alpha, shared) for kind in (Mixup, CutMix) for alpha in alphas]
