"""Every family equals transformers: logits and hidden states in one pass, logits and output in pages and chunks."""

import pytest
import torch
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from roost.errors import ConfigError
from roost.layers.attention import Attend
from roost.models.decoder import Decoder
from tests.support.tiny_models import CPU, KINDS, Tiny, configure, prompts, tiny
from tests.support.workload import (
    CHUNKS,
    DEPTHS,
    PAGE_SIZES,
    assert_equals_reference,
    dense,
    logits_in_one_pass,
    reference_logits,
    serve,
    several,
)

ALL = pytest.mark.parametrize("kind", KINDS)


@ALL
def test_logits_in_one_pass_equal_transformers(kind: str) -> None:
    (prompt,) = prompts(90, seed=10)  # past the window, and past Llama 3's original context
    logits = logits_in_one_pass(tiny(kind).model(), prompt)
    torch.testing.assert_close(logits, reference_logits(kind, prompt), atol=1e-4, rtol=1e-4)


@ALL
@pytest.mark.parametrize("page_size", [1, 4])
def test_logits_in_pages_and_chunks_equal_transformers(
    page_size: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts(37, seed=12)
    model = tiny(kind).model()
    forward, passes = model.forward, []

    def record(tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        passes.append(forward(tokens, positions, attend))
        return passes[-1]

    monkeypatch.setattr(model, "forward", record)
    serve(model, configure(page_size=page_size, chunk=5), [(prompt, 1)])
    assert [len(hidden) for hidden in passes] == [5] * 7 + [2]
    logits = model.logits(torch.cat(passes))
    torch.testing.assert_close(logits, reference_logits(kind, prompt), atol=1e-4, rtol=1e-4, check_device=False)
    assert logits.device == CPU


@DEPTHS
@PAGE_SIZES
@CHUNKS
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama3",
        "qwen2-window",
        "qwen3",
        "mistral",
        "gemma3",
        "gemma4",
        "qwen3-moe",
        "gpt-oss",
        "lfm2",
        "qwen3.5",
    ],
)
def test_greedy_output_equals_transformers(depth: int, page_size: int, chunk: int, kind: str) -> None:
    work = several()
    config = configure(depth=depth, page_size=page_size, chunk=chunk, max_running=4)
    assert_equals_reference(serve(tiny(kind).model(), config, work), kind, work)


@pytest.mark.parametrize(
    "kind", ["tied", "biased", "qwen2", "qwen3-window", "qwen3-yarn", "qwen3-moe-some", "qwen3.5-moe", "gemma4-moe"]
)
def test_greedy_output_of_other_checkpoints_equals_transformers(kind: str) -> None:
    work = several(seed=3)
    assert_equals_reference(serve(tiny(kind).model(), configure(chunk=5), work), kind, work)


@ALL
def test_hidden_states_at_the_inputs_of_layers_equal_transformers(kind: str) -> None:
    (prompt,) = prompts(23, seed=13)
    model = tiny(kind).model()
    with torch.no_grad():
        expected = tiny(kind).reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    tokens, positions = torch.tensor(prompt), torch.arange(len(prompt))
    last, captured = model.forward_with_aux(tokens, positions, dense(model), (2, 0))
    for ours, theirs in ((last, expected[-1]), (captured[0], expected[2]), (captured[1], expected[0])):
        torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.embed(tokens), captured[1])
    assert model.forward_with_aux(tokens, positions, dense(model), ())[1] == ()


@ALL
def test_bf16_weights_give_bf16_states_close_to_those_of_fp32(kind: str) -> None:
    (prompt,) = prompts(30, seed=14)
    model, expected = tiny(kind).model("bf16"), reference_logits(kind, prompt)
    logits = logits_in_one_pass(model, prompt)
    assert logits.dtype == model.dtype == model.kv[0].dtype == torch.bfloat16
    # of most tokens: one whose experts are chosen otherwise is far off
    assert (logits - expected).abs().median() < 0.04 * expected.std()


@ALL
def test_a_models_traits_are_those_of_its_layers(kind: str) -> None:
    model = tiny(kind).model()
    windows = {kv.window for kv in model.kv if kv.recurs is None}
    assert windows - {None} == {model.traits.window} - {None}
    assert model.traits.has_full_layers == (None in windows)
    assert model.traits.recurrent_state == kind.startswith("qwen3.5")


def test_a_text_model_beside_images_and_sound_is_the_same_and_what_it_does_not_read_is_left_out() -> None:
    alone, (prompt,) = tiny("gemma4").reference, prompts(30, seed=15)
    text_config = {**alone.config.to_dict(), "pad_token_id": 0}
    parts = {"vision_config": None, "audio_config": None, "tie_word_embeddings": False}
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text_config, **parts)).eval()
    text = {name.removeprefix("model."): each for name, each in alone.state_dict().items()}
    state = {
        name if name.startswith("lm_head") else f"model.language_model.{name}": each for name, each in text.items()
    }
    whole.load_state_dict(state)
    with torch.no_grad():
        wanted = whole(torch.tensor([prompt])).logits[0]
    others = ("vision_tower.std_bias", "audio_tower.norm.weight", "embed_vision.embedding_projection.weight")
    unread = [f"model.{name}" for name in others] + ["model.language_model.layers.4.self_attn.k_proj.weight"]
    state |= {name: torch.zeros(3) for name in unread}
    found = logits_in_one_pass(Decoder(Tiny(reference=whole).config, state, "fp32", CPU), prompt)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_weights_of_an_unknown_form_are_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--weights must be one of fp32, .*, got fp9"):
        tiny("llama").model("fp9")
