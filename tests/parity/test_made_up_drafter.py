"""A drafter is one file and one entry: this file holds three, which draft what their declarations allow.

One proposes the first token of the row again and again, which it learns from the row's history; one proposes a tree of
what may come, without KV; one has weights of its own, in a folder whose config.json says whose they are. Each is chosen
by name, drafts in served requests, and changes no output.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from roost.cli.main import main
from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from roost.config.speculation import spec_shape
from roost.device.device import Device
from roost.drafters import registry
from roost.drafters.make import Parts
from roost.drafters.protocol import Pairs
from roost.drafters.registry import DRAFTERS, DrafterKind, DraftHead, spec_names
from roost.drafters.tree import Candidates, Trees, best_trees, chains
from roost.errors import ConfigError
from roost.front.options import Options
from roost.layers.segments import Segments
from roost.lazy_import import load_symbol
from roost.library.llm import LLM
from roost.messages import SpecStats
from roost.models.family import HeadFamily
from roost.models.fields import Fields
from roost.models.model import KvShape, Model
from roost.models.tensors import Tensors
from roost.step import RowSetup
from tests.support.chain_model import save_chain, token, tokenizer

HERE = __name__

# --- three drafters: what contributors write -------------------------------------------------------------------


class Quiet:
    """What the three have in common: they ask nothing of the target, and need not follow it."""

    aux_layers: tuple[int, ...] = ()

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Nothing."""

    def extend(self, pairs: Pairs) -> None:
        """Nothing."""


class First(Quiet):
    """Proposes the first token of the row, as often as it may."""

    def __init__(self, num_rows: int, device: Device) -> None:
        self._firsts = torch.zeros(num_rows, dtype=torch.int64, device=device.torch)

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Needs the history, which it declares."""
        for setup in setups:
            self._firsts[setup.row] = int(setup.tokens[0])

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """A chain."""
        drafts = self._firsts[rounds.rows][:, None].expand(-1, width - 1)
        return chains(torch.cat([roots[:, None], drafts], dim=1))


def make_first(parts: Parts) -> First:
    """By its entry."""
    return First(parts.num_rows, parts.device)


class Near(Quiet):
    """Proposes the neighbours of the root's id: a tree of one step, and the next id of the first of them."""

    def __init__(self, topk: int, vocab_size: int) -> None:
        self._topk, self._vocab_size = topk, vocab_size

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """A tree: K ids around the root, and one behind each."""
        number = torch.arange(1, self._topk + 1, device=roots.device)
        near = roots[:, None] - 1 + number.flip(0)  # the next id is not the first of them
        tokens = torch.cat([near, near + 1], dim=1) % self._vocab_size
        parents = torch.cat([torch.full_like(near, -1), (number - 1).expand_as(near)], dim=1)
        scores = -torch.arange(2.0 * self._topk, device=near.device).expand_as(tokens)
        return best_trees(roots, Candidates(tokens=tokens, scores=scores, parents=parents), width)


