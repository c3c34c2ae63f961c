"""Every format of checkpoints can be read in parts: ranks give the logits of one process, and read a part each."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.group import ALONE, Group
from roost.models.decoder import Decoder
from roost.models.parts import Shape
from roost.weights.folder import CONFIG, SINGLE_FILE, Folder
from roost.weights.load import load_decoder, open_source
from tests.parity.test_gguf_architectures import MODELS, fields_of, in_file, model_of
from tests.parity.test_mxfp4_checkpoints import published
from tests.support import fp8_folders, gguf_files, int4_folders
from tests.support.gguf_files import WIDE
from tests.support.thread_group import on_ranks
from tests.support.tiny_models import DEVICE, ops, prompts, tiny
from tests.support.workload import logits_in_one_pass

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="quantised weights as floats, as CPUs have them")
(PROMPT,) = prompts(20, seed=4)
EVEN_FP8 = {**fp8_folders.SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
EVEN_FP8 |= {"head_dim": 16, "intermediate_size": 128}
CUT_GROUPS = ("awq", "gptq-symmetric", "gptq-v2", "compressed")  # of 128: half of the inputs behind attention are 64


def load(path: Path, weights: str = "fp32", group: Group = ALONE) -> Decoder:
    """A rank's part of a checkpoint."""
    return load_decoder(open_source(path), weights=weights, device=DEVICE, ops=replace(ops(), group=group))


def assert_ranks_agree(path: Path, weights: str = "fp32", size: int = 2) -> None:
    """What they make of a prompt is what one process does."""
    expected = logits_in_one_pass(load(path, weights), PROMPT)
    found = on_ranks(size, lambda group: logits_in_one_pass(load(path, weights, group), PROMPT))
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("layout", int4_folders.FORMATS)
def test_4_bit_checkpoints(layout: str, tmp_path: Path) -> None:
    int4_folders.write_int4(tmp_path, int4_folders.FORMATS[layout])
    if layout not in CUT_GROUPS:
        return assert_ranks_agree(tmp_path)
    said = (
        r"self_attn.o_proj: --tp: .*o_proj.* has 128 inputs in groups of 128, which a rank's 64 would cut; .* over 1 "
    )
    with pytest.raises(ConfigError, match=said):
        on_ranks(2, lambda group: load(tmp_path, group=group))
    return None


@pytest.mark.parametrize("layout", fp8_folders.FORMATS)
def test_fp8_checkpoints(layout: str, tmp_path: Path) -> None:
    fp8_folders.write_fp8(tmp_path, fp8_folders.FORMATS[layout], sizes=EVEN_FP8)
    assert_ranks_agree(tmp_path)


def test_blocks_of_fp8_that_would_be_cut_are_refused_with_what_can_be(tmp_path: Path) -> None:
    fp8_folders.write_fp8(tmp_path, fp8_folders.FORMATS["deepseek"], sizes=EVEN_FP8)
    with pytest.raises(ConfigError, match=r"--tp: .* groups of .*, which a rank's .* would cut; .* over 1 or 2 ranks"):
        on_ranks(4, lambda group: load(tmp_path, group=group))


def test_experts_in_mxfp4_whose_blocks_lie_across_ranks(tmp_path: Path) -> None:
    assert_ranks_agree(published().write(tmp_path))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("architecture", MODELS)
def test_gguf_files(architecture: str, kind: Kind, tmp_path: Path) -> None:
    assert_ranks_agree(write_gguf(tmp_path, architecture, kind))


def test_gguf_blocks_are_kept_as_they_are(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3", Kind.Q8_0)
    assert_ranks_agree(path, "gguf")
    experts = write_gguf(tmp_path, "qwen3moe", Kind.Q8_0)
    with pytest.raises(ConfigError, match=r"--tp: .* has 32 inputs in groups of 32, which a rank's 16 would cut"):
        on_ranks(2, lambda group: load(experts, "gguf", group))


def test_paired_rows_of_gguf_files_are_put_in_order_head_by_head(tmp_path: Path) -> None:
    drawn = np.random.default_rng(3)
    wide = {name: tuple(128 if each == WIDE else each for each in shape) for name, shape in gguf_files.shapes().items()}
    tensors = {name: drawn.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in wide.items()}
    fields = gguf_files.FIELDS | {"llama.feed_forward_length": 128}
    assert_ranks_agree(gguf_files.write(tmp_path / "m.gguf", fields=fields, tensors=tensors, kind=Kind.Q8_0))


def write_gguf(folder: Path, architecture: str, kind: Kind) -> Path:
    """A file of an architecture."""
    model = model_of(architecture)
    fields, tensors = fields_of(architecture, model), in_file(architecture, model)
    path = folder / f"{architecture}.gguf"
    return gguf_files.write(path, fields=fields, tensors=tensors, kind=kind, architecture=architecture)


@pytest.mark.parametrize("form", ["floats", "int4", "fp8", "mxfp4"])
def test_no_rank_reads_a_large_tensor_whole(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[form](tmp_path)
    monkeypatch.setattr(Folder, "__getitem__", counted(Folder.__getitem__))
    monkeypatch.setattr(Folder, "part", counted(Folder.part))
    READ.clear()
    load(tmp_path)
    whole = dict(READ)
    found = []
    for rank in range(2):
        READ.clear()
        load(tmp_path, group=OnlyLoading(rank))
        found.append(dict(READ))
    for name, num_bytes in whole.items():
        shares = [each.get(name, 0) / num_bytes for each in found]
        if num_bytes > LARGE and "router" not in name and not name.endswith("_bias"):
            assert sum(shares) >= 1 and max(shares) <= (2 / 3 if form == "mxfp4" else 0.51), (name, shares)
    assert all(sum(each.values()) < 0.7 * sum(whole.values()) for each in found)


def write_floats(folder: Path) -> None:
    """The tiny llama."""
    made = tiny("llama")
    tensors = {name: each.contiguous() for name, each in made.reference.state_dict().items()}
    save_file(tensors, folder / SINGLE_FILE)
    (folder / CONFIG).write_text(json.dumps(made.config_json))


LARGE = 600  # bytes: more than a norm or the scale of a tensor
WRITERS: dict[str, Callable[[Path], object]] = {
    "floats": write_floats,
    "int4": lambda path: int4_folders.write_int4(path, int4_folders.FORMATS["compressed-zeros"]),
    "fp8": lambda path: fp8_folders.write_fp8(path, fp8_folders.FORMATS["deepseek"], sizes=EVEN_FP8),
    "mxfp4": lambda path: published().write(path),  # three blocks of inputs for two ranks
}
READ: Counter[str] = Counter()  # bytes by tensor


def counted(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, counting the bytes it reads."""

    def counting(self: Folder, name: str, *shape: Shape) -> Tensor:
        tensor = read(self, name, *shape)
        READ[name] += tensor.nbytes
        return tensor

    return counting


@dataclass(frozen=True, slots=True)
class OnlyLoading:
    """A rank that does not compute."""

    rank: int
    size: int = 2

    def all_reduce(self, part: Tensor) -> Tensor:
        """Not while it loads."""
        raise AssertionError

    def all_gather(self, part: Tensor) -> Tensor:
        """Not while it loads."""
        raise AssertionError
