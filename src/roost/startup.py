"""Start-up: from a configuration to an engine that can run.

Finds the model's files, loads them, chooses device and form of the weights, and puts the parts together. Everything
that cannot work is a ConfigError here, before anybody is served. Called by the library and by the engine's process.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from roost.clock import SystemClock
from roost.config import EngineConfig, ModelConfig, Resolved, resolve
from roost.errors import ConfigError
from roost.exec.executor import TorchExecutor
from roost.models.decoder import Decoder
from roost.models.model import Model
from roost.progress import Progress, silent
from roost.sched.engine import Engine
from roost.text.language import Language
from roost.text.stream import StopFinder
from roost.weights.load import load_model, open_source
from roost.weights.pull import find_model

WEIGHTS = ("auto", "int8", "fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Running:
    """An engine and what belongs to it."""

    name: str
    engine: Engine
    executor: TorchExecutor
    language: Language
    resolved: Resolved
    settings: dict[str, object]  # resolved choices, for people
    load_s: float


def start(config: EngineConfig, progress: Progress = silent) -> Running:
    """Load the model and build the engine over it."""
    began = time.monotonic()
    name, path = find_model(config.model.model, progress)
    device = _device(config.model)
    weights = _weights(config.model, device)
    if config.model.threads is not None:
        if config.model.threads < 1:
            raise ConfigError(f"--threads must be at least 1, got {config.model.threads}")
        torch.set_num_threads(config.model.threads)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as loader:
        # On a thread that ends: one that has computed keeps a team of OpenMP threads, and beside the team of the thread
        # that runs the steps these make every parallel operation wait (measured: half the rate).
        language, model = loader.submit(_load, path, weights, device, progress).result()
    if language.tokenizer.vocab_size > model.traits.vocab_size:
        raise ConfigError(
            f"--model: the tokenizer has {language.tokenizer.vocab_size} tokens, the model {model.traits.vocab_size}"
        )
    resolved = resolve(config, model.traits)
    executor = TorchExecutor(model, resolved, device)
    engine = Engine(
        resolved,
        executor,
        SystemClock(),
        new_finder=lambda stops, in_special: StopFinder(language.tokenizer, stops, skip_special=not in_special),
    )
    return Running(
        name=name,
        engine=engine,
        executor=executor,
        language=language,
        resolved=resolved,
        settings=_settings(config, resolved, model, weights, device),
        load_s=time.monotonic() - began,
    )


def _load(path: Path, weights: str, device: torch.device, progress: Progress) -> tuple[Language, Decoder]:
    source = open_source(path, progress)
    return source.language(), load_model(source, weights=weights, device=device)


def _device(config: ModelConfig) -> torch.device:
    if config.device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, got {config.device}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_cuda = accelerator is not None and accelerator.type == "cuda"
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: this machine has no CUDA device; use cpu")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _weights(config: ModelConfig, device: torch.device) -> str:
    """The form of the weights: int8 pays on a CPU, where a token is bound by the bytes of the weights."""
    if config.weights not in WEIGHTS:
        raise ConfigError(f"--weights must be one of {', '.join(WEIGHTS)}, got {config.weights}")
    if config.weights == "int8" and device.type != "cpu":
        raise ConfigError("--weights int8 is for the CPU; use bf16 or fp32 on this device")
    if config.weights != "auto":
        return config.weights
    return "int8" if device.type == "cpu" else "bf16"


def _settings(
    config: EngineConfig, resolved: Resolved, model: Model, weights: str, device: torch.device
) -> dict[str, object]:
    """What was chosen, for people to read."""
    return {
        **{key: value for key, value in asdict(config.model).items() if value is not None},
        **asdict(resolved.sched),
        "weights": weights,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "page_size": resolved.page_size,
        "pool_tokens": [book.num_pages * resolved.page_size for book in resolved.books],
        "windows": [book.window for book in resolved.books],
        "strict_memory": resolved.memory.strict_memory,
        "context": resolved.context,
        "num_layers": len(model.kv.windows),
        "vocab_size": resolved.vocab_size,
    }
