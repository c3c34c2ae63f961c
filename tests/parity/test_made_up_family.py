"""A model family is one file and one entry: this file is one, and its model is no `Decoder`.

Attention and a feed-forward without a gate side by side, layer norms, names and config keys of its own, and KV of
other heads, sizes and types in window layers than in full ones. It loads from a folder and serves what a dense pass
over the whole text in plain torch says.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SpecConfig
from roost.errors import ConfigError, InvariantError
from roost.layers.attention import Attend
from roost.layers.linear import activation_dtype, make_linear
from roost.layers.ops import TORCH_OPS, Ops
from roost.layers.rotary import Rope, cos_sin_at, frequencies
from roost.messages import Command, Event, Finished, OpenSession, Submit, Tokens
from roost.models import registry
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.model import KvShape, traits_of
from roost.models.registry import decoder_config
from roost.models.tensors import Tensors
from roost.startup import Running, start
from roost.weights.folder import CONFIG, SINGLE_FILE
from roost.weights.load import load_model, open_source
from tests.support.random_heads import write_eagle
from tests.support.small_vocabularies import byte_level
from tests.support.tiny_folder import write_model

VOCAB = byte_level().vocab_size
HIDDEN, WIDE, HEADS, WINDOW, THETA = 24, 40, 4, 6, 700.0
CPU = torch.device("cpu")

# --- the family: what a contributor writes ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgehogConfig:
    """Sizes of a checkpoint."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    context_max: int
    kv: tuple[KvShape, ...]  # by layer


def read_config(fields: Fields) -> HedgehogConfig:
    """Window layers first; one layer in two sees everything."""
    window = KvShape(window=fields.integer("span"), num_kv_heads=1, head_dim=6, scale=0.5, dtype=torch.float64)
    full = KvShape(num_kv_heads=2, head_dim=8, scale=0.25, dtype=torch.float32)
    num_layers = fields.integer("depth")
    return HedgehogConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("n_embd"),
        num_layers=num_layers,
        context_max=fields.integer("n_ctx"),
        kv=tuple(full if number % 2 else window for number in range(num_layers)),
    )


class Hedgehog:
    """A model that shares no layer with the others."""

    def __init__(
        self, config: HedgehogConfig, state: Mapping[str, Tensor], weights: str, device: torch.device, ops: Ops
    ) -> None:
        self.ops, self.kv, self.hidden_size = ops, config.kv, config.hidden_size
        self.num_layers = config.num_layers
        self.dtype = activation_dtype(weights)
        self.activation_width = WIDE
        self.traits = traits_of(config.kv, vocab_size=config.vocab_size, context_max=config.context_max)
        tensors = Tensors(state, device, self.dtype)

        def projection(name: str, out_len: int, in_len: int) -> Callable[[Tensor], Tensor]:
            return make_linear(tensors.take(name, out_len, in_len), None, weights)

        self._embed = tensors.take("wte", config.vocab_size, HIDDEN)
        self._norm = tensors.take("ln", HIDDEN)
        self._layers = [
            (
                tensors.take(f"h.{number}.ln", HIDDEN),
                projection(f"h.{number}.qkv", (HEADS + 2 * kv.num_kv_heads) * kv.head_dim, HIDDEN),
                projection(f"h.{number}.out", HIDDEN, HEADS * kv.head_dim),
                projection(f"h.{number}.in", WIDE, HIDDEN),
                projection(f"h.{number}.down", HIDDEN, WIDE),
                frequencies(Rope(theta=THETA), kv.head_dim, device),
            )
            for number, kv in enumerate(config.kv)
        ]
        tensors.check_all_taken()

    def embed(self, tokens: Tensor) -> Tensor:
        """Inputs of the first layer."""
        return self._embed[tokens]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states."""
        hidden = self.embed(tokens)
        for number, (norm, qkv, out, wide, down, frequency) in enumerate(self._layers):
            kv, normed = self.kv[number], layer_norm(hidden, (HIDDEN,), norm)
            heads = qkv(normed).unflatten(-1, (-1, kv.head_dim)).to(kv.dtype)
            qk, value = heads.split((HEADS + kv.num_kv_heads, kv.num_kv_heads), dim=1)
            mixed = attend(number, qk, value, cos_sin_at(positions, frequency, kv.dtype)).flatten(1)
            hidden = hidden + out(mixed.to(self.dtype)) + down(wide(normed).tanh())
        return layer_norm(hidden, (HIDDEN,), self._norm)

    def forward_with_aux(
        self, tokens: Tensor, positions: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Not offered: the family declares no draft hooks."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Those of the embedding."""
        return linear(hidden, self._embed)


HEDGEHOG = Family(
    architectures=("HedgehogForCausalLM",),
    draft_hooks=False,
    read_config=read_config,
    load=Hedgehog,
)

