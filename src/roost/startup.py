"""Start-up: from a configuration to an engine that is ready to run.

Finds and loads the model's files, chooses the device and the precision of the weights, and assembles the engine.
Whatever cannot work is a ConfigError here, before anything is served. Called by the library and the engine's process.
"""

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from roost.attention.registry import AUTO_BACKEND, BACKENDS, TORCH, Backend, choose_backend
from roost.clock import SystemClock
from roost.config.options import AUTO, DEVICES, WEIGHTS, EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import Resolved
from roost.config.speculation import drafter_of, spec_shape
from roost.device.open import capability_of, has_fp8, num_devices
from roost.drafters.registry import ANY_DRAFTER, NO_DRAFTER, WITHOUT_HEAD, has_head, names_of
from roost.errors import ConfigError, first_line
from roost.grammar.build import is_installed
from roost.grammar.compiler import Compiler
from roost.layers.batch_invariance import attention_padding, row_multiple
from roost.layers.group import Group
from roost.layers.linear import FORMS
from roost.layers.ops import Ops
from roost.lazy_import import load_symbol
from roost.models.fields import Fields
from roost.models.model import Head, Model
from roost.models.registry import find_family
from roost.models.shards import check_shards
from roost.obs.trace import Trace
from roost.parallel.executor import GroupExecutor
from roost.parallel.grammars import GroupGrammars
from roost.parallel.identity import checkpoint_of, configuration, versions
from roost.parallel.peers import NO_PEERS, Peers
from roost.parallel.ranks import OnLost
from roost.parallel.start import Rank0, check_tp, with_ranks
from roost.progress import Progress, silent
from roost.runner.executor import TorchExecutor
from roost.runner.pool_sizes import with_pool
from roost.sched.engine import Engine
from roost.sched.request import StartCompiling
from roost.session.journal import SessionJournal
from roost.session.journal_files import open_journal
from roost.shown_settings import shown_settings
from roost.text.language import Language
from roost.text.stream import StopFinder
from roost.weights.draft import (
    check_head,
    check_hooks,
    check_kind,
    check_own_head,
    head_kind,
    load_head,
    load_own_head,
    own_head,
)
from roost.weights.load import load_model, open_source
from roost.weights.pull import find_head, find_model

