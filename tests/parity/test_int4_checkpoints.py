"""4-bit checkpoints as they are published: the logits are those of the floats that they stand for, and they serve."""

from pathlib import Path

import pytest
import torch

from roost.models.decoder import Decoder
from roost.weights.load import load_decoder, open_source
from tests.support.int4_folders import FORMATS, write_int4
from tests.support.tiny_models import CPU, DEVICE, Served, configure, prompts
from tests.support.workload import logits_in_one_pass

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="4-bit weights as floats, which is what CPUs do with them")
LAYOUTS = pytest.mark.parametrize("layout", FORMATS)


@LAYOUTS
def test_every_projection_is_one_matrix_with_the_floats_it_stands_for(layout: str, tmp_path: Path) -> None:
    floats = write_int4(tmp_path, FORMATS[layout])
    source = open_source(tmp_path)
    assert {name for name in source if not name.endswith("_proj.bias")} == set(floats)
    for name, expected in floats.items():
        kept = source.quantised(name, CPU) if name.endswith("_proj.weight") else None
        assert (kept is not None and kept.form == "int4") == name.endswith("_proj.weight"), name
        assert torch.equal(source[name], expected), name


@LAYOUTS
def test_a_checkpoint_gives_the_logits_of_the_floats_that_it_stands_for(layout: str, tmp_path: Path) -> None:
    floats = write_int4(tmp_path, FORMATS[layout])
    model = load_decoder(open_source(tmp_path), weights="fp32", device=CPU)
    (prompt,) = prompts(20)
    expected = logits_in_one_pass(Decoder(model.config, floats, "fp32", CPU), prompt)
    assert torch.equal(logits_in_one_pass(model, prompt), expected)


@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed", "compressed-zeros"])
def test_kept_in_4_bits_it_gives_nearly_the_same(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    floats = write_int4(tmp_path, FORMATS[layout])
    model = load_decoder(open_source(tmp_path), weights="int4", device=CPU)
    (prompt,) = prompts(6)
    expected = logits_in_one_pass(Decoder(model.config, floats, "fp32", CPU), prompt)
    error = (logits_in_one_pass(model, prompt).float() - expected).norm() / expected.norm()
    assert error < 0.03, error  # roundings of bfloat16


@pytest.mark.parametrize("weights", ["int8", "fp32", "bf16"])
def test_it_generates_beside_others_in_every_form_of_the_cpu(weights: str, tmp_path: Path) -> None:
    floats = write_int4(tmp_path, FORMATS["awq"])
    model = load_decoder(open_source(tmp_path), weights=weights, device=CPU)
    outputs = []
    for each in (model, Decoder(model.config, floats, weights, CPU)):
        served = Served(each, configure(context=128))
        for number, prompt in enumerate(prompts(5, 30, 17)):
            served.submit(f"r{number}", prompt, 8)
        served.run()
        outputs.append([served.output(f"r{number}") for number in range(3)])
    assert outputs[0] == outputs[1] and all(len(output) == 8 for output in outputs[0])
