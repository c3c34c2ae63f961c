"""Layers: nobody imports upwards, the control plane knows no torch, one module reads the environment."""

import ast
import sys
from collections.abc import Iterator

from tests.tidy.source import Module, product

# From the bottom up. A module may import from its own layer and from those below it.
LAYERS = (
    (
        "roost",
        "roost.environment",
        "roost.errors",
        "roost.clock",
        "roost.progress",
        "roost.values",
        "roost.lazy_import",
    ),
    ("roost.attention.registry", "roost.sampling.params", "roost.clients", "roost.kv.pages", "roost.text"),
    ("roost.tools",),
    ("roost.spec_shape", "roost.spec_widths", "roost.drafters.registry"),
    ("roost.step", "roost.messages", "roost.config", "roost.graph_sizes"),
    (
        "roost.kv",
        "roost.layers",
        "roost.kernels",
        "roost.numba_kernels",
        "roost.obs",
        "roost.step_times",
        "roost.draft_length",
        "roost.device",
        "roost.grammar",
        "roost.router",
    ),
    ("roost.session", "roost.models"),
    ("roost.sched", "roost.attention", "roost.weights", "roost.front", "roost.sampling"),
    ("roost.drafters",),
    ("roost.forward",),
    ("roost.graphs",),
    ("roost.runner",),
    ("roost.parallel",),
    ("roost.startup", "roost.shown_settings", "roost.terminal"),
    ("roost.library", "roost.server", "roost.train", "roost.parallel.follower"),
    ("roost.cli", "roost.ray", "roost.__main__"),
)
CONTROL_PLANE = (
    "roost.kv",
    "roost.session",
    "roost.sched",
    "roost.step_times",
    "roost.draft_length",
    "roost.sampling.params",
    "roost.clients",
    "roost.values",
    "roost.router",
    "roost.spec_shape",
    "roost.spec_widths",
    "roost.graph_sizes",
    "roost.step",
    "roost.messages",
    "roost.config",
    "roost.attention.registry",
    "roost.drafters.registry",
)
NEEDS_NO_INSTALL = ("torch", "numpy", "safetensors", "roost")  # what the engine may import besides the standard library
ALLOWED_INSIDE = {  # what only some packages may import besides that
    "roost.kernels": ("triton",),
    "roost.numba_kernels": ("numba", "llvmlite"),
    "roost.text": ("tokenizers", "jinja2"),
    "roost.grammar": ("llguidance",),
    "roost.weights.gguf": ("gguf",),
    "roost.terminal": ("rich",),
    "roost.server": ("msgspec", "zmq", "starlette", "uvicorn", "h11", "prometheus_client"),
    "roost.server.tracing": ("opentelemetry",),
    "roost.cli": ("rich", "uvicorn"),
    "roost.ray": ("ray", "msgspec", "starlette"),
}
HOST_ONLY = ("roost.kv", "roost.session", "roost.sched", "roost.step_times", "roost.draft_length", "roost.obs")
DEVICE_SIDE = (
    "roost.attention",
    "roost.device",
    "roost.drafters",
    "roost.forward",
    "roost.graphs",
    "roost.kernels",
    "roost.layers",
    "roost.models",
    "roost.numba_kernels",
    "roost.runner",
    "roost.sampling",
    "roost.weights",
)
BOTH_SIDES = (
    "roost.kv.pages",
    "roost.sampling.params",
)  # plain data: either side may import these


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages if package != "roost") or (
        name == "roost" and "roost" in packages
    )


def _layer(name: str) -> int:
    exact = [level for level, names in enumerate(LAYERS) if name in names]
    inside = [level for level, names in enumerate(LAYERS) if _is_in(name, names)]
    assert exact or inside, f"{name} is in no layer: add it to tests/tidy/test_layers.py"
    return exact[0] if exact else inside[0]


def _roost_imports(module: Module) -> Iterator[str]:
    names = {other.name for other in product()}
    for target, name in module.imports():
        if target.split(".")[0] == "roost":
            yield f"{target}.{name}" if f"{target}.{name}" in names else target


def test_nobody_imports_upwards() -> None:
    upwards = [
        f"{module.place} imports {target}"
        for module in product()
        if module.name != "roost"  # what it offers is loaded when it is asked for; a test of the library sees to that
        for target in _roost_imports(module)
        if _layer(target) > _layer(module.name)
    ]
    assert upwards == []


def test_host_and_device_meet_only_at_the_step() -> None:
    crossing = [
        f"{module.place} imports {target}"
        for module in product()
        for target in _roost_imports(module)
        if target not in BOTH_SIDES
        and (
            (_is_in(module.name, HOST_ONLY) and _is_in(target, DEVICE_SIDE))
            or (_is_in(module.name, DEVICE_SIDE) and _is_in(target, HOST_ONLY))
        )
    ]
    assert crossing == []


def test_the_control_plane_imports_no_torch() -> None:
    guilty = [
        module.place
        for module in product()
        if _is_in(module.name, CONTROL_PLANE) and any(target.split(".")[0] == "torch" for target, _ in module.imports())
    ]
    assert guilty == []


def test_the_engine_needs_no_package_beyond_torch_and_numpy() -> None:
    foreign = [
        f"{module.place} imports {target}"
        for module in product()
        for target, _ in module.imports()
        if target.split(".")[0] not in (*NEEDS_NO_INSTALL, *sys.stdlib_module_names, *_allowed_inside(module))
    ]
    assert foreign == []


def _allowed_inside(module: Module) -> Iterator[str]:
    for prefix, packages in ALLOWED_INSIDE.items():
        if _is_in(module.name, (prefix,)):
            yield from packages


def _mentions(module: Module, *names: str) -> bool:
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) in names for node in ast.walk(module.tree))


def test_only_one_module_knows_the_environment() -> None:
    readers = [m.name for m in product() if _mentions(m, "os.environ", "os.getenv", "os.environb")]
    imported = [m.name for m in product() if any(n in ("environ", "getenv") for t, n in m.imports() if t == "os")]
    assert set(readers + imported) <= {"roost.environment"}


def test_only_the_cuda_device_names_cuda() -> None:
    assert [m.name for m in product() if _mentions(m, "torch.cuda")] in ([], ["roost.device.cuda"])


def test_what_the_library_and_the_server_share_never_waits() -> None:
    ways_to_wait = ("asyncio", "threading", "queue", "time", "select", "socket")
    waiting = [
        f"{module.place} imports {target}"
        for module in product()
        if _is_in(module.name, ("roost.front",))
        for target, _ in module.imports()
        if target.split(".")[0] in ways_to_wait
    ]
    assert waiting == []
