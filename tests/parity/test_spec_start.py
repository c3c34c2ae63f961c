"""Start-up with speculation: what was chosen is said, and what cannot work is refused by its flags, before it costs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roost import startup
from roost.cli.main import main
from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from roost.errors import ConfigError
from roost.startup import Running, start
from tests.support.config_files import LLAMA
from tests.support.random_heads import Config, write_eagle, write_eagle3
from tests.support.small_vocabularies import byte_level
from tests.support.tiny_folder import write_model

VOCAB = byte_level().vocab_size
FEWER = 20
FITS: Config = {"hidden_size": LLAMA["hidden_size"], "vocab_size": VOCAB}
LAYER_IDS: Config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "eagle": lambda path: write_eagle(path, FITS),
    "eagle3": lambda path: write_eagle3(path, FITS, num_tokens=FEWER),
    "wide": lambda path: write_eagle3(path, {**FITS, "hidden_size": 16}, num_tokens=FEWER),
    "wordy": lambda path: write_eagle(path, {**FITS, "vocab_size": VOCAB + 1}),
    "counted": lambda path: write_eagle3(path, {**FITS, **LAYER_IDS}, num_tokens=FEWER),
    "headless": lambda path: write_eagle(path, {**FITS, "architectures": ["LlamaForCausalLM"]}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of heads, most of which do not fit; and one that is not there."""
    root = tmp_path_factory.mktemp("heads")
    return {name: writer(root / name) for name, writer in WRITERS.items()} | {"nowhere": root / "nowhere"}


# --- refusals --------------------------------------------------------------------------------------------------

# what is asked for ({name}: the folder of a head), and what is said
ALONE = [  # whatever the model: refused before it is looked for
    ("--spec eagle3 --draft {nowhere}", "--draft {nowhere}: must be a folder with a config.json"),
    ("--spec auto --draft {nowhere}", "--draft {nowhere}: must be a folder with a config.json"),
    ("--spec eagle --draft {eagle3}", "--spec eagle: the head at --draft {eagle3} is of the kind eagle3"),
    ("--spec eagle3 --draft {eagle}", "--spec eagle3: the head at --draft {eagle} is of the kind eagle"),
    ("--spec --draft {headless}", "--draft {headless}: LlamaForCausalLM is not a draft head; known are"),
    ("--spec none --draft {eagle}", "--draft is for --spec eagle, eagle3 or auto, got --spec none"),
    ("--draft {nowhere}", "--draft {nowhere}: must be a folder with a config.json"),
    ("--spec ngram --draft {eagle}", "--draft is for --spec eagle, eagle3 or auto, got --spec ngram"),
    ("--spec eagle3", "--spec eagle3 needs --draft, the folder of its head"),
    ("--spec-steps 3", "--spec-steps is for --spec ngram, eagle, eagle3, mtp or auto, got --spec none"),
    ("--spec eagle --draft {eagle} --draft-layer-ids vllm", "--draft-layer-ids is for --spec eagle3, got --spec eagle"),
    ("--spec --draft {eagle} --draft-layer-ids vllm", "--draft-layer-ids is for --spec eagle3, got --spec eagle"),
    (
        "--spec eagle --draft {eagle} --spec-steps 3 --spec-topk 2 --spec-tokens 12",
        "--spec-tokens must be in [2, 11]: a tree of --spec-topk 2 and --spec-steps 3 has 10 candidates",
    ),
    (
        "--spec eagle --draft {eagle} --spec-steps 3 --spec-tokens 5",
        "--spec-tokens must be --spec-steps + 1 = 4 for a chain (--spec-topk 1), got 5",
    ),
    ("--spec --spec-topk 2", "--spec-topk must be 1 for --spec ngram, which drafts chains, got 2"),
]
WITH_ITS_MODEL = [  # refused by the configs of both, before a tensor is read
    ("--spec eagle3 --draft {wide}", "--draft {wide}: the head reads hidden states of 16, the target's have 12"),
    (
        "--spec eagle --draft {wordy}",
        f"--draft {{wordy}}: the head's vocabulary has {VOCAB + 1} tokens, the target's {VOCAB}",
    ),
    ("--spec eagle3 --draft {counted}", "say which with --draft-layer-ids sglang or vllm"),
    (
        "--spec --draft {eagle3} --draft-layer-ids vllm",
        "--draft {eagle3}: --draft-layer-ids vllm says how to read eagle_aux_hidden_state_layer_ids, which it does not",
    ),
    (
        f"--spec eagle3 --draft {{eagle3}} --spec-topk {FEWER + 1}",
        f"--spec-topk must be at most {FEWER}, the head's vocabulary, got {FEWER + 1}",
    ),
]


