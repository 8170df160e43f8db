"""The same jobs on a cluster, by Ray: collecting views, fitting weights, and fitting a stream."""

__all__ = ["StreamingFit", "collect_views", "fit_policy"]

from vbtta.scale.collect import collect_views
from vbtta.scale.fit import fit_policy
from vbtta.scale.streaming import StreamingFit
