"""Shapes of speculation as configuration: what tests that think in S, K and T tell the engine.

A drafter with pairs is named eagle; no head is read from its folder by the control plane.
"""

from roost.config.options import AUTO, SpecConfig
from roost.spec_shape import PLAIN, DraftKv, SpecShape

# the widest rounds, where the length is chosen by cost
AUTO_NGRAM = SpecShape(steps=6, topk=1, tokens=17, reads_history=True, lookup_steps=16)
AUTO_CHAIN = SpecShape(steps=6, topk=1, tokens=7, draft_kv=DraftKv.PAIR)
AUTO_JOINT = SpecShape(steps=6, topk=1, tokens=17, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=16)


def spec_config(shape: SpecShape, max_batch: int | None = None, *, auto: bool = False) -> SpecConfig:
    """The options that make this shape; with `auto` those whose widest rounds have it.

    A head drafts alone unless the shape reads history.
    """
    if shape == PLAIN:
        return SpecConfig(spec_max_batch=max_batch)
    return SpecConfig(
        spec="eagle" if shape.pair else "ngram",
        draft="head" if shape.pair else None,
        spec_steps=AUTO if auto else shape.steps,
        spec_topk=shape.topk,
        spec_tokens=None if auto else shape.tokens,
        spec_lookup="off" if shape.pair and not shape.reads_history else None,
        spec_max_batch=max_batch,
    )