THREADS_MAX = 1024  # of the model: so many start on any system, and few machines have as many
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Running:
    """A started engine with its executor, tokenizer and configuration."""

    name: str
    engine: Engine
    executor: TorchExecutor | GroupExecutor
    language: Language
    resolved: Resolved
    compiler: Compiler | None  # of grammars; None: llguidance is not installed
    settings: dict[str, object]  # resolved choices, for display
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoices:
    """What is chosen, and checked, before anything large is read."""

    config: EngineConfig  # with its drafter
    name: str  # that the model is served as
    path: Path
    device: torch.device
    backend: Backend

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoint, and that of a draft head."""
        return (self.path, *(() if self.config.spec.draft is None else (Path(self.config.spec.draft),)))

    @property
    def for_followers(self) -> EngineConfig:
        """The configuration with what was chosen: other ranks have no choice."""
        model = replace(self.config.model, model=str(self.path), device=self.device.type, backend=self.backend.name)
        return replace(self.config, model=model)


def choose(config: EngineConfig, progress: Progress = silent) -> EngineChoices:
    """Find the model, downloading it if needed (reported to `progress`), and choose who computes it where."""
    config = _with_drafter(config)
    name, path = find_model(config.model.model, progress)
    device = device_of(config.model)
    backend = backend_of(config, device)
    _check_weights(config.model, device, backend)
    check_device_options(config, device)
    check_capability(config, backend, capability_of(device))
    check_threads(config.model.threads)
    check_tp(config, device, num_devices(device))
    _check_files(config, path)
    config = with_ranks(config, device)
    return EngineChoices(config=config, name=name, path=path, device=device, backend=backend)


def check_threads(threads: int | None) -> None:
    """Refuse a number of CPU threads that cannot be; None: nobody has said one."""
    if threads is not None and not 1 <= threads <= THREADS_MAX:
        raise ConfigError(f"--threads must be in [1, {THREADS_MAX}], got {threads}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Built:
    """What every rank of an engine has: its part of the model, and what runs its steps."""

    loaded: "_Loaded"
    config: EngineConfig  # with the sizes of its pools
    resolved: Resolved
    compiler: Compiler | None  # of grammars; None: llguidance is not installed
    executor: TorchExecutor


def start(
    config: EngineConfig,
    progress: Progress = silent,
    trace: Trace | None = None,
    *,
    on_lost: OnLost | None = None,
    folder: Path | None = None,
) -> Running:
    """Load the model, downloading it if needed (reported to `progress`), and build the engine; `trace` hears of it.

    With several ranks, `on_lost` is told when one is lost, on some thread, and the process is the engine's own: it is
    killed where it hangs. Without it the engine's loop fails when a rank is lost, and the process is left alone.
    Their files are in `folder`, or among the temporary ones.
    """
    began = time.monotonic()
    chosen = choose(config, progress)
    journal = open_journal(chosen.config.session, chosen.name)
    if chosen.config.model.tp == 1:
        try:
            return _running(chosen, build(chosen, NO_PEERS), None, journal, trace, began)
        except BrokenKernels as broken:
            config = _without(chosen, broken)
            return start(config, progress, trace, on_lost=on_lost, folder=folder)
    own_process = None if on_lost is None else os.getpid()
    rank0 = Rank0(chosen.for_followers, chosen.device, num_devices(chosen.device), folder, own_process)
    try:
        rank0.same({**versions(), **checkpoint_of(*chosen.files)})
        rank0.join()
        running = _running(chosen, build(chosen, rank0), rank0, journal, trace, began)
    except BrokenKernels as broken:
        rank0.ranks.close()
        config = _without(chosen, broken)
        return start(config, progress, trace, on_lost=on_lost, folder=folder)
    except BaseException as error:  # Ctrl-C too: the program may go on
        rank0.ranks.close()
        lost = rank0.ranks.lost
        if lost is not None and isinstance(error, Exception) and not isinstance(error, ConfigError):
            raise lost from error  # all else follows from that
        raise
    rank0.ranks.tell_loss(on_lost or running.engine.fail)
    return running


def build(chosen: EngineChoices, peers: Peers) -> Built:
    """Load this rank's part of the model and build what runs its steps; raises BrokenKernels."""
    config, device, backend = chosen.config, chosen.device, chosen.backend
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="load") as loader:
        # On a thread that ends: a thread that has computed keeps its own team of OpenMP threads, and two teams on the
        # same cores slow every parallel operation down (measured: half the rate).
        loading = loader.submit(_load, config, chosen.path, device, backend, peers.group)
        broken = None if backend.prepare is None else loader.submit(load_symbol(backend.prepare)).exception()
        loaded = loading.result()
    if broken is not None:
        raise BrokenKernels(first_line(broken)) from broken
    language, model = loaded.language, loaded.model
    if language.tokenizer.vocab_size > model.traits.vocab_size:
        raise ConfigError(
            f"--model: the tokenizer has {language.tokenizer.vocab_size} tokens, the model {model.traits.vocab_size}"
        )
    config = with_pool(_with_kv(config, loaded, backend), model, loaded.head, device, backend)
    config = replace(config, memory=_smallest(config.memory, peers))
    resolved = resolve(config, model.traits, backend, on_host=device.type == "cpu")
    peers.same(
        configuration(resolved, weights=loaded.weights, layers=model.num_layers, threads=torch.get_num_threads())
    )
    compiler = compiler_of(language, resolved) if is_installed() else None
    with _explain_out_of_memory("KV and CUDA graphs", "--memory-fraction, --pool-tokens, --max-running or --chunk"):
        new_matcher = None if compiler is None else compiler.new_matcher
        executor = TorchExecutor(model, resolved, device, loaded.head, new_matcher)
    return Built(loaded=loaded, config=config, resolved=resolved, compiler=compiler, executor=executor)


def _smallest(memory: MemoryConfig, peers: Peers) -> MemoryConfig:
    """Pools that fit on every rank."""
    pool_tokens, state_pool = peers.smallest((memory.pool_tokens, memory.state_pool))
    return replace(memory, pool_tokens=pool_tokens, state_pool=state_pool)


