"""The same jobs on a cluster, by Ray: collecting views, fitting weights and predicting."""

__all__ = ["collect_views", "fit_policy", "predict"]

from vbtta.ray.collect import collect_views
from vbtta.ray.fit import fit_policy
from vbtta.ray.predict import predict
