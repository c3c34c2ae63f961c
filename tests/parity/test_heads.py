"""EAGLE heads equal a plainly written reference, read what transformers says the target holds, or are refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roost.config.resolved import ModelTraits
from roost.errors import ConfigError
from roost.layers.attention import Attend, causal_attention
from roost.layers.ops import TORCH_OPS, Ops
from roost.layers.rotary import CosSin, rotate
from roost.models import llama
from roost.models.decoder import Decoder
from roost.models.model import KvShape, Model, PairHead
from roost.weights.draft import check_hooks, head_kind, load_head
from tests.support.random_heads import (
    FEWER,
    HIDDEN,
    LLAMA3,
    Config,
    features,
    read,
    run,
    write,
    write_eagle,
    write_eagle3,
)
from tests.support.tiny_models import CPU, VOCAB, prompts, tiny
from tests.support.workload import dense

PROMPT_LEN = 90  # past what Llama 3's rope was made for
Writer = Callable[[Path], Path]

EAGLE: dict[str, Writer] = {
    "plain": lambda path: write_eagle(path, fc_bias=False),
    "bias": write_eagle,
    "two layers": lambda path: write_eagle(path, {"num_hidden_layers": 2}),
    "prefix": lambda path: write_eagle(path, prefix="model."),
    "target's embedding": lambda path: write_eagle(path, own_embed=False),
    "llama3": lambda path: write_eagle(path, {"rope_scaling": LLAMA3}),
    "attention bias": lambda path: write_eagle(path, {"attention_bias": True}),
    "gelu": lambda path: write_eagle(path, {"hidden_act": "gelu_pytorch_tanh"}),
    "vllm's name": lambda path: write_eagle(path, {"architectures": ["EagleLlamaForCausalLM"]}),
}
EAGLE3: dict[str, Writer] = {
    "reduced": write_eagle3,
    "full": lambda path: write_eagle3(path, num_tokens=VOCAB),
    "target's head": lambda path: write_eagle3(path, num_tokens=VOCAB, own_head=False),
    "layers.0": lambda path: write_eagle3(path, layer="layers.0."),
    "prefix": lambda path: write_eagle3(path, prefix="model.", own_embed=True),
    "norm before residual": lambda path: write_eagle3(path, {"norm_before_residual": True}),
    "theta": lambda path: write_eagle3(path, {"rope_theta": 20.0, "num_key_value_heads": 4}),
    "llama3": lambda path: write_eagle3(path, {"rope_scaling": LLAMA3}),
    "biases": lambda path: write_eagle3(path, {"attention_bias": True}, fc_bias=True),
    "narrow": lambda path: write_eagle3(path, {"hidden_size": 32, "target_hidden_size": HIDDEN}, own_embed=True),
}
ALL = [("eagle", name) for name in EAGLE] + [("eagle3", name) for name in EAGLE3]
WRITERS = {"eagle": EAGLE, "eagle3": EAGLE3}


def load(
    path: Path, model: Model, *, kind: str | None = None, layer_ids: str | None = None, weights: str = "fp32"
) -> PairHead:
    return load_head(path, kind or head_kind(path), model, layer_ids=layer_ids, weights=weights, device=CPU)


def passes(head: PairHead, model: Decoder, prompt: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of a head over pairs of a prompt, all in one pass."""
    tokens, positions = torch.tensor(prompt), torch.arange(len(prompt))
    last, aux_hidden = model.forward_with_aux(tokens, positions, dense(model), head.aux_layers)
    hidden = head.fuse(last[:-1], tuple(each[:-1] for each in aux_hidden))
    assert hidden.shape == (len(prompt) - 1, head.hidden_size)
    hidden = head.forward(tokens[1:], hidden, positions[:-1], reading(head))
    return head.logits(hidden), hidden