def refuse(asked: str, said: str, model: Path, heads: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The command line ends with 2 and one line that says this."""
    flags = [word.format(**heads) for word in asked.split()]
    assert main(["generate", "h", "--model", str(model), *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("roost generate: error: ") and said.format(**heads) in line, line


def never(*args: object, **named: object) -> None:
    """For what must not be called."""
    raise AssertionError("this comes too early")


@pytest.mark.parametrize(("asked", "said"), ALONE)
def test_what_no_model_can_make_work_is_refused_before_one_is_looked_for(
    asked: str,
    said: str,
    model: Path,
    heads: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "find_model", never)
    refuse(asked, said, model, heads, capsys)


@pytest.mark.parametrize(("asked", "said"), WITH_ITS_MODEL)
def test_a_head_that_does_not_fit_is_refused_before_the_model_is_read(
    asked: str,
    said: str,
    model: Path,
    heads: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "load_model", never)
    refuse(asked, said, model, heads, capsys)


# --- choices ---------------------------------------------------------------------------------------------------


@pytest.fixture
def started(model: Path) -> Iterator[Callable[..., Running]]:
    """Start an engine with some options of speculation."""
    running: list[Running] = []

    def begin(**options: object) -> Running:
        memory, sizes = MemoryConfig(pool_tokens=8192), ModelConfig(model=str(model), weights="fp32", threads=1)
        config = EngineConfig(model=sizes, memory=memory, spec=SpecConfig(**options))  # type: ignore[arg-type]
        running.append(start(config))
        return running[-1]

    yield begin
    for each in running:
        each.executor.close()


@pytest.mark.parametrize(
    ("head", "options", "chosen"),
    [
        (None, {}, ("ngram", "auto", 1, 17)),
        (None, {"spec_steps": 6}, ("ngram", 6, 1, 7)),
        ("eagle", {}, ("eagle", "auto", 1, 17)),
        ("eagle", {"spec_steps": "auto"}, ("eagle", "auto", 1, 17)),
        ("eagle", {"spec_tokens": 5}, ("eagle", 4, 1, 5)),
        ("eagle3", {"spec_topk": 4}, ("eagle3", 4, 4, 16)),
        ("eagle3", {"spec_topk": 2, "spec_steps": 2}, ("eagle3", 2, 2, 7)),
        ("counted", {"draft_layer_ids": "vllm"}, ("eagle3", "auto", 1, 17)),
    ],
)
def test_auto_takes_what_there_is_and_the_settings_say_it(
    head: str | None,
    options: dict[str, object],
    chosen: tuple[str, int | str, int, int],
    heads: dict[str, Path],
    started: Callable[..., Running],
) -> None:
    running = started(spec="auto", draft=head and str(heads[head]), **options)
    settings = running.settings
    assert tuple(settings[name] for name in ("spec", "spec_steps", "spec_topk", "spec_tokens")) == chosen
    assert settings.get("draft") == (head and str(heads[head]))
    assert "warnings" not in settings
    resolved = running.resolved
    steps = "auto" if resolved.widths.is_auto else resolved.spec.steps
    assert (steps, resolved.spec.topk, resolved.spec.tokens) == chosen[1:]


def test_a_draft_alone_says_what_it_is(heads: dict[str, Path], started: Callable[..., Running]) -> None:
    assert started(draft=str(heads["eagle3"])).settings["spec"] == "eagle3"


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ("eagle3", "auto")),
        ({"spec": "auto"}, ("eagle3", "auto")),
        ({"spec": "eagle3", "spec_topk": 2}, ("eagle3", 4)),
        ({"spec_steps": 3}, ("eagle3", 3)),
        ({"spec": "ngram"}, ("ngram", "auto")),
        ({"spec": "none"}, ("none", None)),
    ],
)
def test_the_head_that_comes_with_a_model_drafts_unless_somebody_else_is_asked_for(
    options: dict[str, object],
    chosen: tuple[str, int | str | None],
    heads: dict[str, Path],
    started: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "find_head", lambda model: heads["eagle3"])
    settings = started(**options).settings
    assert (settings["spec"], settings.get("spec_steps")) == chosen
    assert settings.get("draft") == (str(heads["eagle3"]) if chosen[0] == "eagle3" else None)


def test_another_head_than_the_one_that_comes_with_a_model_is_taken_where_it_is_named(
    heads: dict[str, Path], started: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "find_head", lambda model: heads["eagle3"])
    assert started(draft=str(heads["eagle"])).settings["spec"] == "eagle"
    with pytest.raises(ConfigError, match="--spec eagle needs --draft"):
        started(spec="eagle")


def test_without_speculation_the_settings_name_none_of_its_numbers(started: Callable[..., Running]) -> None:
    settings = started().settings
    assert {name: value for name, value in settings.items() if "spec" in name or "draft" in name} == {"spec": "none"}