def _running(
    chosen: EngineChoices,
    built: Built,
    rank0: Rank0 | None,
    journal: SessionJournal | None,
    trace: Trace | None,
    began: float,
) -> Running:
    """The engine over an executor of one rank or of several."""
    loaded, resolved, compiler = built.loaded, built.resolved, built.compiler
    language = loaded.language
    executor: TorchExecutor | GroupExecutor = built.executor
    start_compiling: StartCompiling | None = None if compiler is None else compiler.start
    if rank0 is not None:
        executor = GroupExecutor(built.executor, rank0.group, rank0.ranks)
        if compiler is not None:
            start_compiling = GroupGrammars(compiler.start, rank0.ranks).start
        rank0.begin()
        executor.begin()
    engine = Engine(
        resolved,
        executor,
        SystemClock(),
        trace,
        new_stop_finder=lambda stops, in_special: StopFinder(language.tokenizer, stops, skip_special=not in_special),
        start_compiling=start_compiling,
        journal=journal,
    )
    return Running(
        name=chosen.name,
        engine=engine,
        executor=executor,
        language=language,
        resolved=resolved,
        compiler=compiler,
        settings=shown_settings(
            built.config, resolved, loaded.model, chosen.device, weights=loaded.weights, warnings=loaded.warnings
        ),
        load_s=time.monotonic() - began,
    )


def compiler_of(language: Language, resolved: Resolved) -> Compiler:
    """What compiles grammars for a model's tokenizer."""
    return Compiler(language.tokenizer, resolved.vocab_size)


class BrokenKernels(Exception):
    """The kernels of the backend that was chosen cannot be prepared here."""


def _without(chosen: EngineChoices, broken: BrokenKernels) -> EngineConfig:
    """The configuration with torch in place of a backend whose kernels cannot be prepared, unless it was named."""
    why, config, backend = str(broken), chosen.config, chosen.backend
    if config.model.backend != AUTO_BACKEND:
        raise ConfigError(
            f"--backend {backend.name}: its kernels cannot be compiled here ({why}); use torch"
        ) from broken
    logger.warning("torch computes: the kernels of --backend %s cannot be compiled here (%s)", backend.name, why)
    return replace(config, model=replace(config.model, backend=TORCH.name))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Loaded:
    """What was loaded from files."""

    language: Language
    model: Model
    head: Head | None
    weights: str  # the form that they are kept in
    warnings: tuple[str, ...]


def _load(config: EngineConfig, path: Path, device: torch.device, backend: Backend, group: Group) -> _Loaded:
    """Read this rank's part of the model, and of the draft head if one is asked for."""
    source, spec, head = open_source(path), config.spec, None
    kept = forms_of(device, backend, config.model.tp)
    weights = choose_weights(config.model.weights, source.form, kept, stored=source.stored_form)
    folder, ids, own = Path(spec.draft or ""), spec.draft_layer_ids, _own_drafter(spec)
    with _explain_out_of_memory("the weights", "the precision (--weights bf16) or the size of the model"):
        model = load_model(source, weights=weights, device=device, ops=replace(ops_of(backend), group=group))
        if own is not None:
            head = load_own_head(source, own, model, weights=weights, device=device)
        if spec.draft is not None:
            head = load_head(folder, _kind(spec), model, layer_ids=ids, weights=weights, device=device)
    warnings = (
        *source.warnings(),
        *_dequantised(config.model.weights, weights, source.form),
        *_inexact(model, weights, device, backend),  # computes, as loading does
        *_slower(config, device, backend),
    )
    return _Loaded(language=source.language(), model=model, head=head, weights=weights, warnings=warnings)


def _check_files(config: EngineConfig, path: Path) -> None:
    """Refuse a model that the ranks cannot share, and a draft head that does not fit, by their configs alone."""
    source, spec, ranks = open_source(path), config.spec, config.model.tp
    family, own = find_family(source.config()), _own_drafter(spec)
    target = family.read_config(Fields(source.config()))
    check_shards(target, ranks)
    if own is not None:
        check_own_head(source, own, topk=spec_shape(spec).topk, ranks=ranks)
    if spec.draft is not None:
        check_hooks(family)
        ids, topk = spec.draft_layer_ids, spec_shape(spec).topk
        check_head(Path(spec.draft), _kind(spec), target, layer_ids=ids, topk=topk, ranks=ranks)


def _own_drafter(spec: SpecConfig) -> str | None:
    """Whose head is read of the model's own checkpoint, by the name of its drafter; None: nobody's."""
    drafter = drafter_of(spec)
    return drafter.name if drafter is not None and drafter.head is not None and drafter.head.is_own else None


