"""Where matrix products depend on their shapes, whoever starts the engine is told; nobody is where they do not."""

import pytest
import torch

from roost import startup
from roost.attention.registry import TORCH
from roost.layers.batch_invariance import AttentionPadding
from roost.models.model import KvShape

CPU = torch.device("cpu")
EVERY = tuple(range(64, 513, 64))


class Heads:
    """A model, as far as attention goes."""

    kv = (KvShape(num_kv_heads=1, head_dim=64, scale=1.0, dtype=torch.float32),)


@pytest.mark.parametrize(
    ("attention", "rows", "weights", "is_told"),
    [
        (True, 4, "int8", False),
        (True, 4, "fp32", False),
        (True, None, "int8", False),  # whole numbers are summed the same in any order
        (True, None, "fp32", True),
        (False, 4, "int8", True),
        (False, 4, "fp32", True),
        (False, None, "bf16", False),  # of which nothing is promised
    ],
)
def test_it_is_said_where_a_text_may_depend_on_its_pass(
    attention: bool, rows: int | None, weights: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = AttentionPadding(rows=4, tails=EVERY, is_exact=attention)
    monkeypatch.setattr(startup, "attention_padding", lambda head_dim: padding)
    monkeypatch.setattr(startup, "row_multiple", lambda num_threads: rows)
    told = startup._inexact(Heads(), weights, CPU, TORCH)  # type: ignore[arg-type]
    assert bool(told) == is_told
    assert startup._inexact(Heads(), weights, torch.device("cuda"), TORCH) == ()  # type: ignore[arg-type]
