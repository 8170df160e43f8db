"""What is assumed and how it is inferred: models and engines as small frozen records, validated when built."""

__all__ = [
    "ADVI",
    "EM",
    "CategoricalLatent",
    "CategoricalMixture",
    "CategoricalNoise",
    "EngineSpec",
    "GaussianLatent",
    "GaussianMixture",
    "ModelSpec",
    "OrdinalMixture",
    "PyroModel",
    "RankingMixture",
    "spec_from_dict",
    "spec_to_dict",
]

from vbtta.specs.engines import ADVI, EM, EngineSpec
from vbtta.specs.models import (
    CategoricalLatent,
    CategoricalMixture,
    CategoricalNoise,
    GaussianLatent,
    GaussianMixture,
    ModelSpec,
    OrdinalMixture,
    PyroModel,
    RankingMixture,
)
from vbtta.specs.plain import spec_from_dict, spec_to_dict
