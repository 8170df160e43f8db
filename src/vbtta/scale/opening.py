"""The first blocks of a stream, kept until there are enough labels to start from."""

__all__ = ["Opening"]

from typing import NamedTuple

from vbtta.labels import LabelSets
from vbtta.predictions import ViewPredictions
from vbtta.scale.tables import About
from vbtta.scale.worker import Taken, joined

_ENOUGH = 5_000  # labels that are fitted together before blocks are forgotten
_GROWTH = 2  # times the labels of the last fit, from which they are fitted together again


class Opening(NamedTuple):
    """Blocks that are fitted to the end as one, again and again as they grow, until they hold enough labels.

    Steps of a stream average expansions around the states they started from, so a poor first state misleads for long,
    and a view that a few labels did not speak for comes back slowly.
    """

    blocks: tuple[Taken, ...] = ()
    n_labels: float = 0.0
    n_fitted: float = 0.0  # labels of the last fit

    @property
    def over(self) -> bool:
        """Whether there were enough labels, and nothing is kept any more."""
        return self.n_labels >= _ENOUGH

    def add(self, predictions: ViewPredictions, labels: LabelSets) -> tuple["Opening", Taken | None]:
        """With one more block; and all blocks as one, where it is time to fit them."""
        rows = labels.labelled
        block = predictions.take(rows)
        anonymous = About.of(block).predictions(None, block.mean, block.variance)
        blocks = (*self.blocks, Taken(anonymous, labels.take(rows)))
        n_labels = self.n_labels + labels.total
        if n_labels < min(_ENOUGH, _GROWTH * self.n_fitted):
            return Opening(blocks, n_labels, self.n_fitted), None
        together = joined(list(blocks))
        return Opening(() if n_labels >= _ENOUGH else (together,), n_labels, n_labels), together
