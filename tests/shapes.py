"""Shapes of speculation as configuration: what tests that think in S, K and T tell the engine.

A drafter with pairs is named eagle; no head is read from its folder by the control plane.
"""

from roost.config import SpecConfig
from roost.spec.shape import PLAIN, SpecShape


def spec_config(shape: SpecShape, max_batch: int | None = None) -> SpecConfig:
    """The options that make this shape."""
    if shape == PLAIN:
        return SpecConfig(spec_max_batch=max_batch)
    return SpecConfig(
        spec="eagle" if shape.pair else "ngram",
        draft="head" if shape.pair else None,
        spec_steps=shape.steps,
        spec_topk=shape.topk,
        spec_tokens=shape.tokens,
        spec_max_batch=max_batch,
    )
