"""Layers may differ in their heads and share KV: what a decoder says of its KV, and what cannot be is refused."""

from dataclasses import replace

import pytest
import torch

from roost.errors import ConfigError
from roost.layers.rotary import Rope
from roost.models.decoder import kv_shapes
from roost.models.decoder_layers import DecoderConfig, Heads, LayerKind
from roost.models.model import KvShape

LARGE = LayerKind(rope=Rope(theta=500.0), heads=Heads(num_kv_heads=1, head_dim=16, scale=1.0))
SMALL = LayerKind(rope=Rope(theta=50.0), window=8)
CONFIG = DecoderConfig(
    vocab_size=11,
    hidden_size=12,
    intermediate_size=20,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    context_max=128,
    layers=(SMALL, LARGE, SMALL, replace(SMALL, shares=2), replace(LARGE, shares=1), SMALL),
    scale=0.5,
    norm_eps=1e-6,
    tied=True,
)


def test_a_layer_may_have_heads_of_its_own_and_one_that_shares_keeps_no_kv() -> None:
    small = KvShape(window=8, num_kv_heads=2, head_dim=4, scale=0.5, dtype=torch.float32)
    large = KvShape(num_kv_heads=1, head_dim=16, scale=1.0, dtype=torch.float32)
    assert kv_shapes(CONFIG, torch.float32) == (small, large, small, small)
    assert CONFIG.kv_numbers == (0, 1, 2, 2, 1, 3)
    assert CONFIG.num_layers == 6


def test_layers_that_no_decoder_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 heads do not share 4 KV heads"):
        replace(CONFIG, layers=(replace(LARGE, heads=Heads(num_kv_heads=4, head_dim=16, scale=1.0)),))
    with pytest.raises(ConfigError, match="head_dim must be even for rotary positions, got 5"):
        replace(CONFIG, layers=(replace(LARGE, heads=Heads(num_kv_heads=1, head_dim=5, scale=1.0)),))
    with pytest.raises(ConfigError, match="layers with one window have KV heads of different numbers or sizes"):
        replace(CONFIG, layers=(replace(LARGE, window=8), SMALL))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (3, replace(SMALL, shares=1)),  # of another window
        (3, replace(SMALL, shares=3)),  # itself
        (3, replace(SMALL, shares=5)),  # a later one
        (5, replace(SMALL, shares=3)),  # one that keeps none
        (4, replace(LARGE, rope=SMALL.rope, shares=1)),  # whose keys turn otherwise
    ],
)
def test_a_layer_reads_the_kv_of_an_earlier_one_of_its_kind_that_keeps_some(number: int, kind: LayerKind) -> None:
    layers = (*CONFIG.layers[:number], kind, *CONFIG.layers[number + 1 :])
    with pytest.raises(ConfigError, match=f"layer {number} cannot read the KV of layer {kind.shares}"):
        replace(CONFIG, layers=layers)
