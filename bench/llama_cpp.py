"""llama.cpp as a rival: an environment of its own, and its HTTP server in a process.

The wheel `xllamacpp` holds llama.cpp and its server; it is installed into a virtual environment that is made for it and
kept, never beside Roost. This file is imported by `versus_llama_cpp`, and run by the other environment's Python to
start the server; so it imports nothing but the standard library and, there, the wheel.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENT = "xllamacpp"
_ABOUT = """
import importlib.metadata, json, xllamacpp
print(json.dumps({"version": importlib.metadata.version("xllamacpp"), "system": xllamacpp.get_system_info()}))
"""


def environment(folder: Path) -> dict[str, Any]:
    """Make the environment if it is not there yet; what the wheel in it says of itself."""
    about = _about(folder)
    if about is None:
        print(f"installing {REQUIREMENT} into {folder}", file=sys.stderr, flush=True)
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(_python(folder)), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", REQUIREMENT],
        ):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        about = _about(folder)
    if about is None:
        raise SystemExit(f"{REQUIREMENT} was installed into {folder}, but cannot be imported there")
    return about


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _about(folder: Path) -> dict[str, Any] | None:
    if not _python(folder).exists():
        return None
    done = subprocess.run([str(_python(folder)), "-c", _ABOUT], check=False, capture_output=True, text=True)
    return None if done.returncode else dict(json.loads(done.stdout))


def command(folder: Path, model: Path, *, threads: int, slots: int, context: int) -> list[str]:
    """What starts the server with the environment in a folder: `slots` requests at once, of `context` tokens each."""
    numbers = {"threads": threads, "slots": slots, "context": context}
    flags = [part for name, number in numbers.items() for part in (f"--{name}", str(number))]
    return [str(_python(folder)), str(Path(__file__).resolve()), str(model), *flags]


def serve(argv: list[str]) -> None:
    """Serve until the process is ended. Everything that is not a flag is as llama.cpp has it by default."""
    import xllamacpp  # type: ignore[import-not-found]  # noqa: PLC0415 (only the other environment has it)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for name in ("threads", "slots", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(argv)
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_gpu_layers = 0
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.context  # llama.cpp divides it among its slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(f"ready at {server.listening_address} ", flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(sys.argv[1:])