# --- its checkpoint, and what a dense pass makes of it ---------------------------------------------------------

CONFIG_JSON: dict[str, object] = {
    "architectures": ["HedgehogForCausalLM"],
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "depth": 4,
    "n_ctx": 512,
    "span": WINDOW,
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a checkpoint."""
    yield from (("wte", (VOCAB, HIDDEN)), ("ln", (HIDDEN,)))
    for number, kv in enumerate(read_config(Fields(CONFIG_JSON)).kv):
        qkv = (HEADS + 2 * kv.num_kv_heads) * kv.head_dim
        yield from ((f"h.{number}.ln", (HIDDEN,)), (f"h.{number}.qkv", (qkv, HIDDEN)))
        yield f"h.{number}.out", (HIDDEN, HEADS * kv.head_dim)
        yield from ((f"h.{number}.in", (WIDE, HIDDEN)), (f"h.{number}.down", (HIDDEN, WIDE)))


def checkpoint() -> dict[str, Tensor]:
    """Random weights, wide enough for the output to wander."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes()}


def plain_heads(numbers: Tensor, head_dim: int) -> Tensor:
    """Heads [num_heads, num_tokens, head_dim], rotated pair by pair."""
    heads = numbers.unflatten(-1, (-1, head_dim)).transpose(0, 1)
    rotated, half = torch.empty_like(heads), head_dim // 2
    for i in range(half):
        angles = torch.arange(heads.shape[1]) * torch.tensor(THETA ** (-2 * i / head_dim), dtype=torch.float32)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        rotated[..., i] = heads[..., i] * cos - heads[..., i + half] * sin
        rotated[..., i + half] = heads[..., i + half] * cos + heads[..., i] * sin
    return rotated


def plain_logits(state: dict[str, Tensor], tokens: tuple[int, ...]) -> Tensor:
    """Logits after the last of some tokens: one dense pass."""
    hidden, number = state["wte"][list(tokens)], torch.arange(len(tokens))
    for layer in range(4):
        kv_heads, head_dim, scale, dtype = (2, 8, 0.25, torch.float32) if layer % 2 else (1, 6, 0.5, torch.float64)
        normed = layer_norm(hidden, (HIDDEN,), state[f"h.{layer}.ln"])
        query_len, kv_len = HEADS * head_dim, kv_heads * head_dim
        query, key, value = (normed @ state[f"h.{layer}.qkv"].T).to(dtype).split((query_len, kv_len, kv_len), dim=1)
        unseen = number > number[:, None]
        if layer % 2 == 0:
            unseen |= number <= number[:, None] - WINDOW
        keys, values = plain_heads(key, head_dim), value.unflatten(-1, (-1, head_dim)).transpose(0, 1)
        mixed = []
        for head, each in enumerate(plain_heads(query, head_dim)):
            shared = head // (HEADS // kv_heads)
            weights = (each @ keys[shared].T * scale).masked_fill(unseen, -torch.inf).softmax(dim=-1)
            mixed.append(weights @ values[shared])
        fed = (normed @ state[f"h.{layer}.in"].T).tanh() @ state[f"h.{layer}.down"].T
        hidden = hidden + torch.cat(mixed, dim=-1).to(torch.float32) @ state[f"h.{layer}.out"].T + fed
    return layer_norm(hidden[-1], (HIDDEN,), state["ln"]) @ state["wte"].T


def plain_greedy(prompt: tuple[int, ...], num_new: int) -> tuple[int, ...]:
    """What the checkpoint says after a prompt."""
    state, tokens = checkpoint(), prompt
    for _ in range(num_new):
        tokens = (*tokens, int(plain_logits(state, tokens).argmax()))
    return tokens[len(prompt) :]


# --- one entry, and the engine serves it -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint's folder, with the family in the registry."""
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, HEDGEHOG))
    write_model(tmp_path)  # for its tokenizer
    (tmp_path / CONFIG).write_text(json.dumps(CONFIG_JSON))
    save_file(checkpoint(), tmp_path / SINGLE_FILE)
    return tmp_path


@pytest.fixture
def started(folder: Path) -> Iterator[Callable[..., Running]]:
    """Start an engine of small chunks and pages, every tick of it audited."""
    running: list[Running] = []

    def begin(spec: SpecConfig | None = None, chunk: int = 5) -> Running:
        config = EngineConfig(
            model=ModelConfig(model=str(folder), weights="fp32", device="cpu", backend="torch"),  # of float64 KV
            memory=MemoryConfig(page_size=4, pool_tokens=512, strict_memory=2),
            sched=SchedConfig(chunk=chunk, max_running=4),
            spec=spec or SpecConfig(),
        )
        running.append(start(config))
        for pool in running[-1].executor.runner.passes.kv_caches:  # a slot that nobody wrote shows
            pool.keys.fill_(torch.nan)
            pool.values.fill_(torch.nan)
        return running[-1]

    yield begin
    for each in running:
        each.executor.close()


