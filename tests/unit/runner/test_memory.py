"""The pool of a GPU is what is left beside weights, captured steps and passes; too little is said with numbers."""

from dataclasses import dataclass, replace

import pytest
import torch

from roost.attention.kv_cache import KvCache, PageTable
from roost.attention.recurrent_states import RecurrentStates
from roost.attention.registry import KV_CACHE_DTYPES, TORCH, TRITON, Backend
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.device.cpu import CpuDevice
from roost.errors import ConfigError
from roost.layers.gated_delta import DeltaShape
from roost.layers.quantised_kv import CODE_DTYPES
from roost.models.model import KvShape
from roost.runner.memory import (
    MEMORY_FRACTION,
    STATES_SHARE,
    pool_tokens,
    state_pool,
    states_bytes,
    token_bytes,
    workspace_bytes,
)
from roost.sampling.logprobs import LOGPROB_POSITIONS_MAX

GIB = 2**30
FULL = KvShape(num_kv_heads=2, head_dim=16, scale=0.25, dtype=torch.bfloat16)
NARROW = KvShape(window=8, num_kv_heads=1, head_dim=8, scale=0.25, dtype=torch.float32)


@dataclass(frozen=True)
class Sized:
    """A model, or a head, of which only the KV counts."""

    kv: tuple[KvShape, ...] = (FULL, NARROW, FULL)
    traits: ModelTraits = ModelTraits(vocab_size=100)
    activation_width: int = 8
    hidden_size: int = 4
    dtype: torch.dtype = torch.bfloat16


def test_a_token_takes_keys_and_values_of_every_layers_own_shape_and_in_the_heads_too() -> None:
    full, narrow = 2 * 2 * 16 * 2, 2 * 1 * 8 * 4
    assert token_bytes(Sized(), None, "auto") == (2 * full, narrow)
    one = KvShape(num_kv_heads=4, head_dim=8, scale=1.0, dtype=torch.float32)
    assert token_bytes(Sized(), Sized((one,)), "auto") == (2 * full + 2 * 4 * 8 * 4, narrow)


@pytest.mark.parametrize("kv_cache_dtype", CODE_DTYPES)
def test_quantised_kv_takes_a_byte_a_number_and_four_for_each_heads_keys_and_values(kv_cache_dtype: str) -> None:
    full, narrow = 2 * 2 * (16 + 4), 2 * 1 * (8 + 4)
    assert token_bytes(Sized(), None, kv_cache_dtype) == (2 * full, narrow)
    one = KvShape(num_kv_heads=4, head_dim=8, scale=1.0, dtype=torch.float32)
    assert token_bytes(Sized(), Sized((one,)), kv_cache_dtype) == (2 * full + 2 * 4 * (8 + 4), narrow)


@pytest.mark.parametrize(("kv_cache_dtype", "num_bytes"), [("fp32", 4), ("fp16", 2)])
def test_kv_kept_as_floats_takes_the_bytes_of_that_type_whatever_is_computed(
    kv_cache_dtype: str, num_bytes: int
) -> None:
    assert token_bytes(Sized(), None, kv_cache_dtype) == (2 * 2 * 2 * 16 * num_bytes, 2 * 8 * num_bytes)


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_a_cache_is_as_large_as_is_counted(kv_cache_dtype: str) -> None:
    resolved = resolve(EngineConfig(memory=MemoryConfig(pool_tokens=1024)), ModelTraits(vocab_size=9))
    layers = [FULL.kept_as(kv_cache_dtype)] * 3
    cache = KvCache(PageTable(resolved, 0, CpuDevice()), layers)
    buffers = (cache.keys, cache.values, cache.scales)
    assert sum(each.nbytes for each in buffers if each is not None) == 1024 * 3 * layers[0].token_bytes


def test_states_of_recurrent_layers_and_their_inputs_are_as_large_as_is_counted() -> None:
    shape = DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_len=4)
    inputs = replace(FULL, num_kv_heads=1, head_dim=shape.input_len, has_values=False, recurs=shape)
    traits = ModelTraits(vocab_size=9, recurrent_state=True)
    resolved = resolve(EngineConfig(memory=MemoryConfig(pool_tokens=1024)), traits)
    assert resolved.states is not None
    cache = KvCache(PageTable(resolved, 1, CpuDevice()), [inputs] * 2)
    states = RecurrentStates(cache, resolved.states.num_pages, resolved.num_rows + 1, CpuDevice())
    held = cache.keys.nbytes + states.matrices.nbytes + states.tails.nbytes
    assert states_bytes(resolved, Sized((FULL, inputs, inputs))) == held
    assert states_bytes(resolve(EngineConfig(), ModelTraits(vocab_size=9)), Sized()) == 0
    assert token_bytes(Sized((FULL, inputs, inputs)), None, "auto") == (FULL.token_bytes, 0)
    each = 2 * shape.state_bytes(torch.bfloat16)
    wanted, least = resolved.states.num_pages, resolved.states_to_hold + 1
    for num_fit, given in ((10 * wanted, wanted), (least + 7, least + 7), (0, least)):
        assert state_pool(resolved, Sized((FULL, inputs, inputs)), int(num_fit * each / STATES_SHARE)) == given
    assert state_pool(resolve(EngineConfig(), ModelTraits(vocab_size=9)), Sized(), GIB) is None


