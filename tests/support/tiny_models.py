"""Tiny random checkpoints, their transformers reference, and an engine that serves them.

Nothing is downloaded: weights come from a seed. KV caches start as NaN, so that a read of a slot nobody wrote shows in
the output. $ROOST_TEST_BACKEND has the engines read through kernels: triton's, on a GPU or interpreted, or numba's.
Used by the parity tests.
"""

import os
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roost.attention.kv_cache import KvCache
from roost.attention.registry import BACKENDS
from roost.clock import VirtualClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.drafters.eagle import EagleDrafter
from roost.drafters.joint import JointDrafter
from roost.layers.ops import Ops
from roost.lazy_import import load_symbol
from roost.messages import Command, Event, Finished, OpenSession, Submit, Tokens
from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig
from roost.models.model import Head
from roost.models.registry import decoder_config
from roost.obs.trace import Note, Trace
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.sched.request import Mark, NewStopFinder
from roost.spec_shape import PLAIN, SpecShape
from tests.support.spec_configs import spec_config

CPU = torch.device("cpu")
BACKEND = {each.name: each for each in BACKENDS}[os.environ.get("ROOST_TEST_BACKEND", "torch")]
DEVICE = torch.device("cuda" if "cuda" in BACKEND.default_for and torch.cuda.is_available() else "cpu")
GRAPHS = os.environ.get("ROOST_TEST_GRAPHS", "on") == "on"
WINDOW = 9
VOCAB = 97

# Angles per position 1, 0.19, 0.038 and 0.0074: in 64 positions 10, 2, 0.4 and 0.07 turns, so every band has some.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 8.0,
    "beta_fast": 6.0,
    "beta_slow": 0.3,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
UPPER_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
GEMMA = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,
    "rope_parameters": GEMMA_ROPES,
    "tie_word_embeddings": True,
}

LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "norm_eps": 0.01,
    "block_multiple_of": 8,
    "tie_word_embeddings": True,
}
LFM2_BIASED = {**LFM2, "conv_L_cache": 4, "conv_bias": True, "block_auto_adjust_ff_dim": False}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SOME_EXPERTS = {
    **EXPERTS,
    **UPPER_WINDOW,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "attention_bias": True,
}
HYBRID = {
    "initializer_range": 0.2,  # what transformers computes by chunks in float32 is further off with wide ones
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
HYBRID_YARN = {**HYBRID, "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.5}}
HYBRID_EXPERTS = {
    **HYBRID,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "attention_bias": True,
}
GEMMA4 = {  # full layers have wider heads and fewer of them; the last three layers keep no KV
    "num_hidden_layers": 7,
    "num_key_value_heads": 3,
    "layer_types": [("sliding_attention", "full_attention")[is_full] for is_full in (0, 0, 1, 0, 0, 0, 1)],
    "sliding_window": WINDOW,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
    "final_logit_softcapping": 5.0,
}
GEMMA4_EXPERTS = {
    **GEMMA4,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}

# kind -> architecture, its config, and what the checkpoint has besides the sizes all have
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-window": (Qwen2ForCausalLM, Qwen2Config, UPPER_WINDOW),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3-window": (Qwen3ForCausalLM, Qwen3Config, {**UPPER_WINDOW, "attention_bias": True}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "qwen3-moe-some": (Qwen3MoeForCausalLM, Qwen3MoeConfig, SOME_EXPERTS),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, GPT_OSS),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": YARN_ROPE}),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, LFM2),
    "lfm2-biased": (Lfm2ForCausalLM, Lfm2Config, LFM2_BIASED),
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HYBRID),
    "qwen3.5-yarn": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HYBRID_YARN),
    "qwen3.5-moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, HYBRID_EXPERTS),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "mistral-full": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA),  # tied and random, it says its last token for ever
    "gemma3-untied": (Gemma3ForCausalLM, Gemma3TextConfig, {**GEMMA, "tie_word_embeddings": False}),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4),
    "gemma4-moe": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4_EXPERTS),
}

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 0.01,  # large, so that a wrong one shows
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # wide, so that the output wanders and near-ties are rare
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EVEN = {  # sizes of which 4 ranks have a part each; KV heads are copied
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
OFFSET_NORMS = ("gemma3", "qwen3.5")  # kinds that keep norms as offsets from one
_TICKS_MAX = 5000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiny:
    """A checkpoint as transformers runs it, and as Roost reads it."""

    reference: PreTrainedModel

    @property
    def config_json(self) -> dict[str, object]:
        """Its config.json."""
        return {**self.reference.config.to_dict(), "architectures": [type(self.reference).__name__]}

    @property
    def config(self) -> DecoderConfig:
        """Roost's reading of that."""
        return decoder_config(self.config_json)

    def model(self, weights: str = "fp32") -> Decoder:
        """Roost's model of it."""
        return Decoder(self.config, self.reference.state_dict(), weights, DEVICE, ops())


def ops() -> Ops:
    """The operations that go with the backend."""
    made: Ops = load_symbol(BACKEND.ops)
    return made


@cache
def tiny(kind: str, *, is_even: bool = False) -> Tiny:
    """A checkpoint of some kind; an even one can be split over 2 or 4 ranks."""
    architecture, config, special = KINDS[kind]
    sizes = {**SHAPE, **special}
    even = {name: size for name, size in EVEN.items() if name in sizes} if is_even else {}
    torch.manual_seed(7)
    reference = architecture(config(**{**sizes, **even}))
    return Tiny(reference=randomised(reference, least_norm=-0.5 if kind.startswith(OFFSET_NORMS) else 0.5))


def randomised(reference: PreTrainedModel, *, least_norm: float = 0.5) -> PreTrainedModel:
    """The same with random norms, biases and scales: ones (Gemma: zeros) and zeros, as they start, hide wrong ones."""
    for name, weight in reference.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, least_norm, least_norm + 1)
        elif name.endswith(("bias", "sinks")):
            torch.nn.init.uniform_(weight, -1, 1)
        elif name.endswith("scale"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    for name, weight in reference.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return reference.eval()


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


def configure(
    *,
    depth: int = 1,
    page_size: int = 4,
    chunk: int = 512,
    mixed: bool = True,
    pool_tokens: int = 2048,
    window_pool_tokens: int = 2048,
    max_running: int = 8,
    context: int = 256,
    spec: SpecShape = PLAIN,
    spec_max_batch: int | None = None,
    auto: bool = False,
    kv_cache_dtype: str = "auto",
) -> EngineConfig:
    """A configuration with the strictest audit; a test of what the backend does not declare is skipped."""
    if spec.topk > 1 and not BACKEND.trees:
        pytest.skip(f"the {BACKEND.name} backend declares no trees")
    if kv_cache_dtype not in BACKEND.kv_cache_dtypes:
        pytest.skip(f"the {BACKEND.name} backend declares no such KV")
    return EngineConfig(
        memory=MemoryConfig(
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
            pool_tokens=pool_tokens,
            window_pool_tokens=window_pool_tokens,
            strict_memory=2,
        ),
        sched=SchedConfig(context=context, max_running=max_running, chunk=chunk, mixed=mixed, overlap=depth == 1),
        spec=spec_config(spec, spec_max_batch, auto=auto),
    )


class Served:
    """A model behind an engine, and everything that came back from it."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        head: Head | None = None,
        new_stop_finder: NewStopFinder | None = None,
        *,
        on_host: bool = True,
    ) -> None:
        if BACKEND.graphs and not GRAPHS:
            config = replace(config, sched=replace(config.sched, graphs=False))
        resolved = resolve(config, model.traits, BACKEND, on_host=on_host and DEVICE.type == "cpu")
        self.notes: list[Note] = []
        self.events: list[Event] = []
        self.executor = TorchExecutor(model, resolved, DEVICE, head)
        for each in self.kv_caches:
            for buffer in (each.keys, each.values, each.scales):
                if buffer is not None and buffer.dtype != torch.int8:  # whose scales are enough
                    buffer.fill_(torch.nan)
        states = self.executor.runner.passes.states
        if states is not None:
            states.matrices[:, 1:], states.tails[:, 1:] = torch.nan, torch.nan
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # filled beside the stream of the steps
        self.clock = VirtualClock()
        self.engine = Engine(resolved, self.executor, self.clock, Trace(self.notes.append), new_stop_finder)

    @property
    def kv_caches(self) -> list[KvCache]:
        """Of every book, and the drafter's own."""
        passes = self.executor.runner.passes
        drafter = passes.drafter.head if isinstance(passes.drafter, JointDrafter) else passes.drafter
        own = [drafter.kv_cache] if isinstance(drafter, EagleDrafter) else []
        return passes.kv_caches + own

    def post(self, command: Command) -> None:
        """Hand a command to the engine."""
        self.engine.post(command, self.events.append)

    def submit(self, name: str, prompt: tuple[int, ...], num_new: int, session: str | None = None) -> None:
        """Ask for a generation."""
        self.post(Submit(request_id=name, tokens=prompt, max_new_tokens=num_new, session_id=session))

    def open(self, session: str) -> None:
        """Open a session."""
        self.post(OpenSession(session_id=session))

    def run(self, preempt_ticks: int = 0) -> None:
        """Tick until nothing is left to do; if told, preempt all that run every `preempt_ticks`."""
        for tick in range(1, _TICKS_MAX):
            if not self.engine.has_work:
                return
            self.engine.tick()
            for request in self.engine.state.running if preempt_ticks and tick % preempt_ticks == 0 else ():
                self.engine.state.mark(request, Mark.PREEMPT)
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
