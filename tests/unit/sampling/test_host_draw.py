"""Draws on the host: the token is the reference's, whatever the logits and options, or the host leaves it to that."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.layers import gumbel, host_gumbel
from roost.sampling import draw
from roost.sampling.host_draw import HostDraw

OPTIONS = {
    "temperature": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 60, "top_p": 0.8, "min_p": 0.01},
}


def reference(logits: np.ndarray, key: int, *, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """The same by way of `sampling.draw` and `layers.gumbel`."""
    values = torch.from_numpy(logits)[None]
    weights = draw.weights_of(values, torch.tensor([temperature], dtype=torch.float64))
    limits = torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64)
    weights = draw.truncated(values, weights, *limits, top_k) if top_k < len(logits) or top_p < 1 else weights
    weights = draw.above(weights, torch.tensor([min_p], dtype=torch.float64))
    if top_k < len(logits) or top_p < 1 or min_p:
        values = values.masked_fill(weights == 0, -torch.inf)
    scores = gumbel._scaled(values, torch.tensor([temperature]))
    return int((scores + gumbel.noise(torch.tensor([key - 2**63]), torch.arange(len(logits)))).argmax())


def rows_of(vocab_size: int) -> list[np.ndarray]:
    """Rows like those of text, peaked, flat, of many equal logits, and with tokens that are forbidden."""
    generator = np.random.default_rng(vocab_size)
    text = -2 * np.log(generator.permutation(vocab_size) + 1)
    forbidden = np.where(generator.random(vocab_size) < 0.5, -np.inf, text)
    shapes = (text, 9 * text, text / 50, np.round(text), forbidden, generator.normal(size=vocab_size) * 4 - 1000)
    return [shape.astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab_size", [301, 8192])
def test_the_token_is_the_references(vocab_size: int, options: dict[str, float]) -> None:
    host, generator, num_drawn = HostDraw(vocab_size), np.random.default_rng(0), 0
    for logits in rows_of(vocab_size):
        for temperature in (0.3, 1.0, 2.5):
            asked = {"temperature": temperature, "top_k": vocab_size, "top_p": 1.0, "min_p": 0.0, **options}
            for key in (0, *generator.integers(2**63, size=12).tolist(), 2**63 - 1):
                found = host.draw(logits, (key - 2**63) % 2**64, **asked)  # type: ignore[arg-type]
                num_drawn += found is not None
                assert found in (None, reference(logits, key, **asked))  # type: ignore[arg-type]
    assert num_drawn > 120, "of 252 draws, most are made here"


def test_what_float32_cannot_tell_is_left_to_the_reference() -> None:
    asked = {"top_k": 3, "top_p": 1.0, "min_p": 0.0}
    for logits, temperature in (([1, 2, 3], 9e-4), ([1e30, 1, 1], 1), ([np.nan, 1, 2], 1), ([-np.inf] * 3, 1)):
        assert HostDraw(3).draw(np.array(logits, dtype=np.float32), 5, temperature=temperature, **asked) is None  # type: ignore[arg-type]
    assert HostDraw(3).draw(np.array([9e29, 1, 1], dtype=np.float32), 5, temperature=1e-3, **asked) == 0  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, 1.0, -np.inf, np.nan, np.inf]), min_size=1),
    st.floats(0.01, 5),
    st.integers(1, 20),
    st.floats(0.01, 1),
    st.sampled_from([0.0, 0.02, 1.0]),
    st.integers(0, 2**63 - 1),
)
@settings(max_examples=300, deadline=None)
def test_few_tokens_with_any_options_are_drawn_as_the_reference_does(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, key: int
) -> None:
    logits = np.array(values, dtype=np.float32)
    asked = {"temperature": temperature, "top_k": min(top_k, len(logits)), "top_p": top_p, "min_p": min_p}
    found = HostDraw(len(logits)).draw(logits, (key - 2**63) % 2**64, **asked)  # type: ignore[arg-type]
    sane = draw.sane(torch.from_numpy(logits)).numpy()
    assert found in (None, reference(sane, key, **asked))  # type: ignore[arg-type]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_the_key_of_a_seed_and_a_position_is_the_references(seed: int, position: int) -> None:
    found = gumbel.draw_keys(torch.tensor([seed]), torch.tensor([position])).item()
    assert host_gumbel.draw_key(seed, position) == found % 2**64