def test_the_pool_is_the_share_less_what_is_used_and_what_passes_need() -> None:
    free, total, workspace = 100 * GIB, 140 * GIB, 5 * GIB
    assert pool_tokens(1.0, free, total, workspace, 1024) == 95 * GIB // 1024
    assert pool_tokens(0.5, free, total, workspace, 1024) == 25 * GIB // 1024
    default = pool_tokens(None, free, total, workspace, 1024)
    assert default == pool_tokens(MEMORY_FRACTION, free, total, workspace, 1024)


def test_more_captured_rounds_and_longer_chunks_leave_less() -> None:
    traits = ModelTraits(vocab_size=50_000)

    def bytes_of(backend: Backend = TRITON, **sched: int | bool) -> int:
        sized = Sized(traits=traits, activation_width=1536)
        return workspace_bytes(EngineConfig(sched=SchedConfig(**sched)), sized, backend)

    assert bytes_of(max_running=128) > bytes_of(max_running=64)
    assert bytes_of(max_running=64) > bytes_of(max_running=64, graphs=False)
    assert bytes_of(TORCH, chunk=512) == bytes_of(chunk=512, graphs=False)  # it has no graphs
    assert bytes_of(chunk=8192) > bytes_of(chunk=512)
    by_chunk = [bytes_of(chunk=8192, graphs=graphs) - bytes_of(chunk=512, graphs=graphs) for graphs in (True, False)]
    assert by_chunk[0] > by_chunk[1]


def test_every_captured_width_is_counted() -> None:
    traits = ModelTraits(vocab_size=50_000)

    def logits_of(spec: SpecConfig) -> int:
        with_graphs, without = (
            workspace_bytes(
                EngineConfig(spec=spec, sched=SchedConfig(max_running=8, chunk=1, graphs=graphs)),
                Sized(traits=traits),
                TRITON,
            )
            for graphs in (None, False)
        )
        return (with_graphs - without) // (2 * traits.vocab_size)

    assert logits_of(SpecConfig()) == 1 + 2 + 4 + 8
    assert logits_of(SpecConfig(spec="ngram", spec_steps=4)) == 15 * 5
    menu, wide = 1 + 2 + 3 + 4 + 5 + 7, 9 + 17  # for those whose drafts are looked up
    assert logits_of(SpecConfig(spec="ngram")) == 15 * (menu + wide)
    assert logits_of(SpecConfig(spec="ngram", spec_max_batch=2)) == 3 * (menu + wide) + 12
    eagle = SpecConfig(spec="eagle", draft="head")
    assert logits_of(eagle) == 15 * (menu + wide) and logits_of(replace(eagle, spec_lookup="off")) == 15 * menu


@pytest.mark.parametrize("rows", [1, 256])
def test_log_probabilities_of_as_many_positions_as_exist_at_one_time_are_counted(rows: int) -> None:
    vocab_size, position = 152_000, 152_000 * (2 + 4 + 4 + 4 + 4 + 8)  # what log_probabilities has at one time
    sched, spec = SchedConfig(max_running=rows, chunk=1, graphs=False), SpecConfig(spec="ngram", spec_steps=4)
    traits = ModelTraits(vocab_size=vocab_size)
    found = workspace_bytes(EngineConfig(sched=sched, spec=spec), Sized(traits=traits), TRITON)
    logits_and_counts = rows * 5 * vocab_size * 2 + 2 * rows * vocab_size * 5
    assert LOGPROB_POSITIONS_MAX * position <= found - logits_and_counts <= 2 * LOGPROB_POSITIONS_MAX * position


def test_no_memory_left_says_what_to_change() -> None:
    with pytest.raises(ConfigError) as refused:
        pool_tokens(0.5, 60 * GIB, 140 * GIB, GIB, 1024)
    assert "60.0 GiB are free, 1.0 are needed otherwise and 70.0 are left alone" in str(refused.value)
    assert "--memory-fraction (0.5)" in str(refused.value) and "--max-running" in str(refused.value)