def serve(running: Running, *commands: Command) -> dict[str, tuple[tuple[int, ...], Finished]]:
    """Output and end of each request."""
    events: list[Event] = []
    for command in commands:
        running.engine.post(command, events.append)
    while running.engine.has_work:
        running.engine.tick()
    ends = {event.request_id: event for event in events if isinstance(event, Finished)}
    outputs: dict[str, tuple[int, ...]] = dict.fromkeys(ends, ())
    for event in events:
        if isinstance(event, Tokens):
            outputs[event.request_id] += tuple(event.tokens)
    return {name: (outputs[name], end) for name, end in ends.items()}


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


@pytest.mark.parametrize("spec", [SpecConfig(), SpecConfig(spec="ngram", spec_steps=3)], ids=["plain", "ngram"])
def test_its_requests_in_chunks_side_by_side_return_what_a_dense_pass_says(
    spec: SpecConfig, started: Callable[..., Running]
) -> None:
    asked = prompts(17, 3, 9)
    commands = [Submit(request_id=str(i), tokens=tokens, max_new_tokens=14) for i, tokens in enumerate(asked)]
    found = serve(started(spec), *commands)
    for i, tokens in enumerate(asked):
        assert found[str(i)][0] == plain_greedy(tokens, 14), i


def test_its_sessions_go_on_from_their_kv_and_return_what_a_dense_pass_says(started: Callable[..., Running]) -> None:
    running, history = started(), ()
    running.engine.post(OpenSession(session_id="s"), lambda event: None)
    for number, tokens in enumerate(prompts(13, 6, 8)):
        turn = Submit(request_id=str(number), tokens=tokens, max_new_tokens=7, session_id="s")
        output, end = serve(running, turn)[str(number)]
        assert output == plain_greedy((*history, *tokens), 7), number
        assert end.usage.cached_tokens >= len(history) - 1
        history = (*history, *tokens, *output)


def test_books_keep_kv_of_the_shape_that_their_layers_have(started: Callable[..., Running]) -> None:
    running = started()
    full, window = running.executor.runner.passes.kv_caches
    assert (tuple(full.keys.shape), full.keys.dtype) == ((2, 512, 2, 8), torch.float32)
    assert (tuple(window.values.shape), window.values.dtype) == ((2, 512, 1, 6), torch.float64)
    assert running.settings["windows"] == [None, WINDOW]


def test_layers_of_one_book_with_kv_of_two_shapes_are_refused(
    folder: Path, started: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    def uneven(*args: object) -> Hedgehog:
        model = Hedgehog(*args)  # type: ignore[arg-type]
        model.kv = (*model.kv[:3], KvShape(num_kv_heads=1, head_dim=8, scale=1.0, dtype=torch.float32))
        return model

    monkeypatch.setattr(registry, "FAMILIES", (replace(HEDGEHOG, load=uneven),))
    with pytest.raises(InvariantError, match="layers of one book must have KV of one shape"):
        started()


# --- what does not fit is refused ------------------------------------------------------------------------------


def test_its_config_is_checked_before_a_tensor_is_read(folder: Path) -> None:
    (folder / CONFIG).write_text(json.dumps({**CONFIG_JSON, "span": 0}))

    class Unread(dict[str, Tensor]):
        def config(self) -> dict[str, object]:
            return json.loads((folder / CONFIG).read_text())  # type: ignore[no-any-return]

        def __getitem__(self, name: str) -> Tensor:
            raise AssertionError(f"{name} is read too early")

    with pytest.raises(ConfigError, match=r"config\.json: span must be a whole number of at least 1, got 0"):
        load_model(Unread(), weights="fp32", device=CPU, ops=TORCH_OPS)  # type: ignore[arg-type]


def test_a_tensor_that_it_does_not_use_is_refused(folder: Path) -> None:
    save_file({**checkpoint(), "h.0.bias": torch.zeros(2)}, folder / SINGLE_FILE)
    with pytest.raises(ConfigError, match=r"tensors that this model does not use: h\.0\.bias"):
        load_model(open_source(folder), weights="fp32", device=CPU)


def test_a_draft_head_is_refused_since_the_family_declares_no_hooks(
    folder: Path, tmp_path: Path, started: Callable[..., Running]
) -> None:
    head = write_eagle(tmp_path / "head")
    with pytest.raises(ConfigError, match="--draft: the model's family has no hooks for draft heads"):
        started(SpecConfig(spec="eagle", draft=str(head)))


def test_what_needs_a_plain_decoder_refuses_it_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: HedgehogForCausalLM is not a plain decoder"):
        decoder_config(CONFIG_JSON)
