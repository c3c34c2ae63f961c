"""Backend, graphs and memory: what a machine cannot do is refused by name, nothing is ignored."""

from dataclasses import replace

import pytest
import torch

from roost.attention.registry import BACKENDS, KV_CACHE_DTYPES, NUMBA, TORCH, TRITON, Backend, choose_backend
from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.errors import ConfigError
from roost.layers.ops import TORCH_OPS
from roost.lazy_import import load_symbol
from roost.models.model import KEPT_DTYPES
from roost.startup import backend_of, check_capability, check_device_options, ops_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TRAITS = ModelTraits(vocab_size=100)

NAMES = ", ".join(("auto", *(each.name for each in BACKENDS)))


def test_the_device_chooses_unless_told() -> None:
    pytest.importorskip("triton")
    assert backend_of(EngineConfig(), CPU) is NUMBA
    assert backend_of(EngineConfig(), GPU) is TRITON
    assert backend_of(EngineConfig(model=ModelConfig(backend="torch")), CPU) is TORCH
    assert backend_of(EngineConfig(model=ModelConfig(backend="torch")), GPU) is TORCH
    assert ops_of(TORCH) is TORCH_OPS and ops_of(TRITON) is not TORCH_OPS


def test_every_entry_names_code_that_exists() -> None:
    pytest.importorskip("triton")
    for backend in BACKENDS:
        assert callable(load_symbol(backend.factory)) and load_symbol(backend.ops) is ops_of(backend)


def test_each_backend_is_chosen_by_its_name_and_by_the_devices_whose_default_it_is() -> None:
    other = replace(TRITON, name="other", package=None)
    assert choose_backend("other", "cuda", (*BACKENDS, other)) is other
    assert choose_backend("auto", "cuda", (TORCH, other)) is other
    assert choose_backend("auto", "cuda", (TORCH, replace(other, package="no_such_package"))) is TORCH
    assert choose_backend("auto", "cpu", (TORCH, replace(TORCH, name="first", default_for=("cpu",)))).name == "first"


@pytest.mark.parametrize(
    ("name", "device_type", "message"),
    [
        ("fast", "cuda", "--backend must be one of auto, torch, other, got fast"),
        ("other", "cuda", "--backend other needs the package no_such_package; allowed here: auto, torch"),
        ("other", "cpu", "--backend other runs on cuda, and the device is cpu; allowed here: auto, torch"),
        ("auto", "mps", "--backend: none of torch, other runs on a device of type mps"),
    ],
)
def test_a_backend_that_is_not_there_is_refused_with_what_is(name: str, device_type: str, message: str) -> None:
    other = replace(TRITON, name="other", package="no_such_package")
    with pytest.raises(ConfigError) as refused:
        choose_backend(name, device_type, (TORCH, other))
    assert str(refused.value) == message


def test_a_machine_that_cannot_run_a_backend_takes_another_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(NUMBA, package=None, why_not="tests.unit.test_backend_flags:no_luck")
    assert choose_backend("auto", "cpu", (TORCH, broken)) is TORCH
    with pytest.raises(ConfigError, match=r"^--backend numba needs more luck; allowed here: auto, torch$"):
        choose_backend("numba", "cpu", (TORCH, broken))
    with pytest.raises(
        ConfigError, match="--backend numba does not compute with --weights bf16; it does with auto, gguf"
    ):
        choose_backend("numba", "cpu", (TORCH, replace(NUMBA, package=None, why_not=None)), weights="bf16")


def test_a_default_that_does_not_take_the_weights_or_the_kv_gives_way() -> None:
    first = replace(NUMBA, package=None, why_not=None)
    both = (TORCH, first)
    assert choose_backend("auto", "cpu", both) is first
    assert choose_backend("auto", "cpu", both, weights="gguf") is first
    assert choose_backend("auto", "cpu", both, weights="bf16") is TORCH
    assert choose_backend("auto", "cpu", both, kv_cache_dtype="fp8") is TORCH
    assert choose_backend("auto", "cpu", (TORCH, replace(first, default_for=())), kv_cache_dtype="fp16").name == "numba"


