"""Job: what is to be trained, on what, and the folder where it lies; refuses what cannot work before anything is made.

The folder belongs to one model and one form of head: `job.json` says which, and a run that wants another is refused.
What a run leaves out is taken from there. Called by the training and its command.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from roost.config.options import ModelConfig
from roost.errors import ConfigError
from roost.models.decoder import DecoderConfig
from roost.models.registry import decoder_config
from roost.startup import device_of
from roost.train.loop import Recipe
from roost.train.start import GivenHead, head_shape, read_head, weight_sizes
from roost.weights.draft import default_aux_layers
from roost.weights.load import open_source
from roost.weights.pull import find_model
from roost.weights.source import Source

VOCABULARY = 8192  # tokens that a head can say, unless told otherwise
_FLAGS = {"weights": "model"}  # of notes that are called otherwise
_KEYS = {"weights": "weights whose key is ", "from_head": "a head whose key is "}
QUESTION_MAX = 256  # tokens of a question that the target asks itself; a longer one is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, on what, and where it lies."""

    folder: Path
    model: str = "default"
    device: str = "auto"
    num_new: int = 512  # tokens of an answer, at most
    at_once: int = 32  # prompts
    own_questions: int = 0  # that the target asks itself
    answers_s: float | None = None  # budget of seconds for the answers of a run
    row_len: int = 1024
    vocabulary: int | None = None  # of the head; None: as it was, or the usual
    feed_size: int | None = None  # of the head's feed-forward; None: as it was, or the target's
    from_head: Path | None = None  # a head to go on from, with its vocabulary and its sizes
    held_out: float = 0.02  # share of the prompts whose answers are not learned from

    @property
    def weights(self) -> str:
        """The form of the target's weights: the same for answers and lessons."""
        return "bf16" if device_of(ModelConfig(device=self.device)).type == "cuda" else "fp32"

    @property
    def context(self) -> int:
        """That questions and answers need."""
        most = decoder_config(open_source(find_model(self.model)[1]).config()).context_max
        return min(max(self.row_len, 2 * QUESTION_MAX) + self.num_new, most)


def check(job: Job, recipe: Recipe) -> None:
    """Refuse what cannot work, before anything is answered; note whose folder it is."""
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
        "from_head": None if given is None else given.key,
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
    """What the folder says about itself; None if it is new."""
    path = job.folder / "job.json"
    return None if not path.exists() else read_note(path)


def read_note(path: Path) -> dict[str, Any]:
    """A JSON object of the folder."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {path.parent}: {path.name} cannot be read: {error}; use another folder") from error
    assert isinstance(found, dict), found
    return found


def write_whole(path: Path, text: str) -> None:
    """A file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _sizes(job: Job, config: DecoderConfig, given: GivenHead | None, noted: dict[str, Any] | None) -> dict[str, int]:
    """The head's vocabulary and feed-forward: as told, as they were, those of a given head, or the usual ones."""
    if given is not None:
        return {"draft_vocabulary": len(given.vocabulary), "feed_size": given.feed_size}
    before = noted or {"draft_vocabulary": VOCABULARY, "feed_size": config.intermediate_size}
    feed_size = before["feed_size"] if job.feed_size is None else job.feed_size
    if feed_size < config.intermediate_size:
        raise ConfigError(f"--feed-size must be at least the model's, {config.intermediate_size}, got {feed_size}")
    vocabulary = before["draft_vocabulary"] if job.vocabulary is None else job.vocabulary
    return {"draft_vocabulary": min(vocabulary, config.vocab_size), "feed_size": feed_size}


def _refuse_unlike(given: GivenHead, wanted: dict[str, tuple[int, ...]]) -> None:
    """Refuse a head whose weights have other names or sizes than are wanted."""
    for name, size in wanted.items():
        found = tuple(given.weights[name].shape) if name in given.weights else "none"
        if found != size:
            raise ConfigError(f"--from-head: {name} must be {size} for this model, got {found}")
    for name in given.weights.keys() - wanted.keys():
        raise ConfigError(f"--from-head: a head of this model has no {name}")


def _key(source: Source) -> str:
    """Says which model it is, whatever it is called: its config, and some of its weights."""
    some = source["model.norm.weight"].float().numpy().tobytes()
    return blake2b(json.dumps(source.config(), sort_keys=True, default=str).encode() + some, digest_size=8).hexdigest()