def _with_drafter(config: EngineConfig) -> EngineConfig:
    """The configuration with its drafter resolved and checked, before anything large is read."""
    spec, own = config.spec, find_head(config.model.model)
    if spec.draft is None and own is not None and _may_be(spec.spec, own):
        spec = replace(spec, draft=str(own))
    if spec.spec in (None, ANY_DRAFTER):
        otherwise = NO_DRAFTER if spec.spec is None else WITHOUT_HEAD.name
        found = _own_kind(config.model.model) if spec.draft is None else head_kind(Path(spec.draft))
        spec = replace(spec, spec=found or otherwise)
    spec_shape(spec)
    if spec.draft is not None:
        check_kind(Path(spec.draft), _kind(spec))
    return replace(config, spec=spec)


def _own_kind(model: str) -> str | None:
    """Whose head is within a model's own checkpoint, by the name of its drafter; heads of files are found elsewhere."""
    path = Path(model).expanduser()
    return own_head(open_source(path)) if path.is_dir() else None


def _may_be(name: str | None, head: Path) -> bool:
    """Whether a --spec leaves the choice of a head open, or is that of this one."""
    return name in (None, ANY_DRAFTER) or (name in names_of(has_head) and name == head_kind(head))


def _kind(spec: SpecConfig) -> str:
    """Whose head --draft names, by the name of its drafter."""
    kind = drafter_of(spec)
    assert kind is not None, spec
    return kind.name


def device_of(config: ModelConfig) -> torch.device:
    """The device of the configuration; raises ConfigError if the machine does not have it."""
    if config.device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, got {config.device}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_cuda = accelerator is not None and accelerator.type == "cuda"
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: this machine has no CUDA device; use cpu")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def backend_of(config: EngineConfig, device: torch.device, backends: tuple[Backend, ...] = BACKENDS) -> Backend:
    """The attention backend that is asked for, if it runs on the device."""
    weights, kv_cache_dtype = config.model.weights, config.memory.kv_cache_dtype
    return choose_backend(config.model.backend, device.type, backends, weights=weights, kv_cache_dtype=kv_cache_dtype)


def check_device_options(config: EngineConfig, device: torch.device) -> None:
    """Refuse options of CUDA graphs and memory that the device does not have, or that contradict each other."""
    on_gpu = device.type == "cuda"
    if config.sched.graphs and not on_gpu:
        raise ConfigError("--graphs is for CUDA devices; use --no-graphs or leave it out")
    fraction = config.memory.memory_fraction
    if fraction is not None and not on_gpu:
        raise ConfigError("--memory-fraction is for CUDA devices; on a CPU give --pool-tokens")
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(f"--memory-fraction must be above 0 and at most 1, got {fraction}")
    if fraction is not None and config.memory.pool_tokens is not None:
        raise ConfigError("--memory-fraction and --pool-tokens both say how large the pool is; give one")


def check_capability(config: EngineConfig, backend: Backend, capability: tuple[int, int] | None) -> None:
    """Refuse a form of KV that a CUDA device of this compute capability does not have; None: not a CUDA device."""
    least, allowed = backend.fp8_capability, [each for each in backend.kv_cache_dtypes if each != "fp8"]
    if config.memory.kv_cache_dtype == "fp8" and least is not None and capability is not None and capability < least:
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs a device of compute capability {least[0]}.{least[1]} or more on the "
            f"{backend.name} backend, and this one has {capability[0]}.{capability[1]}; use {' or '.join(allowed)}"
        )


def ops_of(backend: Backend) -> Ops:
    """The operations that go with a backend."""
    ops: Ops = load_symbol(backend.ops)
    return ops


@contextmanager
def _explain_out_of_memory(what: str, lower: str) -> Iterator[None]:
    """Turn the device's out-of-memory errors into a ConfigError that says what to lower."""
    try:
        yield
    except RuntimeError as error:  # torch, the driver and libraries share no other type for it
        text = str(error).splitlines()[0]
        if "out of memory" not in text.lower() and "ALLOC_FAILED" not in text:
            raise
        raise ConfigError(f"the device has too little memory for {what}: lower {lower} ({text})") from error


