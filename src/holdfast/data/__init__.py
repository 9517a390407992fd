"""The order in which a training sees its samples, whatever its world size: `ElasticSampler` and what it is made of."""

from __future__ import annotations

from holdfast.data.sampler import DataChanged, ElasticSampler

__all__ = ["DataChanged", "ElasticSampler"]
