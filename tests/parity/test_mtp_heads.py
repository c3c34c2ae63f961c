"""MTP heads equal transformers' layers, are found within a checkpoint, and are refused where there is none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from roost.config.options import EngineConfig, ModelConfig, SpecConfig
from roost.errors import ConfigError
from roost.startup import Running, start
from roost.weights.draft import check_own_head, own_head
from roost.weights.folder import Folder
from tests.support.mtp_heads import make_mtp, mtp, write_mtp
from tests.support.tiny_folder import write_model, write_tokenizer
from tests.support.tiny_models import prompts, tiny
from tests.support.workload import Dense, dense


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe"])
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_head_equals_transformers(kind: str, weights: str) -> None:
    (prompt,), model = prompts(40, seed=20), tiny(kind).model(weights)
    head = make_mtp(kind, model, weights)
    tokens, positions = torch.tensor(prompt), torch.arange(len(prompt))
    last = model.forward(tokens, positions, dense(model))
    hidden = head.forward(tokens[1:], head.fuse(last[:-1], ()), positions[:-1], Dense(head.kv))
    logits, wanted = mtp(kind).run(kind, tokens[1:], last[:-1])
    if weights == "fp32":
        torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(head.logits(hidden), logits, atol=1e-4, rtol=1e-4)
    else:
        assert (hidden - wanted).abs().median() < 0.05 * wanted.std()
    assert head.num_tokens == model.traits.vocab_size and head.token_ids(tokens) is tokens
    assert [(kv.window, kv.recurs) for kv in head.kv] == [(None, None)]


def without_tensors(folder: Path) -> Path:
    """The same checkpoint, whose config still names the head that is gone."""
    kept = {name: each for name, each in load_file(folder / "model.safetensors").items() if not name.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors")
    return folder


def test_a_checkpoint_says_whether_a_head_is_in_it(tmp_path: Path) -> None:
    source = Folder(write_mtp(tmp_path, "qwen3.5"))
    assert own_head(source) == "mtp"
    check_own_head(source, "mtp", topk=4)
    with pytest.raises(ConfigError, match="--spec-topk must be at most 97, the head's vocabulary, got 98"):
        check_own_head(source, "mtp", topk=98)
    gone = Folder(without_tensors(tmp_path))
    assert own_head(gone) is None
    with pytest.raises(ConfigError, match="--spec mtp: the model's checkpoint has no tensors of such a head"):
        check_own_head(gone, "mtp", topk=1)


def test_a_head_that_the_config_does_not_describe_is_refused(tmp_path: Path) -> None:
    write_mtp(tmp_path, "qwen3.5")
    plain = json.loads((tmp_path / "config.json").read_text())
    for changes, said in (
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 1"),
        ({"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers must be 1"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**plain, **changes}))
        with pytest.raises(ConfigError, match=f"--spec mtp: .*{said}"):
            check_own_head(Folder(tmp_path), "mtp", topk=1)
        if "mtp_num_hidden_layers" in changes:
            assert own_head(Folder(tmp_path)) is None, "where nobody asked for it, it is left alone"


def with_text(folder: Path) -> Path:
    """The same checkpoint with a vocabulary as large as that of a tokenizer."""
    size, config, state = (
        write_tokenizer(folder),
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = pad(state[name], (0, 0, 0, size - len(state[name])))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    save_file(state, folder / "model.safetensors")
    return folder


def started(folder: Path, **spec: str | int) -> Running:
    return start(EngineConfig(model=ModelConfig(model=str(folder), device="cpu"), spec=SpecConfig(**spec)))


def test_it_drafts_unless_told_otherwise(tmp_path: Path) -> None:
    with_text(write_mtp(tmp_path, "qwen3.5"))
    for spec, name in (({}, "mtp"), ({"spec": "auto"}, "mtp"), ({"spec": "mtp", "spec_topk": 2}, "mtp")):
        drafter = started(tmp_path, **spec).resolved.drafter
        assert drafter is not None and drafter.name == name
    plain = started(tmp_path, spec="none")
    assert plain.resolved.drafter is None and plain.resolved.states is not None
    assert plain.settings["state_pool"] == plain.resolved.states.num_pages and plain.settings["windows"] == [None]
    without_tensors(tmp_path)
    assert started(tmp_path).resolved.drafter is None


def test_where_there_is_none_or_it_is_no_folder_it_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"--spec mtp: .*architectures"):
        started(tmp_path, spec="mtp")
    with pytest.raises(ConfigError, match="--draft is for --spec eagle, eagle3 or auto, got --spec mtp"):
        started(tmp_path, spec="mtp", draft="somewhere")
    with pytest.raises(ConfigError, match="--draft-layer-ids is for"):
        started(tmp_path, spec="mtp", draft_layer_ids="vllm")
