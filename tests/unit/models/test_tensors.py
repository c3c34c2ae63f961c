"""A state dict is taken apart completely: what is missing, misshapen, not of floats or left over is refused by name."""

import pytest
import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.models.decoder import Decoder
from roost.models.registry import decoder_config
from roost.models.tensors import Tensors
from tests.support.config_files import LLAMA, llama_tensors

CPU = torch.device("cpu")
CONFIG = decoder_config(LLAMA)
NAME = "model.layers.1.self_attn.k_proj.weight"


def load(changes: dict[str, Tensor | None], *, tied: bool = False) -> Decoder:
    """A decoder of the tiny checkpoint with some tensors set, or left out."""
    state = {**llama_tensors(CONFIG), **changes}
    config = decoder_config({**LLAMA, "tie_word_embeddings": tied})
    return Decoder(config, {name: tensor for name, tensor in state.items() if tensor is not None}, "fp32", CPU)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({NAME: None}, f"the checkpoint has no tensor {NAME}"),
        ({"lm_head.weight": None}, "the checkpoint has no tensor lm_head.weight"),
        ({NAME: torch.zeros(7, 12)}, f"the checkpoint's {NAME} is [7, 12], its config says [8, 12]"),
        (
            {NAME: torch.zeros(8, 12, dtype=torch.int8)},
            f"the checkpoint's {NAME} is of torch.int8; weights are read as",
        ),
        (
            {"a.bias": torch.zeros(1), "b": torch.zeros(1)},
            "the checkpoint has tensors that this model does not use: a.b",
        ),
        (
            {f"x{i}": torch.zeros(1) for i in range(10, 30)},
            "the checkpoint has tensors that this model does not use: x10",
        ),
    ],
)
def test_a_checkpoint_that_does_not_match_its_config_is_refused(changes: dict[str, Tensor | None], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(changes)
    assert str(refusal.value).startswith(said)


def test_a_long_list_of_tensors_left_over_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"x10, .*, x17 and 12 more$"):
        load({f"x{i}": torch.zeros(1) for i in range(10, 30)})


def test_tensors_that_say_nothing_new_are_dropped() -> None:
    load({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    load({}, tied=True)
    load({"lm_head.weight": None}, tied=True)


def test_a_model_keeps_nothing_of_the_state_it_was_made_of() -> None:
    state = llama_tensors(CONFIG)
    model = Decoder(CONFIG, state, "fp32", CPU)
    for tensor in state.values():
        tensor.fill_(torch.nan)
    assert model.embed(torch.tensor([3])).isfinite().all()
    assert model.logits(torch.ones(1, 12)).isfinite().all()


def test_whole_numbers_and_marks_are_taken_as_such_and_once() -> None:
    state = {"ids": torch.tensor([3, -1], dtype=torch.int32), "marks": torch.tensor([True, False])}
    tensors = Tensors(state, CPU, torch.float32)
    assert tensors.has("ids")
    assert tensors.take_integers("ids", 2).tolist() == [3, -1]
    assert not tensors.has("ids")
    assert tensors.take_integers("marks", 2).dtype == torch.int64
    tensors.check_all_taken()


def test_floats_are_not_taken_for_whole_numbers() -> None:
    tensors = Tensors({"ids": torch.zeros(2), "more": torch.zeros(3, dtype=torch.int64)}, CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"ids is of torch.float32; it is read as integers or booleans"):
        tensors.take_integers("ids", 2)
    with pytest.raises(ConfigError, match=r"more is \[3\], its config says \[2\]"):
        tensors.take_integers("more", 2)
