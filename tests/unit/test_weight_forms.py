"""Which form weights are kept in: what is asked for where it can be had, else the checkpoint's, else the device's."""

import pytest
import torch

from roost import startup
from roost.attention.registry import TORCH, TRITON
from roost.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def kept_on(device: torch.device) -> tuple[str, ...]:
    """What a device computes with, by its default backend."""
    return startup.forms_of(device, TORCH if device is CPU else TRITON)


@pytest.fixture(autouse=True)
def _a_gpu_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "has_fp8", lambda device: True)


@pytest.mark.parametrize(
    ("asked", "found", "stored", "device", "chosen"),
    [
        ("auto", "int4", None, GPU, "int4"),
        ("auto", "int4", None, CPU, "int8"),
        ("auto", None, "gguf", CPU, "int8"),
        ("auto", None, "gguf", GPU, "bf16"),
        ("auto", None, None, GPU, "bf16"),
        ("bf16", "int4", None, GPU, "bf16"),
        ("int4", None, None, GPU, "int4"),
        ("int4", None, "gguf", GPU, "int4"),
        ("gguf", None, "gguf", GPU, "gguf"),
        ("bf16", None, "gguf", GPU, "bf16"),
    ],
)
def test_the_form_of_weights(
    asked: str, found: str | None, stored: str | None, device: torch.device, chosen: str
) -> None:
    assert startup.choose_weights(asked, found, kept_on(device), stored=stored) == chosen


def test_blocks_of_a_gguf_file_are_not_to_be_had_of_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"--weights gguf: the checkpoint is not stored so; use auto, bf16, fp32$"):
        startup.choose_weights("gguf", None, kept_on(GPU), stored=None)


def test_a_4_bit_checkpoint_does_not_become_another_quantised_form() -> None:
    with pytest.raises(
        ConfigError, match=r"--weights fp8: the checkpoint's weights are int4 already; use auto, bf16, fp32, int4$"
    ):
        startup.choose_weights("fp8", "int4", kept_on(GPU))