def no_luck() -> str:
    """Why a backend cannot run."""
    return "needs more luck"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(model=ModelConfig(backend="cuda")), f"--backend must be one of {NAMES}, got cuda"),
        (
            EngineConfig(model=ModelConfig(backend="triton")),
            "--backend triton runs on cuda, and the device is cpu; allowed here: auto, torch, numba",
        ),
        (EngineConfig(sched=SchedConfig(graphs=True)), "--graphs is for CUDA devices"),
        (EngineConfig(memory=MemoryConfig(memory_fraction=0.5)), "--memory-fraction is for CUDA devices"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        backend_of(config, CPU)
        check_device_options(config, CPU)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (MemoryConfig(memory_fraction=0.0), "--memory-fraction must be above 0 and at most 1, got 0.0"),
        (MemoryConfig(memory_fraction=1.1), "--memory-fraction must be above 0 and at most 1, got 1.1"),
        (MemoryConfig(memory_fraction=0.5, pool_tokens=64), "--memory-fraction and --pool-tokens both say how large"),
    ],
)
def test_a_share_of_memory_is_checked_before_anything_is_read(memory: MemoryConfig, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_device_options(EngineConfig(memory=memory), GPU)
    assert str(refused.value).startswith(message)


def test_graphs_need_a_backend_whose_steps_can_be_captured() -> None:
    assert resolve(EngineConfig(), TRAITS, TRITON).graphs
    assert not resolve(EngineConfig(sched=SchedConfig(graphs=False)), TRAITS, TRITON).graphs
    assert not resolve(EngineConfig(), TRAITS, TORCH).graphs
    with pytest.raises(
        ConfigError, match="--graphs: steps of the torch backend cannot be captured, only those of: triton"
    ):
        resolve(EngineConfig(sched=SchedConfig(graphs=True)), TRAITS, TORCH)


def _kv(kv_cache_dtype: str) -> EngineConfig:
    return EngineConfig(memory=MemoryConfig(kv_cache_dtype=kv_cache_dtype))


def test_every_type_of_kv_is_one_that_can_be_written() -> None:
    assert tuple(KEPT_DTYPES) == KV_CACHE_DTYPES[1:]


@pytest.mark.parametrize(
    ("backend", "asked", "weights", "kv_cache_dtype"),
    [
        (NUMBA, "auto", "gguf", "int8"),
        (NUMBA, "auto", "int8", "int8"),
        (NUMBA, "auto", "fp32", "auto"),
        (NUMBA, "fp32", "gguf", "fp32"),
        (NUMBA, "fp16", "int8", "fp16"),
        (TORCH, "auto", "int8", "auto"),
        (TRITON, "auto", "gguf", "auto"),
        (replace(TORCH, auto_kv=(("bf16", "fp8"),)), "auto", "bf16", "fp8"),
    ],
)
def test_the_type_of_kv_is_the_one_asked_for_or_what_the_backend_declares_for_the_weights(
    backend: Backend, asked: str, weights: str, kv_cache_dtype: str
) -> None:
    assert backend.kv_cache_dtype(asked, weights) == kv_cache_dtype


@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype", "message"),
    [
        (TORCH, "fp4", "--kv-cache-dtype must be one of auto, fp32, fp16, fp8, int8, got fp4"),
        (
            replace(TORCH, name="plain", kv_cache_dtypes=("auto",)),
            "int8",
            "--kv-cache-dtype int8: the plain backend does not read such KV, these do: torch, triton, numba; "
            "or use auto",
        ),
        (
            replace(TORCH, name="whole", kv_cache_dtypes=("auto", "int8")),
            "fp8",
            "--kv-cache-dtype fp8: the whole backend does not read such KV, these do: torch, triton; or use auto or "
            "int8",
        ),
        (
            TORCH,
            "fp16",
            "--kv-cache-dtype fp16: the torch backend does not read such KV, these do: numba; or use auto or fp8 or "
            "int8",
        ),
        (
            NUMBA,
            "fp8",
            "--kv-cache-dtype fp8: the numba backend does not read such KV, these do: torch, triton; or use auto or "
            "fp32 or fp16 or int8",
        ),
    ],
)
def test_kv_that_a_backend_does_not_read_is_refused_with_what_it_does(
    backend: Backend, kv_cache_dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(_kv(kv_cache_dtype), TRAITS, backend)
    assert str(refused.value) == message


def test_fp8_kv_is_refused_on_a_device_that_has_no_such_numbers() -> None:
    with pytest.raises(ConfigError) as refused:
        check_capability(_kv("fp8"), TRITON, (8, 6))
    assert str(refused.value) == (
        "--kv-cache-dtype fp8 needs a device of compute capability 8.9 or more on the triton backend, and this one has "
        "8.6; use auto or int8"
    )
    check_capability(_kv("fp8"), TRITON, (8, 9))
    check_capability(_kv("fp8"), TRITON, (10, 0))
    check_capability(_kv("fp8"), TORCH, (7, 5))  # torch converts them itself
    check_capability(_kv("fp8"), TORCH, None)
    check_capability(_kv("int8"), TRITON, (7, 5))
