"""Tiny random checkpoints, their transformers reference, and an engine that serves them.

Nothing is downloaded: weights come from a seed. KV pools start as NaN, so that a read of a slot nobody wrote shows in
the output. Used by the tests of this folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from roost.clock import VirtualClock
from roost.config import EngineConfig, MemoryConfig, SchedConfig, resolve
from roost.exec.executor import TorchExecutor
from roost.messages import Command, Event, Finished, OpenSession, Submit, Tokens
from roost.models.llama import Llama, LlamaConfig
from roost.obs.trace import Note, Trace
from roost.sched.engine import Engine

CPU = torch.device("cpu")
WINDOW = 9
VOCAB = 97

CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=700.0,
    rms_norm_eps=1e-5,
)

_TICKS_MAX = 5000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiny:
    """A checkpoint as transformers runs it, and as Roost is told about it."""

    reference: PreTrainedModel
    config: LlamaConfig

    def model(self) -> Llama:
        """Roost's model of it."""
        return Llama(self.config, self.reference.state_dict(), CPU)


@cache
def tiny(kind: str) -> Tiny:
    """A checkpoint: `full` (Llama), `tied` (Llama that shares its embedding) or `window` (Mistral)."""
    tied = kind == "tied"
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "rope_theta": CONFIG.rope_theta,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,  # wide, so that the output wanders and near-ties are rare
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(7)
    if kind == "window":
        reference: PreTrainedModel = MistralForCausalLM(MistralConfig(**shape, sliding_window=WINDOW))
        config = replace(CONFIG, window=WINDOW, window_layers=frozenset(range(CONFIG.num_layers)))
    else:
        reference = LlamaForCausalLM(ReferenceConfig(**shape))
        config = replace(CONFIG, tie_word_embeddings=tied)
    for name, weight in reference.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)  # they start as ones, which would hide a wrong one
    return Tiny(reference=reference.eval(), config=config)


@cache
def greedy(kind: str, prompt: tuple[int, ...], num_new: int) -> tuple[int, ...]:
    """What transformers generates."""
    reference = tiny(kind).reference
    with torch.no_grad():
        output = reference.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


def prompts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of some lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def dense_logits(config: LlamaConfig, state: dict[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """Scores after every token, computed without pages, chunks, a cache or any of Roost's layers."""
    length, heads, dim = len(tokens), config.num_heads, config.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], state[name + ".weight"], config.rms_norm_eps)

    def project(x: Tensor, name: str) -> Tensor:
        return x @ state[name + ".weight"].T

    def turn(x: Tensor) -> Tensor:  # as complex numbers: [length, heads, dim / 2]
        angles = torch.arange(length)[:, None] / config.rope_theta ** (torch.arange(0, dim, 2) / dim)
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = state["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, prefix + "input_layernorm")
        q, k, v = (project(x, prefix + f"self_attn.{name}_proj").view(length, -1, dim) for name in "qkv")
        k, v = (each.repeat_interleave(heads // config.num_kv_heads, dim=1) for each in (turn(k), v))
        reach = config.window if layer in config.window_layers else length
        seen = (distance >= 0) & (distance < reach)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            turn(q).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen
        )
        hidden = hidden + project(mixed.transpose(0, 1).reshape(length, -1), prefix + "self_attn.o_proj")
        x = norm(hidden, prefix + "post_attention_layernorm")
        gate = torch.nn.functional.silu(project(x, prefix + "mlp.gate_proj"))
        hidden = hidden + project(gate * project(x, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")
    return project(norm(hidden, "model.norm"), "lm_head")


def dense_greedy(config: LlamaConfig, state: dict[str, Tensor], prompt: Sequence[int], num_new: int) -> tuple[int, ...]:
    """Greedy output by computing the whole sequence again for every token."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(int(dense_logits(config, state, tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def configure(
    *,
    depth: int = 1,
    page_size: int = 4,
    chunk: int = 512,
    mixed: bool = True,
    pool_tokens: int = 2048,
    window_pool_tokens: int = 2048,
    max_running: int = 8,
) -> EngineConfig:
    """A configuration with the strictest audit."""
    return EngineConfig(
        memory=MemoryConfig(
            page_size=page_size, pool_tokens=pool_tokens, window_pool_tokens=window_pool_tokens, strict_memory=2
        ),
        sched=SchedConfig(context=256, max_running=max_running, chunk=chunk, mixed=mixed, overlap=depth == 1),
    )


class Served:
    """A model behind an engine, and everything that came back from it."""

    def __init__(self, model: Llama, config: EngineConfig) -> None:
        resolved = resolve(config, model.traits)
        self.notes: list[Note] = []
        self.events: list[Event] = []
        self.executor = TorchExecutor(model, resolved, CPU)
        for pool in self.executor.runner.pools:
            pool.keys.fill_(torch.nan)
            pool.values.fill_(torch.nan)
        self.engine = Engine(resolved, self.executor, VirtualClock(), Trace(self.notes.append))

    def post(self, command: Command) -> None:
        """Hand a command to the engine."""
        self.engine.post(command, self.events.append)

    def submit(self, name: str, prompt: tuple[int, ...], num_new: int, session: str | None = None) -> None:
        """Ask for a generation."""
        self.post(Submit(request_id=name, tokens=prompt, max_new_tokens=num_new, session_id=session))

    def open(self, session: str) -> None:
        """Open a session."""
        self.post(OpenSession(session_id=session))

    def run(self) -> None:
        """Tick until nothing is left to do."""
        for _ in range(_TICKS_MAX):
            if not self.engine.has_work:
                return
            self.engine.tick()
        raise AssertionError(f"work is left after {_TICKS_MAX} ticks: {self.engine.waiting_for}")

    def output(self, name: str) -> tuple[int, ...]:
        """What a request returned."""
        events = [event for event in self.events if isinstance(event, Tokens) and event.request_id == name]
        return tuple(token for event in events for token in event.tokens)

    def finish(self, name: str) -> Finished:
        """How a request ended: exactly once."""
        (end,) = [event for event in self.events if isinstance(event, Finished) and event.request_id == name]
        return end

    def count(self, kind: str) -> int:
        """How often something was noted in the engine's trace."""
        return sum(note[0] == kind for note in self.notes)
