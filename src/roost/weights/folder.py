"""A Hugging Face folder: config.json, and model.safetensors as one file or in shards.

Headers are read and checked at once; each tensor is read when it is asked for, so that peak memory is near one copy.
Errors say what is wrong with the folder. Reads no pickle files. Called by `load`; `quantised_folder` reads
quantised tensors through it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from roost.errors import ConfigError
from roost.models.parts import Shape, check_shape, cut
from roost.text.language import Language, make_template
from roost.text.tokenizer import Tokenizer
from roost.weights.header import Dtypes, Header, floats, read_header
from roost.weights.source import Source

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


class Folder(Source):
    """The tensors of a folder by name, of the types that are allowed; one is read each time it is looked up."""

    def __init__(self, folder: Path, *, allowed: Dtypes = floats) -> None:
        self._folder = folder
        self._config = read_config(folder)
        headers = _headers(folder, allowed)
        self._files = {name: header.path for header in headers for name in header.num_bytes}
        self._open: dict[Path, safe_open] = {}

    def __getitem__(self, name: str) -> Tensor:
        with self._opened(name) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def part(self, name: str, shape: Shape) -> Tensor:
        """What a shape says of a tensor; nothing else of it is read."""
        with self._opened(name) as file:
            stored = file.get_slice(name)
            check_shape(name, stored.get_shape(), shape)
            return cut(stored, shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        with self._opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def __contains__(self, name: object) -> bool:
        return name in self._files  # a mapping would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        return self._config

    def language(self) -> Language:
        """Its tokenizer and chat template; the template may have a file of its own."""
        tokenizer = Tokenizer.from_folder(self._folder)
        alone = self._folder / TEMPLATE
        if alone.is_file():
            return Language(tokenizer=tokenizer, template=make_template(alone.read_text(encoding="utf-8"), tokenizer))
        settings = _json(self._folder / SETTINGS) if (self._folder / SETTINGS).is_file() else {}
        return Language(tokenizer=tokenizer, template=make_template(settings.get("chat_template"), tokenizer))

    @contextmanager
    def _opened(self, name: str) -> Iterator[safe_open]:
        """The file of a tensor; errors of reading it name both."""
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            yield self._open[path]
        except SafetensorError as error:
            raise ConfigError(f"{path}: {name} cannot be read: {error}") from error


def read_config(folder: Path) -> dict[str, object]:
    """The contents of a folder's config.json."""
    if not folder.is_dir():
        raise ConfigError(f"--model: there is no folder {folder}")
    return _json(folder / CONFIG)


def _headers(folder: Path, allowed: Dtypes) -> list[Header]:
    if (folder / SINGLE_FILE).is_file():
        return [read_header(folder / SINGLE_FILE, allowed)]
    if (folder / INDEX).is_file():
        return _shards(folder, allowed)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        raise ConfigError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}, only {', '.join(others)}")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigError(
            f"{folder} has no {SINGLE_FILE}, only pickle files, which can run code and are not read; convert it"
        )
    raise ConfigError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX}")


def _shards(folder: Path, allowed: Dtypes) -> list[Header]:
    """Headers of all shards; each must hold just what the index says."""
    places = _json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(f"{folder / INDEX} has no weight_map of tensors and their files")
    headers = []
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            raise ConfigError(f"{folder / INDEX} names {file}, which is not in the folder")
        if not (folder / file).is_file():
            raise ConfigError(f"{folder / INDEX} names {file}, which is missing")
        header = read_header(folder / file, allowed)
        expected = {name for name, place in places.items() if place == file}
        if expected != header.num_bytes.keys():
            name = min(expected ^ header.num_bytes.keys())
            missing = (
                f"lacks {name}, which the index puts there" if name in expected else f"has {name}, unlike the index"
            )
            raise ConfigError(f"{header.path} {missing}")
        headers.append(header)
    return headers


def _json(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}")
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return values
