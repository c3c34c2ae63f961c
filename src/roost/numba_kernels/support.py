"""Whether this machine can run the kernels, and where they are kept once they are compiled.

Never raises: whoever asks is told in one line what is in the way. Called when a backend is chosen.
"""

import hashlib
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from roost.environment import cache_folder
from roost.errors import first_line


def why_not() -> str | None:
    """Why the kernels cannot run here; None: they can."""
    try:
        simd = import_module("roost.numba_kernels.simd")
    except Exception as error:  # noqa: BLE001 (a broken installation raises anything)
        return f"needs the package numba, which cannot be imported here ({first_line(error)})"
    if simd.DOT is None:
        return "needs a CPU with AVX2, FMA and F16C, or with NEON's dot product"
    folder = compiled_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"keeps compiled kernels in {folder}, which cannot be written ({first_line(error)})"
    return None


def discard_compiled() -> None:
    """Remove compiled kernels: the next start compiles again."""
    shutil.rmtree(compiled_folder(), ignore_errors=True)


def compiled_folder() -> Path:
    """Where compiled kernels are kept: by their sources, numba's version and Python's; numba itself adds the CPU."""
    numba = import_module("numba")
    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return cache_folder() / "numba" / digest.hexdigest()[:16]
