"""From a folder to a draft head: whose drafter's it is, whether it fits its target, and which of its layers it reads.

What does not fit is refused with the flag and the numbers, before any tensor is read. What differs between kinds of
heads is in their `HeadFamily`, which the registry of drafters names. Never loads a target. Called at start-up: the
checks first, the head itself once the target is loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roost.drafters.registry import DRAFTERS, LAYER_ID_SHIFTS, DraftHead, find_drafter, head_architectures
from roost.errors import ConfigError, InvariantError
from roost.layers.linear import activation_dtype
from roost.lazy_import import load_symbol
from roost.models.eagle import LAYER_IDS, HeadConfig
from roost.models.family import Family, HeadFamily, HeadSizes, ModelSizes
from roost.models.fields import Fields
from roost.models.model import Head, Model
from roost.models.parts import Shape
from roost.models.shards import check_shards, check_vocabulary
from roost.models.tensors import PartialState
from roost.weights import int8_lm_head
from roost.weights.folder import CONFIG, Folder, read_config
from roost.weights.header import FLOATS, INTEGERS
from roost.weights.source import Source

INTEGER_TENSORS = (
    "d2t",
    "t2d",
    "model.d2t",
    "model.t2d",
)  # from ids of the head to the target's, and which of those it has


def head_kind(path: Path) -> str:
    """The --spec of the head in a folder."""
    names, known = _config(path).get("architectures"), head_architectures()
    name = str(names[0]) if isinstance(names, list) and names else "a model without architectures"
    if name not in known:
        raise ConfigError(f"--draft {path}: {name} is not a draft head; known are {', '.join(known)}")
    return known[name].name


def check_hooks(family: Family[Any]) -> None:
    """Refuse a target whose family does not hand out hidden states."""
    if not family.draft_hooks:
        raise ConfigError("--draft: the model's family has no hooks for draft heads; use another --model or --spec")


def check_kind(path: Path, kind: str) -> None:
    """Refuse a folder without a head of this kind."""
    found = head_kind(path)
    if found != kind:
        raise ConfigError(f"--spec {kind}: the head at --draft {path} is of the kind {found}")


def check_head(path: Path, kind: str, target: ModelSizes, *, layer_ids: str | None, topk: int, ranks: int = 1) -> None:
    """Refuse a head whose config does not fit the target's, or the ranks, before any tensor is read."""
    head = _declared(kind)
    with _errors_name_draft(path):
        config = _family(head).read_config(_fields(_config(path)))
        _check_sizes(config, target.hidden_size, target.vocab_size)
        _aux_layers(config, head, layer_ids, target.num_layers)
        _check_shards(config, ranks)
    if topk > config.num_tokens:
        raise ConfigError(f"--spec-topk must be at most {config.num_tokens}, the head's vocabulary, got {topk}")


def own_head(source: Source) -> str | None:
    """The --spec of the head within a model's own checkpoint, if there is one."""
    for kind in DRAFTERS:
        if kind.head is not None and kind.head.is_own:
            is_within = _family(kind.head).is_within
            assert is_within is not None, kind
            if is_within(Fields(source.config()), source):
                return kind.name
    return None


def check_own_head(source: Source, kind: str, *, topk: int, ranks: int = 1) -> None:
    """Refuse a checkpoint without a head of this kind, or with one that does not fit the ranks, by its config."""
    with _errors_name_spec(kind):
        config = _family(_declared(kind)).read_config(Fields(source.config()))
        if own_head(source) != kind:
            raise ConfigError("the model's checkpoint has no tensors of such a head")
        _check_shards(config, ranks)
    if topk > config.num_tokens:
        raise ConfigError(f"--spec-topk must be at most {config.num_tokens}, the head's vocabulary, got {topk}")


def load_own_head(source: Source, kind: str, model: Model, *, weights: str, device: torch.device) -> Head:
    """The head within the checkpoint of its target."""
    family = _family(_declared(kind))
    with _errors_name_spec(kind):
        return family.load(family.read_config(Fields(source.config())), (), source, model, weights, device)


@contextmanager
def _errors_name_spec(kind: str) -> Iterator[None]:
    """Errors name --spec, so that nobody takes them for errors of the model itself."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--spec {kind}: {error}") from error


def load_head(
    path: Path, kind: str, model: Model, *, layer_ids: str | None, weights: str, device: torch.device
) -> Head:
    """The head in a folder, for a target; `layer_ids`: the convention that its layer ids follow, if it has any."""
    check_kind(path, kind)
    dtype = activation_dtype(weights, device)
    if dtype != model.dtype:
        raise ConfigError(f"--weights {weights}: a head of {dtype} cannot read a target of {model.dtype}")
    with _errors_name_draft(path):
        return _load(path, _declared(kind), model, layer_ids, weights, device)


@contextmanager
def _errors_name_draft(path: Path) -> Iterator[None]:
    """Errors name --draft and the folder, so that nobody takes them for errors of --model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--draft {path}: {error}") from error


