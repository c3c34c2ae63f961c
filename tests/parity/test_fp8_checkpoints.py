"""FP8 checkpoints as they are published: the logits are those of the floats that they stand for, and they serve."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from roost.config.options import EngineConfig, ModelConfig
from roost.layers.attention import Attend
from roost.layers.fp8 import quantise
from roost.layers.quantised import QuantisedWeight
from roost.models.decoder import Decoder
from roost.startup import start
from roost.weights.folder import CONFIG, SINGLE_FILE
from roost.weights.load import load_decoder, open_source
from tests.support.fp8_folders import FORMATS, is_plain, write_fp8
from tests.support.tiny_folder import write_model
from tests.support.tiny_models import CPU, DEVICE, Served, configure, ops, prompts

LAYOUTS = pytest.mark.parametrize("layout", FORMATS)


def logits(model: Decoder, tokens: tuple[int, ...]) -> Tensor:
    """Logits of a whole prompt; attention is a mean of the values so far, which is enough to tell weights apart."""
    config = model.config
    device = model.embed(torch.zeros(1, dtype=torch.int64, device=DEVICE)).device

    def attend(number: int, qk: Tensor, value: Tensor, cos_sin: object, sinks: None) -> Tensor:
        seen = torch.arange(1, len(value) + 1, device=device)[:, None, None]
        mean = (value.float().cumsum(0) / seen).to(value.dtype)
        query = qk[:, : config.num_heads]
        return query + mean.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)

    attend_all: Attend = attend  # type: ignore[assignment]
    ids = torch.tensor(tokens, device=device)
    return model.logits(model.forward(ids, torch.arange(len(ids), device=device), attend_all)).float()


@LAYOUTS
def test_a_checkpoint_gives_the_logits_of_the_floats_that_it_stands_for(layout: str, tmp_path: Path) -> None:
    floats = write_fp8(tmp_path, FORMATS[layout])
    model = load_decoder(open_source(tmp_path), weights="fp32", device=DEVICE, ops=ops())
    plain = Decoder(model.config, floats, "fp32", DEVICE, ops())
    (prompt,) = prompts(20)
    assert torch.equal(logits(model, prompt), logits(plain, prompt))


@LAYOUTS
def test_kept_as_fp8_it_gives_nearly_the_same(layout: str, tmp_path: Path) -> None:
    floats = write_fp8(tmp_path, FORMATS[layout])
    model = load_decoder(open_source(tmp_path), weights="fp8", device=DEVICE, ops=ops())
    plain = Decoder(model.config, floats, "fp32", DEVICE, ops())
    (prompt,) = prompts(20)
    expected = logits(plain, prompt)
    error = (logits(model, prompt) - expected).norm() / expected.norm()
    assert error < 0.08, error  # a token that the device rounds to e4m3 is 2.6% off in every product


@LAYOUTS
def test_what_the_config_leaves_out_stays_in_floats_and_nothing_else_does(layout: str, tmp_path: Path) -> None:
    floats = write_fp8(tmp_path, FORMATS[layout])
    source = open_source(tmp_path)
    assert set(source) == set(floats)  # a projection is one matrix, and scales are none
    for name, expected in floats.items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            kept = source.quantised(name, CPU)
            assert (kept is None) == is_plain(name, FORMATS[layout]), name
            assert kept is None or (isinstance(kept, QuantisedWeight) and kept.form == "fp8")
        assert torch.equal(source[name], expected), name


@pytest.mark.parametrize("weights", ["int8", "fp32", "bf16", "fp8"])
def test_it_generates_beside_others_in_every_form(weights: str, tmp_path: Path) -> None:
    if weights == "int8" and DEVICE.type != "cpu":
        pytest.skip("int8 is for the CPU")
    floats = write_fp8(tmp_path, FORMATS["deepseek"])
    model = load_decoder(open_source(tmp_path), weights=weights, device=DEVICE, ops=ops())
    plain = Decoder(model.config, floats, "bf16" if weights == "fp8" else weights, DEVICE, ops())
    outputs = []
    for each in (model, plain):
        served = Served(each, configure(context=128))
        for number, prompt in enumerate(prompts(5, 30, 17)):
            served.submit(f"r{number}", prompt, 8)
        served.run()
        outputs.append([served.output(f"r{number}") for number in range(3)])
    assert all(len(output) == 8 for output in outputs[0])
    if DEVICE.type == "cpu":  # where fp8 is computed as floats; kernels round differently
        assert outputs[0] == outputs[1]


def test_at_start_on_a_cpu_it_is_dequantised_and_the_settings_say_so(tmp_path: Path) -> None:
    write_model(tmp_path)
    state = load_file(tmp_path / SINGLE_FILE)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        rounded = quantise(state[name])
        state[name], state[f"{name}_scale"] = rounded.values, rounded.scales
    save_file(state, tmp_path / SINGLE_FILE)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "quantization_config": FORMATS["compressed"].config}))
    running = start(EngineConfig(model=ModelConfig(model=str(tmp_path), device="cpu")))
    try:
        assert running.settings["weights"] == "int8"
        said = "this device does not compute with fp8 weights: the checkpoint is dequantised and kept as int8"
        assert said in running.settings["warnings"]  # type: ignore[operator]
    finally:
        running.executor.close()
