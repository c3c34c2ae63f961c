"""What is wrong with a folder is said in words, before a model is made of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from roost.errors import ConfigError
from roost.models.registry import decoder_config
from roost.weights import folder as folders
from roost.weights.folder import CONFIG, INDEX, SINGLE_FILE, Folder, read_config
from roost.weights.load import load_model, open_source
from tests.support.config_files import LLAMA, llama_tensors

CPU = torch.device("cpu")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose weights are in one file."""
    (tmp_path / CONFIG).write_text(json.dumps(LLAMA))
    save_file(tensors(), tmp_path / SINGLE_FILE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder whose weights are in two."""
    (tmp_path / CONFIG).write_text(json.dumps(LLAMA))
    places = {name: SHARDS["layers" in name] for name in tensors()}
    for shard in SHARDS:
        save_file({name: tensor for name, tensor in tensors().items() if places[name] == shard}, tmp_path / shard)
    write_index(tmp_path, places)
    return tmp_path


def tensors() -> dict[str, Tensor]:
    return llama_tensors(decoder_config(LLAMA))


def write_index(folder: Path, places: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read_index(folder: Path) -> dict[str, str]:
    places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return places


def refusal(folder: Path) -> str:
    """What a load is refused with, the folder's own name cut out."""
    with pytest.raises(ConfigError) as error:
        load_model(open_source(folder), weights="fp32", device=CPU)
    return str(error.value).replace(f"{folder}/", "").replace(str(folder), "the folder")


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


# --- whole folders --------------------------------------------------------------------------------------------


def test_a_checkpoint_opens_a_file_when_one_of_its_tensors_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    opens = folders.safe_open
    monkeypatch.setattr(
        folders, "safe_open", lambda path, framework: opened.append(path) or opens(path, framework=framework)
    )
    checkpoint = Folder(folder)
    assert set(checkpoint) == set(tensors())
    assert len(checkpoint) == len(tensors())
    assert opened == []
    assert checkpoint["model.norm.weight"].shape == (12,)
    assert opened == [folder / SINGLE_FILE]


def test_half_precision_files_are_read_into_the_type_asked_for(folder: Path) -> None:
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors().items()}, folder / SINGLE_FILE)
    assert load_model(open_source(folder), weights="fp32", device=CPU).dtype == torch.float32
    assert load_model(open_source(folder), weights="bf16", device=CPU).dtype == torch.bfloat16


# --- what is missing ------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_named_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model: there is no folder .*nowhere"):
        read_config(tmp_path / "nowhere")


def test_a_config_that_is_missing_or_not_json_is_named(folder: Path) -> None:
    (folder / CONFIG).write_text("[1]")
    assert refusal(folder) == "config.json must hold a JSON object, not a list"
    (folder / CONFIG).write_text("{'a': 1}")
    assert refusal(folder).startswith("config.json is not JSON: Expecting property name")
    (folder / CONFIG).unlink()
    assert refusal(folder) == "the folder has no config.json"


def test_weights_that_are_missing_are_told_from_those_that_are_not_read(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "consolidated.safetensors")
    assert refusal(folder) == f"the folder has neither {SINGLE_FILE} nor {INDEX}, only consolidated.safetensors"
    (folder / "consolidated.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pickle files, which can run code and are not read" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder) == f"the folder has no weights: neither {SINGLE_FILE} nor {INDEX}"


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    assert refusal(sharded) == f"{INDEX} names {SHARDS[1]}, which is missing"


# --- what is wrong --------------------------------------------------------------------------------------------


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded: Path) -> None:
    places = read_index(sharded)
    write_index(sharded, {**places, "lm_head.weight": SHARDS[1]})
    assert refusal(sharded) == f"{SHARDS[0]} has lm_head.weight, unlike the index"
    write_index(sharded, {**places, "a": SHARDS[0]})
    assert refusal(sharded) == f"{SHARDS[0]} lacks a, which the index puts there"
    write_index(sharded, {**places, "a": "../elsewhere.safetensors"})
    assert refusal(sharded) == f"{INDEX} names ../elsewhere.safetensors, which is not in the folder"
    write_index(sharded, [])
    assert refusal(sharded) == f"{INDEX} has no weight_map of tensors and their files"


def test_a_truncated_file_is_told_with_both_lengths(folder: Path) -> None:
    length = (folder / SINGLE_FILE).stat().st_size
    for short in (length - 1, length // 2):
        cut(folder / SINGLE_FILE, short)
        said = f"{SINGLE_FILE} is truncated: its header says {length} bytes, the file has {short}; download it again"
        assert refusal(folder) == said
    for short in (100, 8):  # inside the header
        cut(folder / SINGLE_FILE, short)
        assert refusal(folder).startswith(f"{SINGLE_FILE} is truncated: its header says ")
    cut(folder / SINGLE_FILE, 5)
    assert refusal(folder) == f"{SINGLE_FILE} is not a safetensors file"


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    cut(sharded / SHARDS[1], 3000)
    assert refusal(sharded).startswith(f"{SHARDS[1]} is truncated: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer and not the weights"),
        (b"<!DOCTYPE html><html></html>", "is not a safetensors file"),
        (b"\x02" + bytes(7) + b"{]", "is not a safetensors file: its header cannot be read"),
        (b"\x09" + bytes(7) + b'{"a": []}', "is not a safetensors file: its header cannot be read"),
        (b"\x02" + bytes(7) + b"{}" + b"more", "is longer than its header says: 14 bytes instead of 10"),
    ],
)
def test_a_file_that_is_something_else_is_refused(folder: Path, content: bytes, said: str) -> None:
    (folder / SINGLE_FILE).write_bytes(content)
    assert refusal(folder).startswith(f"{SINGLE_FILE} {said}")


def test_tensors_that_are_not_floats_are_refused_before_any_is_read(folder: Path) -> None:
    save_file({**tensors(), "model.norm.weight": torch.zeros(12, dtype=torch.int32)}, folder / SINGLE_FILE)
    assert refusal(folder) == f"{SINGLE_FILE}: model.norm.weight is of type I32; it is read as F64, F32, F16, BF16"


def test_tensors_missing_left_over_or_misshapen_are_named(folder: Path) -> None:
    state = tensors()
    save_file({**state, "model.norm.bias": torch.zeros(12)}, folder / SINGLE_FILE)
    assert refusal(folder) == "the checkpoint has tensors that this model does not use: model.norm.bias"
    save_file({**state, "model.norm.weight": torch.zeros(13)}, folder / SINGLE_FILE)
    assert refusal(folder) == "the checkpoint's model.norm.weight is [13], its config says [12]"
    state.pop("model.norm.weight")
    save_file(state, folder / SINGLE_FILE)
    assert refusal(folder) == "the checkpoint has no tensor model.norm.weight"
