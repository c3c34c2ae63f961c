"""In which form weights are kept: the checkpoint's where the device can, and what contradicts is refused by name."""

import pytest
import torch

from roost import startup
from roost.config.options import ModelConfig
from roost.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU computes with 8-bit floats."""
    monkeypatch.setattr(startup, "has_fp8", lambda device: device.type == "cuda")


@pytest.mark.parametrize(
    ("asked", "found", "device", "chosen"),
    [
        ("auto", None, CPU, "int8"),
        ("auto", None, GPU, "bf16"),
        ("auto", "fp8", GPU, "fp8"),
        ("auto", "fp8", CPU, "int8"),  # every checkpoint runs on a CPU
        ("fp8", None, GPU, "fp8"),  # rounded at load
        ("fp8", "fp8", GPU, "fp8"),
        ("bf16", "fp8", GPU, "bf16"),  # dequantised, since that is asked for
        ("fp32", "fp8", CPU, "fp32"),
    ],
)
def test_the_form_of_weights(asked: str, found: str | None, device: torch.device, chosen: str) -> None:
    startup._check_weights(ModelConfig(weights=asked), device)
    assert startup.choose_weights(asked, found, device) == chosen


def test_a_device_without_the_form_gets_floats_and_its_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "has_fp8", lambda device: False)
    assert startup.choose_weights("auto", "fp8", GPU) == "bf16"
    assert startup._dequantised("auto", "bf16", "fp8") == (
        "this device does not compute with fp8 weights: the checkpoint is dequantised and kept as bf16",
    )
    assert startup._dequantised("auto", "fp8", "fp8") == startup._dequantised("bf16", "bf16", "fp8") == ()
    assert startup._dequantised("auto", "bf16", None) == ()


@pytest.mark.parametrize(
    ("asked", "device", "said"),
    [
        ("int3", GPU, "--weights must be one of auto, int8, fp32, bf16, fp8"),
        ("int8", GPU, "--weights int8 does not run on this device; auto, bf16, fp32, fp8, int4, gguf do"),
        ("fp8", CPU, "--weights fp8 does not run on this device; auto, int8, fp32, bf16 do"),
    ],
)
def test_a_form_that_the_device_does_not_have_is_refused(asked: str, device: torch.device, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        startup._check_weights(ModelConfig(weights=asked), device)
    assert str(refusal.value).startswith(said)


def test_a_form_that_contradicts_the_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="--weights fp8: the checkpoint's weights are int4 already; use auto, bf16"):
        startup.choose_weights("fp8", "int4", GPU)
