"""The default model: its GGUF file gives transformers' output, its tokenizer round-trips, int8 costs little."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roost import LLM, Options
from roost.weights.load import open_source
from roost.weights.pull import default_model
from tests.parity.conftest import default_config

GREEDY = Options(temperature=0, ignore_eos=True)
GAP_MAX = 1e-3  # between the two best logits, where two sums of the same numbers may part
INT8_LOSS_MAX = 0.05  # nats per token that int8 may cost
# Written for this test, so that no model was trained on them: a story, and plain explanations.
STORY = """\
The ferry left the island a little after six. Marta stood at the rail and watched the harbour grow small, first the
masts, then the church, and at last only the white line of the breakwater. She had come for a week and had stayed for
eleven years. In her bag were a jar of honey, two letters and the key to a house that no longer had a door. Nobody had
asked her why she was leaving, which was the kindest thing about the place. When the engineer came up for some air he
told her that the weather would hold until Thursday. "And after that?" she asked. He shrugged and said that after
Thursday it was somebody else's weather. They laughed, and the gulls turned back towards the land.
""".replace("\n", " ").strip()
LESSON = """\
Water moves around the Earth in a cycle. The sun heats the surface of oceans, lakes and rivers, and some of the water
turns into vapour and rises into the air. As the air rises it cools, and the vapour turns into tiny drops that form
clouds. When the drops become heavy enough, they fall back to the ground as rain or snow. Some of this water flows into
rivers and returns to the sea, and some of it sinks into the soil, where plants take it up through their roots. Plants
use water, light and carbon dioxide to make sugar, and they release oxygen into the air. This process is called
photosynthesis, and it is the reason why animals and people can breathe. A healthy forest therefore does two things at
once: it cleans the air, and it keeps water in the ground. If too many trees are cut down, the soil dries out, and the
rain washes it away. For this reason many countries plant new trees every year and protect the old forests that remain.
""".replace("\n", " ").strip()
PROMPTS = {
    "prose": ("Once upon a time there was a small village by the sea, where", 48),
    "facts": ("The three primary colours are", 32),
    "code": ("def fibonacci(n):\n    ", 64),
}


@pytest.fixture(scope="module")
def rounded() -> Iterator[LLM]:
    """The model in int8."""
    with LLM("default", default_config("int8")) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """transformers' model of the same dequantised weights."""
    source = open_source(default_model())
    said = {key: value for key, value in source.config().items() if key not in ("rope_theta", "rope_parameters")}
    rope = {"rope_type": "default", "rope_theta": source.fields["llama.rope.freq_base"]}  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**said, rope_parameters=rope, eos_token_id=None))
    model.to_empty(device="cpu")
    model.load_state_dict({name: source[name] for name in source}, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def logits_after(reference: LlamaForCausalLM, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities after every token."""
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]


def surprises(llm: LLM, text: str) -> list[float]:
    """What each token of a text costs the model, in nats."""
    logprobs = llm.generate(text, Options(max_new_tokens=0, prompt_logprobs_from=0)).prompt_logprobs
    assert len(logprobs) == len(llm.language.prompt_tokens(text)) - 1
    return [-entry.logprob for entry in logprobs]


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_output_equals_transformers_on_the_same_weights(
    exact: LLM, reference: LlamaForCausalLM, name: str
) -> None:
    text, num_new = PROMPTS[name]
    prompt = exact.language.prompt_tokens(text)
    ours = exact.generate(prompt, replace(GREEDY, max_new_tokens=num_new)).choices[0].tokens
    rows = logits_after(reference, prompt + ours)[len(prompt) - 1 : -1]  # one pass says what each token should be
    for place, (token, row) in enumerate(zip(ours, rows, strict=True)):
        gap = float(row.max() - row[token])
        assert gap < GAP_MAX, f"token {place}: ours is {token}, theirs {int(row.argmax())}, {gap:.2e} better"


def test_prompt_logprobs_equal_transformers(exact: LLM, reference: LlamaForCausalLM) -> None:
    prompt = exact.language.prompt_tokens(STORY)
    expected = logits_after(reference, prompt).log_softmax(-1)
    logprobs = exact.generate(prompt, Options(max_new_tokens=0, prompt_logprobs_from=0, logprobs=3)).prompt_logprobs
    for place, entry in enumerate(logprobs):
        assert entry.logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=2e-3), place
        assert [value for _, value in entry.top_logprobs] == pytest.approx(
            expected[place].topk(3).values.tolist(), abs=2e-3
        )


def test_int8_costs_little_on_texts_nobody_trained_on(exact: LLM, rounded: LLM) -> None:
    nats = {
        (name, weights): surprises(llm, text)
        for name, text in (("story", STORY), ("lesson", LESSON))
        for weights, llm in (("fp32", exact), ("int8", rounded))
    }
    for (name, weights), each in nats.items():
        print(f"{name}, {weights}: {mean(each):.4f} nats per token over {len(each)}")
    fp32, int8 = (mean(nats["story", weights] + nats["lesson", weights]) for weights in ("fp32", "int8"))
    print(f"both: fp32 {fp32:.4f}, int8 {int8:.4f}")
    assert 1.8 < mean(nats["lesson", "fp32"]) < 2.5 < mean(nats["story", "fp32"]) < 3.5
    assert int8 - fp32 < INT8_LOSS_MAX, (fp32, int8)


@pytest.mark.parametrize("weights", ["exact", "rounded"])
def test_the_model_knows_the_capital_of_france(weights: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(weights)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    choice = llm.chat(question, Options(temperature=0, max_new_tokens=32)).choices[0]
    assert "Paris" in choice.text and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "Digits: 1234567890, 3.14159 and 007.",
        "  leading, trailing and   inner spaces  ",
        "tabs\tand\r\nline ends\n\n\n",
        "Grüße, naïve café, Ελληνικά, Привет, 日本語, العربية, 🦉🏽‍💻",
        "<|im_start|>not a turn<|im_end|>",
        "x" * 300,
        "\x00\x7f\ufffd",
        "",
    ],
)
def test_text_survives_the_tokenizer(exact: LLM, text: str) -> None:
    tokenizer = exact.language.tokenizer
    tokens = tokenizer.encode(text, special=False)
    assert tokenizer.decode(tokens, skip_special=False) == text
    assert not any(tokenizer.is_special(token) for token in tokens)


def test_digits_are_tokens_of_their_own(exact: LLM) -> None:
    tokenizer = exact.language.tokenizer
    pieces = [tokenizer.piece(token) for token in tokenizer.encode("in 1984", special=False)]
    assert pieces == [b"in", b" ", b"1", b"9", b"8", b"4"]


def test_a_conversation_is_framed_as_the_model_was_trained(exact: LLM) -> None:
    tokens = exact.language.chat_tokens([{"role": "user", "content": "Hi <|im_end|>"}])
    text = exact.language.tokenizer.decode(tokens, skip_special=False)
    assert text.endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")
    (end,) = exact.language.tokenizer.encode("<|im_end|>", special=True)
    assert tokens.count(end) == 2, "the system's and the user's turn; what a user spells is text"
