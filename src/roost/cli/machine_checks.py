"""Checks of a machine and of what is installed on it, for `roost doctor`.

Each fills a section of the report. They download nothing and start no engine; what they import may be missing or
broken, so it is imported when it is looked at. Called by `doctor`.
"""

import hashlib
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import roost
from roost.attention.registry import NUMBA
from roost.cli.check_report import ReportSection
from roost.environment import cache_folder, shown_variables, triton_folder
from roost.errors import first_line
from roost.server.config import ServerConfig

_EXTRAS = {  # what is lost without the packages of each
    "server": "roost serve needs them",
    "grammar": "output cannot be held to a schema without them",
    "otel": "requests cannot be traced without them",
    "ray": "there are no replicas on Ray Serve without them",
}
_ALWAYS = ("torch", "numpy", "llvmlite", "triton")  # shown where the list of dependencies cannot be read, too
_DRIVER = Path("/proc/driver/nvidia/version")
_COMPILERS = ("cc", "gcc", "clang")
_FEATURES = re.compile(r"avx2|fma|f16c|avx512\w*|avx_vnni|amx_\w+|asimddp|i8mm|bf16|sve\w*")
_BLOCK_BYTES = 1 << 20


def versions(section: ReportSection) -> None:
    """Roost's version, Python's, and those of all packages that it uses; which are missing."""
    facts = section.facts
    facts["roost"], facts["python"] = roost.__version__, platform.python_version()
    facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    missing: dict[str, list[str]] = {}
    for name, extra in _packages():
        facts[name] = _version(name)
        if facts[name] is None:
            missing.setdefault(extra, []).append(name)
            facts[name] = "missing"
    if absent := missing.pop("", []):
        section.broken(f"packages are missing: {', '.join(absent)}", f"pip install {' '.join(absent)}")
    for extra, names in missing.items():
        section.notes.append(f"not installed: {', '.join(names)}; {_EXTRAS[extra]}: pip install {' '.join(names)}")