def reading(head: PairHead) -> Attend:
    """Attention of one sequence from its start, without pages."""

    def attend(layer: int, qk: Tensor, value: Tensor | None, cos_sin: CosSin, sinks: Tensor | None = None) -> Tensor:
        assert value is not None and sinks is None
        query, key = rotate(qk, cos_sin).tensor_split((qk.shape[1] - value.shape[1],), dim=1)
        kv = head.kv[layer]
        assert kv.window is None
        assert key.shape[1:] == (kv.num_kv_heads, kv.head_dim)
        return causal_attention(query, key, value, start=0, first=0, window=None, scale=kv.scale)

    return attend


def expected(path: Path, target: str, prompt: tuple[int, ...], aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    reference = tiny(target).reference
    return run(path, reference, torch.tensor(prompt[1:]), features(reference, prompt, aux_layers)[:-1])


# --- parity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), ALL)
@pytest.mark.parametrize("target", ["llama", "gemma3", "gemma4"])
def test_a_head_equals_the_reference(target: str, kind: str, name: str, tmp_path: Path) -> None:
    path, (prompt,) = WRITERS[kind][name](tmp_path), prompts(PROMPT_LEN, seed=20)
    model = tiny(target).model()
    head = load(path, model, kind=kind)
    logits, hidden = passes(head, model, prompt)
    theirs = expected(path, target, prompt, head.aux_layers)
    assert logits.shape[1] == head.num_tokens
    torch.testing.assert_close(logits, theirs[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, theirs[1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "name"), [("eagle", "bias"), ("eagle3", "reduced"), ("eagle3", "target's head")])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_other_forms_of_weights_are_close(weights: str, kind: str, name: str, tmp_path: Path) -> None:
    path, (prompt,) = WRITERS[kind][name](tmp_path), prompts(30, seed=21)
    model = tiny("llama").model(weights)
    head = load(path, model, weights=weights)
    logits, hidden = passes(head, model, prompt)
    theirs, _ = expected(path, "llama", prompt, head.aux_layers)
    assert logits.dtype == hidden.dtype == head.dtype == model.dtype == head.kv[0].dtype
    assert (logits - theirs).abs().mean() < 0.06 * theirs.std()


def test_a_reduced_vocabulary_maps_to_the_tokens_of_the_target(tmp_path: Path) -> None:
    head = load(write_eagle3(tmp_path), tiny("llama").model())
    state = read(tmp_path)[1]
    ids = head.token_ids(torch.arange(FEWER))
    assert head.num_tokens == FEWER
    assert ids.tolist() == state["t2d"].nonzero().flatten().tolist()
    assert ids.tolist() == [i + offset for i, offset in enumerate(state["d2t"].tolist())]


@pytest.mark.parametrize("writer", [EAGLE["plain"], EAGLE3["full"]])
def test_a_full_vocabulary_is_the_targets(writer: Writer, tmp_path: Path) -> None:
    head = load(writer(tmp_path), tiny("llama").model())
    assert head.num_tokens == VOCAB
    assert head.token_ids(torch.tensor([3, 96])).tolist() == [3, 96]


def test_a_head_is_of_the_kind_its_architecture_says(tmp_path: Path) -> None:
    assert head_kind(write_eagle(tmp_path / "a")) == "eagle"
    assert head_kind(write_eagle3(tmp_path / "b")) == "eagle3"
    assert head_kind(write_eagle3(tmp_path / "c", {"architectures": ["Eagle3LlamaForCausalLM"]})) == "eagle3"


# --- what is read of the target -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Deep:
    """A target of as many layers as a test wants, which never runs."""

    num_layers: int
    hidden_size: int = HIDDEN
    vocab_size: int = VOCAB

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(vocab_size=self.vocab_size)

    @property
    def kv(self) -> tuple[KvShape, ...]:
        return tiny("llama").model().kv[:1] * self.num_layers

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def activation_width(self) -> int:
        return self.hidden_size

    @property
    def ops(self) -> Ops:
        return TORCH_OPS

    def embed(self, tokens: Tensor) -> Tensor:
        raise AssertionError

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        raise AssertionError

    def forward_with_aux(
        self, tokens: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise AssertionError

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError


IDS = "eagle_aux_hidden_state_layer_ids"


def test_an_eagle3_head_reads_three_layers_unless_it_says_which(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    assert load(tmp_path, Deep(num_layers=32)).aux_layers == (2, 16, 29)
    assert load(tmp_path, Deep(num_layers=7)).aux_layers == (2, 3, 4)
    assert load(write_eagle(tmp_path), Deep(num_layers=32)).aux_layers == ()


@pytest.mark.parametrize(
    "changes", [{IDS: [4, 9, 1]}, {"eagle_config": {IDS: [1, 4, 9], "use_aux_hidden_state": True}}]
)
def test_layer_ids_are_outputs_for_sglang_and_inputs_for_vllm(changes: Config, tmp_path: Path) -> None:
    write_eagle3(tmp_path, changes)
    assert load(tmp_path, Deep(num_layers=10), layer_ids="vllm").aux_layers == (1, 4, 9)
    assert load(tmp_path, Deep(num_layers=10), layer_ids="sglang").aux_layers == (2, 5, 10)


def test_an_empty_list_of_layer_ids_says_nothing(tmp_path: Path) -> None:
    write_eagle3(tmp_path, {IDS: []})
    assert load(tmp_path, Deep(num_layers=32)).aux_layers == (2, 16, 29)


@pytest.mark.parametrize("target", ["llama", "gemma3"])
def test_what_the_last_layer_puts_out_can_be_captured(target: str) -> None:
    (prompt,) = prompts(23, seed=13)
    reference, seen = tiny(target).reference, []
    hook = reference.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    hook.remove()
    model = tiny(target).model()
    last, (output, middle) = model.forward_with_aux(
        torch.tensor(prompt), torch.arange(len(prompt)), dense(model), (3, 1)
    )
    theirs = seen[0] if isinstance(seen[0], Tensor) else seen[0][0]
    for ours, other in ((output, theirs), (middle, states[1]), (last, states[-1])):
        torch.testing.assert_close(ours, other.reshape(ours.shape), atol=1e-4, rtol=1e-4)


# --- refusals -------------------------------------------------------------------------------------------------


def refusal(path: Path, model: Model, **options: str) -> str:
    """What a load is refused with, the folder's own name cut out."""
    with pytest.raises(ConfigError) as refused:
        load(path, model, **options)
    return str(refused.value).replace(str(path), "HERE")


SMALL = Deep(num_layers=10)
CONFIGS: list[tuple[Config, str]] = [
    ({"vocab_size": 96}, "the head's vocabulary has 96 tokens, the target's 97"),
    ({"draft_vocab_size": 98}, "config.json: draft_vocab_size is 98, more than the vocab_size, 97"),
    ({"hidden_size": 32}, "the head reads hidden states of 32, the target's have 48"),
    ({"target_hidden_size": 64}, "the head reads hidden states of 64, the target's have 48"),
    ({"num_attention_heads": 3}, "the model's 3 heads do not share 2 KV heads evenly"),
    ({"num_hidden_layers": 2}, "config.json: num_hidden_layers must be 1 for an EAGLE-3 head, got 2"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "config.json: rope_scaling.rope_type is 'dynamic', which is not supp"),
    ({"quantization_config": {"bits": 4}}, "config.json: quantization_config is {'bits': 4}, which is not supported"),
    ({"logit_scale": 0.5}, "config.json: logit_scale is 0.5, which is not supported"),
    ({"add_para_norm": True}, "config.json: add_para_norm is True, which is not supported"),
    (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "config.json: eagle_config.use_aux_hidden_state is False, which is not supported",
    ),
    ({IDS: [1, 2, 3], "eagle_config": {IDS: [1, 2, 4]}}, f"config.json: {IDS} and eagle_config's are both there and"),
    ({IDS: 3}, f"config.json: {IDS} must be a list, got 3"),
    ({IDS: [1, -2]}, f"config.json: {IDS} must be a whole number of at least 0, got -2"),
    (
        {IDS: [1, 2, 3]},
        f"its config has {IDS} [1, 2, 3], which SGLang takes for layers whose output it reads and vLLM for layers "
        "whose input it reads; say which with --draft-layer-ids sglang or vllm",
    ),
]


@pytest.mark.parametrize(("changes", "said"), CONFIGS)
def test_a_config_that_does_not_fit_is_refused(changes: Config, said: str, tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    config, state = read(tmp_path)
    write(tmp_path, {**config, **changes}, state)
    assert refusal(tmp_path, SMALL).startswith(f"--draft HERE: {said}")


def test_an_eagle_head_of_another_target_is_refused(tmp_path: Path) -> None:
    write_eagle(tmp_path)
    said = "--draft HERE: the head reads hidden states of 48, the target's have 64"
    assert refusal(tmp_path, Deep(num_layers=3, hidden_size=64)) == said
    said = "--draft HERE: the head's vocabulary has 97 tokens, the target's 99"
    assert refusal(tmp_path, Deep(num_layers=3, vocab_size=99)) == said
    write_eagle(tmp_path, {"hot_vocab_size": 30})
    assert refusal(tmp_path, SMALL) == "--draft HERE: config.json: hot_vocab_size is 30, which is not supported"


def test_layer_ids_outside_the_target_are_refused(tmp_path: Path) -> None:
    write_eagle3(tmp_path, {IDS: [2, 5, 10]})
    assert load(tmp_path, SMALL, layer_ids="vllm").aux_layers == (2, 5, 10)
    said = f"--draft HERE: its {IDS} [2, 5, 10] (--draft-layer-ids sglang) are outside the target's 10 layers"
    assert refusal(tmp_path, SMALL, layer_ids="sglang") == said
    said = "--draft HERE: --draft-layer-ids must be one of sglang, vllm, got hf"
    assert refusal(tmp_path, SMALL, layer_ids="hf") == said
    write_eagle3(tmp_path, {IDS: [2, 2, 5]})
    assert refusal(tmp_path, SMALL, layer_ids="vllm") == f"--draft HERE: its {IDS} [2, 2, 5] name a layer twice"


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 6])
def test_a_target_of_too_few_layers_is_refused(num_layers: int, tmp_path: Path) -> None:
    said = refusal(write_eagle3(tmp_path), Deep(num_layers=num_layers))
    assert said.endswith(f"the target's {num_layers} are too few to tell them apart")


@pytest.mark.parametrize("writer", [EAGLE["plain"], EAGLE3["reduced"]])
def test_a_convention_for_ids_that_are_not_there_is_refused(writer: Writer, tmp_path: Path) -> None:
    said = f"--draft HERE: --draft-layer-ids vllm says how to read {IDS}, which it does not have"
    assert refusal(writer(tmp_path), SMALL, layer_ids="vllm") == said


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draft .*nowhere: must be a folder with a config.json"):
        head_kind(tmp_path / "nowhere")
    known = "LlamaForCausalLMEagle, EagleLlamaForCausalLM, LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM"
    said = refusal(write_eagle(tmp_path, {"architectures": ["LlamaForCausalLM"]}), SMALL, kind="eagle")
    assert said == f"--draft HERE: LlamaForCausalLM is not a draft head; known are {known}"
    said = refusal(write_eagle(tmp_path, {"architectures": []}), SMALL, kind="eagle")
    assert said == f"--draft HERE: a model without architectures is not a draft head; known are {known}"


def test_a_head_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    said = "--spec eagle: the head at --draft HERE is of the kind eagle3"
    assert refusal(write_eagle3(tmp_path), SMALL, kind="eagle") == said


def test_a_head_of_another_type_than_its_target_is_refused(tmp_path: Path) -> None:
    said = "--weights bf16: a head of torch.bfloat16 cannot read a target of torch.float32"
    assert refusal(write_eagle(tmp_path), SMALL, weights="bf16") == said


def test_a_family_without_hooks_is_refused() -> None:
    check_hooks(llama.FAMILY)
    with pytest.raises(ConfigError, match="--draft: the model's family has no hooks for draft heads"):
        check_hooks(replace(llama.FAMILY, draft_hooks=False))


LEFT_OVER = "the checkpoint has tensors that this model does not use: "
TENSORS: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("eagle", {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}, LEFT_OVER + "layers.0.input_layernorm.weight"),
    ("eagle", {"norm.weight": torch.ones(HIDDEN)}, LEFT_OVER + "norm.weight"),
    (
        "eagle",
        {"fc.weight": torch.ones(HIDDEN, 64)},
        "the checkpoint's fc.weight is [48, 64], its config says [48, 96]",
    ),
    ("eagle", {"fc.weight": None}, "the checkpoint has no tensor fc.weight"),
    ("eagle", {"model.fc.weight": torch.ones(1)}, "the checkpoint's fc.weight and model.fc.weight are the same tensor"),
    ("eagle3", {"mask_hidden": torch.ones(1)}, LEFT_OVER + "mask_hidden"),
    ("eagle3", {"fc.weight_scale": torch.ones(1)}, LEFT_OVER + "fc.weight_scale"),
    (
        "eagle3",
        {"fc.weight": torch.ones(HIDDEN, 3 * HIDDEN, dtype=torch.int8)},
        "HERE/model.safetensors: fc.weight is of type I8; it is read as F64, F32, F16, BF16",
    ),
    ("eagle3", {"midlayer.hidden_norm.weight": None}, "the checkpoint has no tensor layers.0.hidden_norm.weight"),
    ("eagle3", {"d2t": None, "t2d": None}, "the checkpoint has no tensor d2t"),
    ("eagle3", {"d2t": torch.zeros(39, dtype=torch.int64)}, "the checkpoint's d2t is [39], its config says [40]"),
    ("eagle3", {"d2t": torch.zeros(40)}, "HERE/model.safetensors: d2t is of type F32; it is read as I64, I32, BOOL"),
    (
        "eagle3",
        {"d2t": torch.full((40,), 58, dtype=torch.int64)},
        "d2t maps to token 97, outside the vocabulary of 97",
    ),
    ("eagle3", {"d2t": -torch.arange(40)}, "d2t maps two tokens to the same one"),
    (
        "eagle3",
        {"d2t": torch.zeros(40, dtype=torch.int64)},
        "t2d marks 40 tokens, d2t maps to 40: they must be the same",
    ),
    ("eagle3", {"t2d": torch.ones(97, dtype=torch.bool)}, "t2d marks 97 tokens, d2t maps to 40: they must be the same"),
    ("eagle3", {"t2d": torch.ones(98, dtype=torch.bool)}, "the checkpoint's t2d is [98], its config says [97]"),
    (
        "eagle3",
        {"lm_head.weight": None},
        "it has no lm_head.weight, and its vocabulary of 40 tokens is not the target's of 97, whose head could be used",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "said"), TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    kind: str, changes: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    path = write_eagle(tmp_path) if kind == "eagle" else write_eagle3(tmp_path)
    config, state = read(path)
    changed = {name: tensor for name, tensor in {**state, **changes}.items() if tensor is not None}
    assert refusal(write(path, config, changed), SMALL).startswith(f"--draft HERE: {said}")


def test_a_narrow_head_needs_an_embedding_and_a_head_of_its_own(tmp_path: Path) -> None:
    narrow: Config = {"hidden_size": 32, "target_hidden_size": HIDDEN}
    said = refusal(write_eagle3(tmp_path, narrow), SMALL)
    assert said.startswith(
        "--draft HERE: it has no embed_tokens.weight, and its hidden size 32 is not the target's, 48"
    )
    said = refusal(write_eagle3(tmp_path, narrow, num_tokens=VOCAB, own_embed=True, own_head=False), SMALL)
    assert said.startswith("--draft HERE: it has no lm_head.weight, and its hidden size 32 is not the target's, 48")


def test_a_head_tied_to_its_embedding_is_refused(tmp_path: Path) -> None:
    write_eagle3(tmp_path, {"tie_word_embeddings": True}, num_tokens=VOCAB, own_head=False)
    said = "--draft HERE: config.json: tie_word_embeddings is True without an lm_head, which is not supported"
    assert refusal(tmp_path, SMALL) == said


def test_tensors_that_say_nothing_new_are_dropped(tmp_path: Path) -> None:
    config, state = read(write_eagle(tmp_path))
    state |= {"lm_head.weight": torch.ones(2), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    load(write(tmp_path, config, state), SMALL)
