"""Attention backends: what each declares that it can do, and where its code is.

Plain declarations, no torch and no kernels; `config.resolve` turns them into a choice or an error. A new backend is one
file that implements `attention.protocol.Attention`, and one entry here. Its module is imported when it is chosen.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from roost.errors import ConfigError
from roost.lazy_import import load_symbol

AUTO_BACKEND = "auto"  # of --backend: the default of the device
AUTO_KV = "auto"  # of --kv-cache-dtype: as computed, unless the backend declares another type for the weights
KV_CACHE_DTYPES = (AUTO_KV, "fp32", "fp16", "fp8", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What one attention backend can do, and what it needs."""

    name: str
    factory: str  # "module:name" of a callable (device) -> Attention
    ops: str  # "module:name" of the `Ops` that models run with beside it
    devices: tuple[str, ...]  # types of device, as torch names them, that it runs on
    default_for: tuple[str, ...]  # those whose default it is
    package: str | None = None  # what must be installed besides torch
    why_not: str | None = None  # "module:name" of a callable () -> why it cannot run on this machine, or None
    prepare: str | None = None  # "module:name" of a callable () that gets its kernels ready, while the model loads
    weights: tuple[str, ...] | None = None  # forms of weights that it computes with, of --weights; None: any
    graphs: bool  # its steps can be captured as CUDA graphs
    trees: bool  # reads trees of drafts, a node its ancestors alone, and draft branches, each at slots of its own
    windows: bool  # reads layers with a sliding window
    sinks: bool = False  # reads heads with attention sinks
    kv_cache_dtypes: tuple[str, ...] = (AUTO_KV,)  # forms of KV that it writes and reads, of --kv-cache-dtype
    auto_kv: tuple[tuple[str, str], ...] = ()  # (--weights, what "auto" is beside them), where not as computed
    fp8_capability: tuple[int, int] | None = None  # compute capability of CUDA devices that it needs for fp8
    needs_host_lengths: bool  # wants the rows' lengths on the host before a step
    copied_max: int | None = None  # slots of a round that it moves at once; None: any number
    tile_len_max: int  # tokens of a row that are one tile of its work, at most; a power of two

    def __post_init__(self) -> None:
        assert set(self.default_for) <= set(self.devices), self
        assert {AUTO_KV, *dict(self.auto_kv).values()} <= set(self.kv_cache_dtypes) <= set(KV_CACHE_DTYPES), self
        assert self.tile_len_max > 0 and not self.tile_len_max & (self.tile_len_max - 1), self

    def obstacle(self) -> str | None:
        """Why it cannot run on this machine; None: it can."""
        if self.package is not None and find_spec(self.package) is None:
            return f"needs the package {self.package}"
        reason: str | None = None if self.why_not is None else load_symbol(self.why_not)()
        return reason

    def takes(self, weights: str) -> bool:
        """Whether it computes with weights of that form; "auto" is a form of its choice."""
        return weights == "auto" or self.weights is None or weights in self.weights

    def kv_cache_dtype(self, asked: str, weights: str) -> str:
        """The form of KV beside weights of a form, by what is asked for; "auto" that remains is as computed."""
        return dict(self.auto_kv).get(weights, asked) if asked == AUTO_KV else asked


TORCH = Backend(
    name="torch",
    factory="roost.attention.torch_backend:TorchAttention",
    ops="roost.layers.ops:TORCH_OPS",
    devices=("cpu", "cuda"),
    default_for=(),
    graphs=False,
    trees=True,
    windows=True,
    sinks=True,
    kv_cache_dtypes=(AUTO_KV, "fp8", "int8"),
    needs_host_lengths=True,
    tile_len_max=16,
)

TRITON = Backend(
    name="triton",
    factory="roost.attention.triton_backend:TritonAttention",
    ops="roost.kernels.ops:TRITON_OPS",
    devices=("cuda",),
    default_for=("cuda",),
    package="triton",
    graphs=True,
    trees=True,
    windows=True,
    sinks=True,
    kv_cache_dtypes=(AUTO_KV, "fp8", "int8"),
    fp8_capability=(8, 9),
    needs_host_lengths=False,
    copied_max=1024,
    tile_len_max=32,
)

NUMBA = Backend(
    name="numba",
    factory="roost.attention.numba_backend:NumbaAttention",
    ops="roost.numba_kernels.ops:NUMBA_OPS",
    devices=("cpu",),
    default_for=("cpu",),
    package="numba",
    why_not="roost.numba_kernels.support:why_not",
    prepare="roost.numba_kernels.execution:prepare",
    weights=("gguf", "int8", "fp32"),
    graphs=False,
    trees=True,
    windows=True,
    sinks=True,
    kv_cache_dtypes=(AUTO_KV, "fp32", "fp16", "int8"),
    auto_kv=(("gguf", "int8"), ("int8", "int8")),  # beside fp32 weights, which are exact, KV is as computed
    needs_host_lengths=True,
    tile_len_max=16,
)

BACKENDS = (TORCH, TRITON, NUMBA)


def choose_backend(
    name: str,
    device_type: str,
    backends: tuple[Backend, ...] = BACKENDS,
    *,
    weights: str = "auto",
    kv_cache_dtype: str = AUTO_KV,
) -> Backend:
    """The backend of a name, or for "auto" the best for device, weights and KV; what cannot run is refused."""
    named = {each.name: each for each in backends}
    if name != AUTO_BACKEND and name not in named:
        raise ConfigError(f"--backend must be one of {', '.join((AUTO_BACKEND, *named))}, got {name}")
    usable = [each for each in backends if device_type in each.devices and each.obstacle() is None]
    if name == AUTO_BACKEND:
        able = [each for each in usable if each.takes(weights) and kv_cache_dtype in each.kv_cache_dtypes] or usable
        if not able:
            raise ConfigError(f"--backend: none of {', '.join(named)} runs on a device of type {device_type}")
        return next((each for each in able if device_type in each.default_for), able[0])
    chosen, allowed = named[name], ", ".join((AUTO_BACKEND, *(each.name for each in usable)))
    if device_type not in chosen.devices:
        raise ConfigError(
            f"--backend {name} runs on {' or '.join(chosen.devices)}, and the device is {device_type}; "
            f"allowed here: {allowed}"
        )
    if (reason := chosen.obstacle()) is not None:
        raise ConfigError(f"--backend {name} {reason}; allowed here: {allowed}")
    if not chosen.takes(weights):
        forms = ", ".join((AUTO_BACKEND, *(chosen.weights or ())))
        raise ConfigError(f"--backend {name} does not compute with --weights {weights}; it does with {forms}")
    return chosen