def make_near(parts: Parts) -> Near:
    """By its entry."""
    return Near(parts.resolved.spec.topk, parts.resolved.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class BigramConfig:
    """Sizes of a table of successors."""

    vocab_size: int
    target_hidden_size: int

    @property
    def num_tokens(self) -> int:
        """It may propose every token."""
        return self.vocab_size

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """It reads no layer."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BigramHead:
    """The best successor of each token."""

    successors: Tensor
    kv: tuple[KvShape, ...] = ()


def read_bigram(fields: Fields) -> BigramConfig:
    """Its config.json."""
    return BigramConfig(vocab_size=fields.integer("vocab_size"), target_hidden_size=fields.integer("target_size"))


def load_bigram(
    config: BigramConfig,
    aux_layers: tuple[int, ...],
    state: Mapping[str, Tensor],
    model: Model,
    weights: str,
    device: torch.device,
) -> BigramHead:
    """Its one tensor."""
    tensors = Tensors(state, device, torch.float32)
    table = tensors.take("successors", config.vocab_size, config.vocab_size)
    tensors.check_all_taken()
    return BigramHead(successors=table.argmax(dim=1))


BIGRAM_HEADS = HeadFamily(read_config=read_bigram, load=load_bigram)


class Bigram(Quiet):
    """Proposes successors of successors."""

    def __init__(self, head: BigramHead) -> None:
        self._head = head

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """A chain."""
        tokens = [roots]
        for _ in range(width - 1):
            tokens.append(self._head.successors[tokens[-1]])
        return chains(torch.stack(tokens, dim=1))


def make_bigram(parts: Parts) -> Bigram:
    """By its entry."""
    assert isinstance(parts.head, BigramHead)
    return Bigram(parts.head)


ENTRIES = (
    DrafterKind(name="first", make=f"{HERE}:make_first", reads_history=True),
    DrafterKind(name="near", make=f"{HERE}:make_near", trees=True),
    DrafterKind(
        name="bigram",
        make=f"{HERE}:make_bigram",
        head=DraftHead(architectures=("BigramTable",), family=f"{HERE}:BIGRAM_HEADS"),
    ),
)

# --- one entry, and it drafts ----------------------------------------------------------------------------------

PROMPT = "db"  # the model goes on with c, and then says the row's first token again


@pytest.fixture(autouse=True)
def entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three are in the registry."""
    monkeypatch.setattr(registry, "DRAFTERS", (registry.NGRAM, registry.EAGLE, registry.EAGLE3, *ENTRIES))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose tokens each have one successor."""
    folder = tmp_path / "model"
    folder.mkdir()
    return save_chain(folder, "b", "c", "d", "a", "e")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table that knows some of the model's successors: c and d, and then b."""
    folder, size = tmp_path / "table", tokenizer().vocab_size
    folder.mkdir()
    successors = torch.zeros(size, size)
    for before, after in ("bc", "cd", "db"):
        successors[token(before), token(after)] = 1.0
    save_file({"successors": successors}, folder / "model.safetensors")
    config = {"architectures": ["BigramTable"], "vocab_size": size, "target_size": size + size % 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


Generate = Callable[..., tuple[str, SpecStats]]


@pytest.fixture
def generate(model: Path) -> Generate:
    """Output and statistics of a request to an engine with some speculation."""

    def run(**options: object) -> tuple[str, SpecStats]:
        config = EngineConfig(
            model=ModelConfig(model=str(model), weights="fp32", device="cpu"),
            memory=MemoryConfig(page_size=4, pool_tokens=1024, strict_memory=2),
            spec=SpecConfig(**options),  # type: ignore[arg-type]
        )
        with LLM(config=config) as llm:
            output = llm.generate(PROMPT, Options(max_new_tokens=9, temperature=0.0))
        return output.text, output.choices[0].spec

    return run


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ({"spec": "first", "spec_steps": 2}, 2),
        ({"spec": "near", "spec_steps": 2, "spec_topk": 3, "spec_tokens": 6}, 5),
        ({"spec": "bigram", "spec_steps": 2, "draft": "table"}, 2),
        ({"draft": "table", "spec_steps": 3}, 3),  # whose head it is, its config.json says
    ],
    ids=str,
)
def test_it_drafts_by_name_and_the_output_is_that_of_plain_decoding(
    options: dict[str, object], offered: int, table: Path, generate: Generate
) -> None:
    plain, none = generate(spec="none")
    if "draft" in options:
        options = {**options, "draft": str(table)}
    output, spec = generate(**options)
    assert output == plain
    assert none.rounds == 0 < spec.rounds
    assert spec.drafts_offered == offered * spec.rounds
    assert 0 < spec.drafts_accepted < spec.drafts_offered


def test_the_command_line_takes_its_name(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", PROMPT, "--model", str(model), "--max-new-tokens", "6"]
    said = []
    for flags in (["--spec", "first", "--spec-steps", "3"], ["--spec", "none"]):
        assert main([*asked, *flags]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


# --- what it did not declare is refused by name ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SpecConfig(spec="last"),
            "--spec must be one of none, ngram, eagle, eagle3, first, near, bigram, auto, got last",
        ),
        (SpecConfig(spec="first", spec_topk=2), "--spec-topk must be 1 for --spec first, which drafts chains, got 2"),
        (SpecConfig(spec="near", spec_steps=0), "--spec-steps must be at least 1 for --spec near, got 0"),
        (SpecConfig(spec="first", draft="x"), "--draft is for --spec eagle, eagle3, bigram or auto, got --spec first"),
        (SpecConfig(spec="bigram"), "--spec bigram needs --draft, the folder of its head"),
        (SpecConfig(draft="x"), "--draft x: which drafter .*; give --spec eagle, eagle3 or bigram"),
        (
            SpecConfig(spec="bigram", draft="x", draft_layer_ids="vllm"),
            "--draft-layer-ids is for --spec eagle3, got --spec bigram",
        ),
        (
            SpecConfig(spec_steps=3),
            "--spec-steps is for --spec ngram, eagle, eagle3, first, near, bigram or auto, got --spec none",
        ),
    ],
    ids=str,
)
def test_a_combination_that_its_entry_does_not_allow_is_refused(config: SpecConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        spec_shape(config)


def test_a_head_of_another_drafter_or_of_other_sizes_is_refused(table: Path, generate: Generate) -> None:
    with pytest.raises(ConfigError, match=r"--spec eagle: the head at --draft .* is of the kind bigram"):
        generate(spec="eagle", draft=str(table))
    config = json.loads((table / "config.json").read_text())
    (table / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    with pytest.raises(ConfigError, match=r"--draft .*: the head's vocabulary has 5 tokens"):
        generate(draft=str(table))
    (table / "config.json").write_text(json.dumps({**config, "architectures": ["TrigramTable"]}))
    with pytest.raises(ConfigError, match=r"TrigramTable is not a draft head; known are .*, BigramTable"):
        generate(draft=str(table))


# --- the entries themselves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*DRAFTERS, *ENTRIES], ids=lambda kind: kind.name)
def test_what_an_entry_names_is_there(kind: DrafterKind) -> None:
    assert callable(load_symbol(kind.make))
    assert kind.head is None or isinstance(load_symbol(kind.head.family), HeadFamily)


def test_no_name_and_no_architecture_is_that_of_two_drafters() -> None:
    names = spec_names()
    assert len(set(names)) == len(names)
    architectures = [name for kind in DRAFTERS if kind.head is not None for name in kind.head.architectures]
    assert len(set(architectures)) == len(architectures)
