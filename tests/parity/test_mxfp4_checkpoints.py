"""gpt-oss in MXFP4 as it is published: the floats are transformers' own, the logits those of these floats."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from roost.errors import ConfigError
from roost.models.decoder import Decoder
from roost.weights.folder import CONFIG, SINGLE_FILE
from roost.weights.load import load_decoder, open_source
from roost.weights.mxfp4 import dequantise
from tests.support.tiny_models import CPU, DEVICE, GPT_OSS, SHAPE, Served, configure, prompts, randomised
from tests.support.workload import logits_in_one_pass

LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_OUT}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published:
    """A tiny checkpoint as files have it, and the same by transformers with the floats that it stands for."""

    tensors: dict[str, Tensor]
    config: dict[str, object]
    reference: PreTrainedModel

    def write(self, folder: Path) -> Path:
        """The folder."""
        save_file({name: each.contiguous() for name, each in self.tensors.items()}, folder / SINGLE_FILE)
        (folder / CONFIG).write_text(json.dumps(self.config))
        return folder


def published() -> Published:
    """Hidden states and experts of whole blocks."""
    torch.manual_seed(11)
    sizes = {**SHAPE, "hidden_size": 64, "intermediate_size": 96}
    reference = randomised(GptOssForCausalLM(GptOssConfig(**{**sizes, **GPT_OSS})))
    config = {**reference.config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": QUANTISED}
    tensors = dict(reference.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, in_len, out_len = tensors.pop(name).shape
        blocks = torch.randint(256, (num_experts, out_len, in_len // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            reference.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales))
    return Published(tensors=tensors, config=config, reference=reference)


def test_any_block_is_dequantised_as_transformers_does() -> None:
    torch.manual_seed(5)
    blocks = torch.randint(256, (3, 70, 5, 16), dtype=torch.uint8)
    scales = torch.randint(1, 250, (3, 70, 5), dtype=torch.uint8)
    ours = dequantise(blocks, scales)
    assert ours.dtype == torch.bfloat16 and ours.shape == (3, 70, 160)
    assert torch.equal(ours.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compared with transformers on a CPU")
def test_a_checkpoint_gives_the_logits_of_the_floats_that_it_stands_for(tmp_path: Path) -> None:
    made = published()
    source = open_source(made.write(tmp_path))
    assert set(source) == set(made.reference.state_dict()) and len(source) == len(list(source))
    assert source.form is None and any("MXFP4" in each for each in source.warnings())
    model = load_decoder(source, weights="fp32", device=CPU)
    (prompt,) = prompts(40)
    with torch.no_grad():
        wanted = made.reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_in_one_pass(model, prompt), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="forms of the CPU")
@pytest.mark.parametrize("weights", ["int8", "fp32", "bf16"])
def test_it_generates_beside_others_in_every_form_of_the_cpu(weights: str, tmp_path: Path) -> None:
    made = published()
    model = load_decoder(open_source(made.write(tmp_path)), weights=weights, device=CPU)
    outputs = []
    for each in (model, Decoder(model.config, made.reference.state_dict(), weights, CPU)):
        served = Served(each, configure(context=128))
        for number, prompt in enumerate(prompts(5, 30, 17)):
            served.submit(f"r{number}", prompt, 8)
        served.run()
        outputs.append([served.output(f"r{number}") for number in range(3)])
    assert outputs[0] == outputs[1] and all(len(output) == 8 for output in outputs[0])


def test_one_tensor_is_read_at_a_time_and_in_no_more_than_its_own_size(tmp_path: Path) -> None:
    made = published()
    source = open_source(made.write(tmp_path))
    for name in source:
        read, expected = source[name], made.reference.state_dict()[name]
        assert torch.equal(read, expected)
        is_expert = name.endswith(("gate_up_proj", "down_proj"))
        assert read.untyped_storage().nbytes() == expected.numel() * (2 if is_expert else expected.itemsize)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gate_up_proj_scales": None}, r"has no tensor model\.layers\.0\.mlp\.experts\.gate_up_proj_scales"),
        (
            {"down_proj_scales": torch.zeros(5, 64, 2, dtype=torch.uint8)},
            r"are \[5, 64, 3, 16\] and \[5, 64, 2\]; they",
        ),
        ({"down_proj_blocks": torch.zeros(5, 64, 3, 16)}, "down_proj_blocks is of type F32; it is read as U8"),
        ({"gate_up_proj_blocks": None}, r"has no tensor model\.layers\.0\.mlp\.experts\.gate_up_proj$"),
    ],
    ids=["no scales", "other scales", "no bytes", "no blocks"],
)
def test_experts_that_cannot_be_read_are_refused_by_name(
    changed: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    made = published()
    for name, tensor in changed.items():
        whole = f"model.layers.0.mlp.experts.{name}"
        if tensor is None:
            del made.tensors[whole]
        else:
            made.tensors[whole] = tensor
    with pytest.raises(ConfigError, match=said):
        load_decoder(open_source(made.write(tmp_path)), weights="fp32", device=CPU)


def test_a_config_that_says_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    made = published()
    made.config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp"]}
    with pytest.raises(ConfigError, match="is quantised, although its config lists it as left out"):
        open_source(made.write(tmp_path))
    made.config["quantization_config"] = QUANTISED
    for name in [name for name in made.tensors if name.endswith("_blocks")]:
        del made.tensors[name]
    with pytest.raises(ConfigError, match="no tensor whose name ends in _blocks, but its config says mxfp4"):
        open_source(made.write(tmp_path))
