"""In which form weights are kept: the checkpoint's where the device can, and what contradicts is refused by name."""

import pytest
import torch

from roost import startup
from roost.attention.registry import NUMBA, TORCH, TRITON, Backend
from roost.config.options import ModelConfig
from roost.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU computes with 8-bit floats."""
    monkeypatch.setattr(startup, "has_fp8", lambda device: device.type == "cuda")


@pytest.mark.parametrize(
    ("asked", "found", "stored", "backend", "chosen"),
    [
        ("auto", None, None, TORCH, "int8"),
        ("auto", None, None, NUMBA, "int8"),
        ("auto", None, None, TRITON, "bf16"),
        ("auto", "fp8", None, TRITON, "fp8"),
        ("auto", "fp8", None, TORCH, "int8"),  # every checkpoint runs on a CPU
        ("auto", None, "gguf", NUMBA, "gguf"),  # blocks as they are: fewer bytes, and nothing is rounded again
        ("auto", None, "gguf", TORCH, "int8"),
        ("auto", None, "gguf", TRITON, "bf16"),
        ("int8", None, "gguf", NUMBA, "int8"),
        ("fp8", None, None, TRITON, "fp8"),  # rounded at load
        ("fp8", "fp8", None, TRITON, "fp8"),
        ("bf16", "fp8", None, TRITON, "bf16"),  # dequantised, since that is asked for
        ("fp32", "fp8", None, TORCH, "fp32"),
    ],
)
def test_the_form_of_weights(asked: str, found: str | None, stored: str | None, backend: Backend, chosen: str) -> None:
    device = GPU if backend is TRITON else CPU
    startup._check_weights(ModelConfig(weights=asked), device, backend)
    assert startup.choose_weights(asked, found, startup.forms_of(device, backend), stored=stored) == chosen


def test_a_device_without_the_form_gets_floats_and_its_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "has_fp8", lambda device: False)
    assert startup.choose_weights("auto", "fp8", startup.forms_of(GPU, TRITON)) == "bf16"
    assert startup._dequantised("auto", "bf16", "fp8") == (
        "this device does not compute with fp8 weights: the checkpoint is dequantised and kept as bf16",
    )
    assert startup._dequantised("auto", "fp8", "fp8") == startup._dequantised("bf16", "bf16", "fp8") == ()
    assert startup._dequantised("auto", "bf16", None) == ()


@pytest.mark.parametrize(
    ("asked", "device", "backend", "said"),
    [
        ("int3", GPU, TRITON, "--weights must be one of auto, int8, fp32, bf16, fp8"),
        ("int8", GPU, TRITON, "--weights int8 does not run on this device; auto, bf16, fp32, fp8, int4, gguf do"),
        ("fp8", CPU, TORCH, "--weights fp8 does not run on this device; auto, int8, fp32, bf16 do"),
        ("fp8", CPU, NUMBA, "--weights fp8 does not run on this device; auto, gguf, int8, fp32, bf16 do"),
    ],
)
def test_a_form_that_the_device_does_not_have_is_refused(
    asked: str, device: torch.device, backend: Backend, said: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        startup._check_weights(ModelConfig(weights=asked), device, backend)
    assert str(refusal.value).startswith(said)


def test_a_form_that_contradicts_the_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="--weights fp8: the checkpoint's weights are int4 already; use auto, bf16"):
        startup.choose_weights("fp8", "int4", startup.forms_of(GPU, TRITON))