def _packages() -> Iterator[tuple[str, str]]:
    """The packages that Roost uses, and the extra that asks for each; '' for what always must be there."""
    try:
        asked = requires("roost") or []
    except PackageNotFoundError:  # run from its sources
        asked = ["torch", "numpy"]
    listed = set()
    for each in asked:
        name = re.split(r"[^\w.-]", each)[0]
        found = re.search(r"extra == ['\"](\w+)['\"]", each)
        extra = found[1] if found else ""
        if name != "roost" and (not extra or extra in _EXTRAS):
            listed.add(name)
            yield name, extra
    yield from ((name, "optional") for name in _ALWAYS if name not in listed and _version(name) is not None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def variables(section: ReportSection) -> None:
    """Environment variables that change how Roost runs."""
    section.facts.update(shown_variables() or {"set": "none of those that Roost knows"})


def processor(section: ReportSection) -> None:
    """The CPU, what of it the kernels use, and how many threads there can be."""
    facts, said = section.facts, _cpu_info()
    facts["name"] = said.get("model name", platform.processor() or platform.machine())
    words = (said.get("flags") or said.get("Features") or "").split()
    facts["features"] = [word for word in words if _FEATURES.fullmatch(word)]
    facts["cores"] = os.cpu_count()
    facts["cores_allowed"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        facts["cores_of_quota"] = int(quota[0]) / int(quota[1])
    facts["torch_threads"] = import_module("torch").get_num_threads()
    if "cores_of_quota" in facts and facts["torch_threads"] > facts["cores_of_quota"]:
        section.notes.append("more threads than this container's share of the CPU: give --threads")
    obstacle = NUMBA.obstacle()
    if obstacle is None:
        simd = import_module("roost.numba_kernels.simd")
        facts["products_by"] = simd.DOT
        facts["wide_registers"] = simd.HAS_WIDE_REGISTERS
    else:
        section.notes.append(f"on the CPU torch computes, which is slower: --backend numba {obstacle}")


def _cpu_info() -> dict[str, str]:
    """What the kernel says of the first core; nothing where there is no such file."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.is_file() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _cgroup(name: str) -> str:
    """A limit of the container that this runs in; '' where there is none."""
    path = Path("/sys/fs/cgroup") / name
    return path.read_text().strip() if path.is_file() else ""


def memory(section: ReportSection) -> None:
    """How much memory there is, and how much of it is free."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    section.facts["total_bytes"], section.facts["free_bytes"] = sizes.get("MemTotal"), sizes.get("MemAvailable")
    limit = _cgroup("memory.max")
    if limit.isdigit():
        section.facts["container_limit_bytes"] = int(limit)


def gpus(section: ReportSection) -> None:
    """GPUs that torch can use."""
    torch = import_module("torch")
    from roost.device.open import capability_of, memory_of, name_of  # noqa: PLC0415 (needs torch)

    section.facts["torch_built_for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found is not None and found.type == "cuda" else 0
    section.facts["devices"] = count
    for number in range(count):
        device = torch.device("cuda", number)
        free, total = memory_of(device) or (0, 0)
        major, minor = capability_of(device) or (0, 0)
        section.facts[f"device_{number}"] = f"{name_of(device)}, compute capability {major}.{minor}"
        section.facts[f"device_{number}_memory_bytes"], section.facts[f"device_{number}_free_bytes"] = total, free
    if count and not any(map(shutil.which, _COMPILERS)):
        section.notes.append(f"Triton needs a C compiler, and none of {', '.join(_COMPILERS)} is on the path")
    driver = _DRIVER.read_text() if _DRIVER.is_file() else ""
    section.facts["nvidia_driver"] = next(iter(re.findall(r"\d+\.\d[.\d]*", driver)), "none")
    if count == 0 and driver:
        why = "torch is built for CPUs alone" if torch.version.cuda is None else "torch finds no device"
        section.notes.append(
            f"an NVIDIA driver is loaded, but {why}: install a build of torch for CUDA, or look at "
            "CUDA_VISIBLE_DEVICES and at what the container is given"
        )


def models(section: ReportSection) -> None:
    """The folder of downloaded models, and whether the default one is whole."""
    from roost.weights.pull import SHA256, default_file, find_head  # noqa: PLC0415 (rarely needed)

    folder, path = cache_folder(), default_file()
    section.facts["folder"] = folder
    _check_writable(section, folder, "downloaded models are kept there: make it writable, or set $ROOST_CACHE")
    section.facts["files_bytes"] = {each.name: each.stat().st_size for each in sorted(folder.glob("*.gguf"))}
    place = next(each for each in (folder, *folder.parents) if each.exists())
    section.facts["disk_free_bytes"] = shutil.disk_usage(place).free
    if not path.is_file():
        section.notes.append("the default model is not there yet: roost pull fetches it")
    elif _digest(path) != SHA256:
        section.broken(f"{path.name} is not the file that was published", f"remove {path}, then: roost pull")
    section.facts["draft_head"] = "installed" if find_head("default") else "missing"
    if find_head("default") is None:
        section.broken("the default model's draft head is not in the installed package", "install Roost again")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def kernels(section: ReportSection) -> None:
    """Where compiled kernels are kept, and whether they can be."""
    try:
        folder = import_module("roost.numba_kernels.support").compiled_folder()
    except Exception as error:  # noqa: BLE001 (a broken installation raises anything)
        section.facts["numba"] = "missing"
        section.broken(f"numba cannot be imported: {first_line(error)}", "pip install --force-reinstall numba")
    else:
        section.facts["numba"] = folder
        section.facts["numba_compiled"] = any(folder.rglob("*.nbc"))
        _check_writable(section, folder, "compiled kernels are kept there: make it writable, or set $ROOST_CACHE")
    if _version("triton") is not None:
        section.facts["triton"] = triton_folder()
        _check_writable(
            section, triton_folder(), "Triton keeps kernels there: make it writable, or set $TRITON_CACHE_DIR"
        )


def _check_writable(section: ReportSection, folder: Path, remedy: str) -> None:
    """A folder that cannot be written, or made, is a problem."""
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        section.broken(f"{folder} cannot be written", remedy)


def port(section: ReportSection, config: ServerConfig, *, must_be_free: bool) -> None:
    """Whether a server could listen; where that need not be, one may run already."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            said = f"{config.host}:{config.port} cannot be listened at: {error.strerror or first_line(error)}"
            section.facts[str(config.port)] = "not free"
            remedy = "give roost serve another --port, or end the program that listens there"
            if must_be_free:
                section.broken(said, remedy)
            else:
                section.notes.append(f"{said}; a server may run already, else {remedy}")
        else:
            section.facts[str(config.port)] = "free"
