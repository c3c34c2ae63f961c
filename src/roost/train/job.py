"""Job: what is trained, on what, and in which folder; refuses what cannot work before anything is computed.

A folder belongs to one model and one shape of head: `job.json` says which, and a run that wants another is refused.
Options that a run leaves out are taken from there. Called by the training pipeline and its command.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from roost.config.options import ModelConfig
from roost.errors import ConfigError
from roost.models.decoder_layers import DecoderConfig
from roost.models.registry import decoder_config
from roost.startup import device_of
from roost.train.head_checkpoint import GivenHead, head_shape, read_head, weight_sizes
from roost.train.loop import Recipe
from roost.weights.draft import default_aux_layers
from roost.weights.load import open_source
from roost.weights.pull import find_model
from roost.weights.source import Source

VOCABULARY = 8192  # default size of the draft vocabulary
_FLAGS = {"weights": "model"}  # entries of job.json whose flag has another name
_KEYS = {"weights": "weights whose key is ", "from_head": "a head whose key is "}
QUESTION_MAX = 256  # tokens of a question that the target generates; longer ones are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, on what, and in which folder."""

    folder: Path
    model: str = "default"
    device: str = "auto"
    num_new: int = 512  # most tokens of an answer
    at_once: int = 32  # prompts answered concurrently
    processes: int = 1  # that answer at the same time, on one device
    own_questions: int = 0  # how many the target generates itself
    composed: int = 0  # prompts that are composed of the given texts
    answers_s: float | None = None  # seconds that a run may spend on answers
    row_len: int = 1024
    vocabulary: int | None = None  # size of the draft vocabulary; None: as before, or the default
    feed_size: int | None = None  # width of the head's feed-forward; None: as before, or the target's
    from_head: Path | None = None  # a head to start from, with its sizes and, unless told, its vocabulary
    lm_head: str = "bf16"  # how its rows are stored
    held_out: float = 0.02  # share of the prompts whose answers are held out

    @property
    def weights(self) -> str:
        """The precision of the target's weights: the same for answers and training."""
        return "bf16" if device_of(ModelConfig(device=self.device)).type == "cuda" else "fp32"

    @property
    def context(self) -> int:
        """The context that questions and answers need."""
        most = decoder_config(open_source(find_model(self.model)[1]).config()).context_max
        return min(max(self.row_len, 2 * QUESTION_MAX) + self.num_new, most)


def check(job: Job, recipe: Recipe) -> None:
    """Refuse what cannot work before anything is computed; write job.json in a new folder."""
    name, path = find_model(job.model)
    source = open_source(path)
    config = decoder_config(source.config())
    aux_layers = default_aux_layers(len(config.layers))
    if job.row_len > config.context_max:
        raise ConfigError(f"--row-tokens must be at most the model's context, {config.context_max}, got {job.row_len}")
    if job.num_new >= config.context_max:
        raise ConfigError(f"--answer-tokens must be below the model's context, {config.context_max}, got {job.num_new}")
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {job.folder}: is no folder: {error}") from error
    given = None if job.from_head is None else read_head(job.from_head)
    noted = noted_of(job)
    mine = {
        "model": name,
        "weights": _key(source),
        "row_tokens": job.row_len,
        "batch_rows": recipe.batch_rows,
        "unrolled_steps": recipe.num_steps,
        "loss": recipe.loss,
        "from_head": None if given is None else given.key,
        "lm_head": job.lm_head,
        **_sizes(job, config, given, noted),
    }
    if given is not None:
        _refuse_unlike(given, weight_sizes(head_shape(config, len(aux_layers), len(given.vocabulary), given.feed_size)))
    for flag, value in (noted or {}).items():
        if mine[flag] != value:
            theirs, wanted = (("none" if each is None else each) for each in (value, mine[flag]))
            raise ConfigError(
                f"--{_FLAGS.get(flag, flag.replace('_', '-'))}: what lies in --out {job.folder} was made with "
                f"{_KEYS.get(flag, '')}{theirs}, got {wanted}; use another folder"
            )
    if noted is None:
        write_whole(job.folder / "job.json", json.dumps(mine) + "\n")


def noted_of(job: Job) -> dict[str, Any] | None:
    """The folder's job.json; None if it is new."""
    path = job.folder / "job.json"
    return None if not path.exists() else read_note(path)


def read_note(path: Path) -> dict[str, Any]:
    """Read a JSON object of the folder."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {path.parent}: {path.name} cannot be read: {error}; use another folder") from error
    assert isinstance(found, dict), found
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _sizes(job: Job, config: DecoderConfig, given: GivenHead | None, noted: dict[str, Any] | None) -> dict[str, int]:
    """Sizes of the head's vocabulary and feed-forward: as given, as before, those of a given head, or the defaults."""
    if given is not None:
        size = noted["draft_vocabulary"] if noted else len(given.vocabulary)
        wanted = min(job.vocabulary or size, config.vocab_size)
        return {"draft_vocabulary": wanted, "feed_size": given.feed_size}
    before = noted or {"draft_vocabulary": VOCABULARY, "feed_size": config.intermediate_size}
    feed_size = before["feed_size"] if job.feed_size is None else job.feed_size
    if feed_size < config.intermediate_size:
        raise ConfigError(f"--feed-size must be at least the model's, {config.intermediate_size}, got {feed_size}")
    vocabulary = before["draft_vocabulary"] if job.vocabulary is None else job.vocabulary
    return {"draft_vocabulary": min(vocabulary, config.vocab_size), "feed_size": feed_size}


def _refuse_unlike(given: GivenHead, wanted: dict[str, tuple[int, ...]]) -> None:
    """Refuse a head whose weights have other names or sizes than this model's head would have."""
    for name, size in wanted.items():
        found = tuple(given.weights[name].shape) if name in given.weights else "none"
        if found != size:
            raise ConfigError(f"--from-head: {name} must be {size} for this model, got {found}")
    for name in given.weights.keys() - wanted.keys():
        raise ConfigError(f"--from-head: a head of this model has no {name}")


def _key(source: Source) -> str:
    """A hash that identifies a model whatever its name: of its config and some of its weights."""
    names = decoder_config(source.config()).names
    some = source[f"{names.root}{names.last_norm}.weight"].float().numpy().tobytes()
    return blake2b(json.dumps(source.config(), sort_keys=True, default=str).encode() + some, digest_size=8).hexdigest()
