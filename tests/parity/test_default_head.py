"""The head that comes with the default model: it drafts unless told otherwise, guesses well, and is what it says."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from roost import LLM, Options, SpecConfig
from roost.cli.prompts import PROMPTS
from roost.weights.pull import HEADS, NAME
from tests.parity.conftest import default_config

FOLDER = HEADS / NAME
BYTES_MAX = 24_000_000


def served(spec: SpecConfig) -> LLM:
    return LLM("default", replace(default_config("int8"), spec=spec))


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    """The default model as it comes, but for the number of drafts."""
    with served(SpecConfig(spec_steps=4)) as llm:
        yield llm


def test_the_default_model_drafts_out_of_the_box_as_much_as_pays() -> None:
    with served(SpecConfig()) as llm:
        settings = llm._running.settings
        assert settings["spec"] == "eagle3" and settings["spec_steps"] == "auto" and settings["draft"] == str(FOLDER)
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], Options(temperature=0))
        assert "Paris" in answer.text and llm.stats().spec.rounds > 0


def test_it_can_be_told_not_to() -> None:
    with served(SpecConfig(spec="none")) as llm:
        assert llm._running.settings["spec"] == "none"
        llm.chat([{"role": "user", "content": "Hello"}], Options(temperature=0, max_new_tokens=8))
        assert llm.stats().spec.rounds == 0


def test_its_drafts_are_mostly_right(drafting: LLM) -> None:
    for text in PROMPTS[:4]:
        drafting.chat([{"role": "user", "content": text}], Options(temperature=0, max_new_tokens=48))
    accept_length = drafting.stats().spec.accept_length
    print(f"{accept_length:.2f} a round")
    assert accept_length > 1.5


def test_a_conversation_is_drafted_on_from_turn_to_turn(drafting: LLM) -> None:
    with drafting.session() as session:
        for text in ("Name three birds.", "Which of them sings best?"):
            before = drafting.stats().spec.drafts_accepted
            list(session.chat([{"role": "user", "content": text}], Options(temperature=0, max_new_tokens=32)))
            assert drafting.stats().spec.drafts_accepted > before


def test_its_folder_has_what_others_read_and_a_card() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {"README.md", "config.json", "model.safetensors", "training.jsonl"}
    assert sum(files.values()) <= BYTES_MAX
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
        ids = file.get_tensor("d2t") + torch.arange(config["draft_vocab_size"])
        assert ids.tolist() == file.get_tensor("t2d").nonzero().flatten().tolist()
        assert ids[:3].tolist() == [0, 1, 2] and len(ids) == config["draft_vocab_size"]
    assert all(json.loads(line) for line in (FOLDER / "training.jsonl").read_text().splitlines())