def _declared(kind: str) -> DraftHead:
    head = find_drafter(kind).head
    if head is None:
        raise InvariantError(f"the drafter {kind} has no head")
    return head


def _family(head: DraftHead) -> HeadFamily[Any]:
    family = load_symbol(head.family)
    assert isinstance(family, HeadFamily), head.family
    return family


def _load(path: Path, head: DraftHead, model: Model, layer_ids: str | None, weights: str, device: torch.device) -> Head:
    family, written = _family(head), _config(path)
    config = family.read_config(_fields(written))
    _check_sizes(config, model.hidden_size, model.traits.vocab_size)
    aux_layers = _aux_layers(config, head, layer_ids, model.num_layers)
    tensors: PartialState = _Renamed(Folder(path, allowed=_dtypes))
    if int8_lm_head.is_named_in(written):
        tensors = int8_lm_head.WithFloats(tensors)
    return family.load(config, aux_layers, tensors, model, weights, device)


def _fields(config: dict[str, object]) -> Fields:
    """A config as families read it: an LM head of whole numbers is found as floats."""
    is_rounded = int8_lm_head.is_named_in(config)
    return Fields({key: value for key, value in config.items() if key != int8_lm_head.KEY or not is_rounded})


def _dtypes(name: str) -> tuple[str, ...]:
    if name in INTEGER_TENSORS:
        return INTEGERS
    return (*FLOATS, "I8") if name == int8_lm_head.NAME else FLOATS


def _config(path: Path) -> dict[str, object]:
    if not (path / CONFIG).is_file():
        raise ConfigError(f"--draft {path}: must be a folder with a {CONFIG}")
    return read_config(path)


def _check_sizes(config: HeadSizes, hidden_size: int, vocab_size: int) -> None:
    if config.target_hidden_size != hidden_size:
        raise ConfigError(
            f"the head reads hidden states of {config.target_hidden_size}, the target's have {hidden_size}"
        )
    if config.vocab_size != vocab_size:
        raise ConfigError(f"the head's vocabulary has {config.vocab_size} tokens, the target's {vocab_size}")


def _check_shards(config: HeadSizes, ranks: int) -> None:
    """Of other heads than those of a decoder's layers every rank has all."""
    if isinstance(config, HeadConfig):
        check_shards(config.layers, ranks)
        check_vocabulary(config.num_tokens, ranks)


def _aux_layers(config: HeadSizes, head: DraftHead, convention: str | None, num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs a head reads, in the order of layers, which is how SGLang and vLLM hand them over."""
    if convention is not None and convention not in LAYER_ID_SHIFTS:
        raise ConfigError(f"--draft-layer-ids must be one of {', '.join(LAYER_ID_SHIFTS)}, got {convention}")
    if not config.layer_ids:
        if convention is not None:
            raise ConfigError(f"--draft-layer-ids {convention} says how to read {LAYER_IDS}, which it does not have")
        return default_aux_layers(num_layers) if head.aux_hidden else ()
    if convention is None:
        raise ConfigError(
            f"its config has {LAYER_IDS} {list(config.layer_ids)}, which SGLang takes for layers whose output it reads "
            f"and vLLM for layers whose input it reads; say which with --draft-layer-ids sglang or vllm"
        )
    aux_layers = tuple(sorted(number + LAYER_ID_SHIFTS[convention] for number in config.layer_ids))
    if aux_layers[-1] > num_layers:
        raise ConfigError(
            f"its {LAYER_IDS} {list(config.layer_ids)} (--draft-layer-ids {convention}) are outside the target's "
            f"{num_layers} layers"
        )
    if len(set(aux_layers)) < len(aux_layers):
        raise ConfigError(f"its {LAYER_IDS} {list(config.layer_ids)} name a layer twice")
    return aux_layers


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers of a target whose inputs an EAGLE-3 head reads that does not say which."""
    aux_layers = tuple(sorted((2, num_layers // 2, num_layers - 3)))
    if aux_layers[0] < 0 or aux_layers[-1] > num_layers or len(set(aux_layers)) < len(aux_layers):
        raise ConfigError(
            f"an EAGLE-3 head without {LAYER_IDS} reads the inputs of layers 2, n // 2 and n - 3 of a target of n "
            f"layers; the target's {num_layers} are too few to tell them apart"
        )
    return aux_layers


class _Renamed(PartialState):
    """A folder's tensors by the names that heads know: without `model.`, and `layers.0.` for EAGLE's `midlayer.`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._names: dict[str, str] = {}
        for name in folder:
            known = name.removeprefix("model.")
            if known.startswith("midlayer."):
                known = "layers.0." + known.removeprefix("midlayer.")
            if known in self._names:
                raise ConfigError(f"the checkpoint's {self._names[known]} and {name} are the same tensor twice")
            self._names[known] = name

    def __getitem__(self, name: str) -> Tensor:
        return self._folder[self._names[name]]

    def part(self, name: str, shape: Shape) -> Tensor:
        """What a shape says of a tensor; nothing else of it is read."""
        return self._folder.part(self._names[name], shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