def _with_kv(config: EngineConfig, loaded: _Loaded, backend: Backend) -> EngineConfig:
    """The configuration with the type of KV that the backend declares for these weights, where that is not told."""
    kv_cache_dtype = backend.kv_cache_dtype(config.memory.kv_cache_dtype, loaded.weights)
    return replace(config, memory=replace(config.memory, kv_cache_dtype=kv_cache_dtype))


def _check_weights(config: ModelConfig, device: torch.device, backend: Backend) -> None:
    """Refuse a form of weights that the device does not have, before any file is read."""
    if config.weights not in WEIGHTS:
        raise ConfigError(f"--weights must be one of {', '.join(WEIGHTS)}, got {config.weights}")
    kept = forms_of(device, backend, config.tp)
    if config.weights not in (AUTO, *kept):
        others = forms_of(device, TORCH) if config.backend == AUTO_BACKEND else ()
        either = _either(tuple(dict.fromkeys((*kept, *others))))
        raise ConfigError(f"--weights {config.weights} does not run on this device; {either} do")


def forms_of(device: torch.device, backend: Backend, ranks: int = 1) -> tuple[str, ...]:
    """The forms of weights that a device computes with, the best first; ranks on a CPU err with GGUF blocks."""
    if device.type == "cpu":
        return tuple(each for each in backend.weights or ("int8", "fp32", "bf16") if ranks == 1 or each != "gguf")
    return ("bf16", "fp32", *(("fp8",) if has_fp8(device) else ()), "int4", "gguf")


def choose_weights(asked: str, found: str | None, kept: tuple[str, ...], *, stored: str | None = None) -> str:
    """The form to keep weights in: `found` is that of a quantised checkpoint, `stored` that of a GGUF file's blocks.

    `kept` are the forms that the device computes with, the best first. Unless told, a quantised checkpoint stays as it
    is where the device computes with its form, and is dequantised where it does not. Other weights are bf16 on a GPU,
    where blocks of a GGUF file are kept only when asked for: the default model is so small that they make it slower.
    On a CPU, where decoding is bound by reading weights, blocks are kept, and other weights are int8.
    """
    if asked == AUTO:
        best = next(each for each in kept if each == stored or not FORMS[each].is_stored)
        return found if found in kept else best
    plain = tuple(form for form in kept if FORMS[form].quantise is None and not FORMS[form].is_stored)
    if FORMS[asked].is_stored and asked != stored:
        raise ConfigError(f"--weights {asked}: the checkpoint is not stored so; use {_either(plain)}")
    if found is not None and asked != found and FORMS[asked].quantise is not None:
        allowed = (*plain, found) if found in kept else plain
        raise ConfigError(f"--weights {asked}: the checkpoint's weights are {found} already; use {_either(allowed)}")
    return asked


def _either(forms: tuple[str, ...]) -> str:
    return ", ".join((AUTO, *forms))


def _dequantised(asked: str, weights: str, found: str | None) -> tuple[str, ...]:
    """A warning where a quantised checkpoint is not kept as it is, and nobody asked for that."""
    if found is None or weights == found or asked != AUTO:
        return ()
    return (f"this device does not compute with {found} weights: the checkpoint is dequantised and kept as {weights}",)


def _inexact(model: Model, weights: str, device: torch.device, backend: Backend) -> tuple[str, ...]:
    """A warning where results depend on the batch a token runs in; on a CPU they should not, bit for bit."""
    if device.type != "cpu" or weights == "bf16":
        return ()
    rows = row_multiple(torch.get_num_threads()) if weights == "fp32" else 1  # products of whole numbers are exact
    is_exact = backend is not TORCH or all(attention_padding(kv.head_dim).is_exact for kv in model.kv if kv.has_values)
    if is_exact and rows is not None:
        return ()
    return (
        "this machine's matrix products depend on their shapes: a seed may give another text beside other requests",
    )


def _slower(config: EngineConfig, device: torch.device, backend: Backend) -> tuple[str, ...]:
    """A warning where a backend that would be faster cannot run, and nobody asked for another one."""
    if config.model.backend != AUTO_BACKEND:
        return ()
    better = [each for each in BACKENDS if device.type in each.default_for and each is not backend]
    return tuple(f"{backend.name} computes: --backend {each.name} {why}" for each in better if (why := each.obstacle()))
