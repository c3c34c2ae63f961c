"""The default model with speculation says what it says without, token for token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from bench.heads import TargetHead
from roost import LLM
from roost.cli.prompts import PROMPTS
from roost.messages import SpecStats
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.weights.draft import load_head
from roost.weights.pull import find_head
from tests.support.random_heads import write_eagle3
from tests.support.tiny_models import CPU, Served, configure

NUM_NEW = 24
NUM_PROMPTS_FULL = 50
FEW = (  # the last ones repeat themselves, which is what n-grams are for
    "Once upon a time there was a small village by the sea, where",
    "def fibonacci(n):\n    ",
    "red green blue, red green blue, red green blue, red",
)
MANY = (
    *FEW,
    *PROMPTS,
    "The three primary colours are",
    "A short list of animals: cat, dog, cow, pig,",
    "for i in range(10):\n    print(",
    "1, 2, 3, 4, 5, 6,",
    "Monday, Tuesday, Wednesday,",
    "SELECT name FROM birds WHERE",
    "The owl flew over the",
    "Dear Sir or Madam,",
    "Water boils at",
    "{'a': 1, 'b': 2, 'c':",
    "The opposite of hot is",
    "He opened the old box and found",
    "import os\nimport sys\n\ndef main():\n",
    "Paris is the capital of France. Rome is the capital of Italy. Madrid is",
    "la la la la la la",
    "Step 1: Take a bowl. Step 2:",
    "It was late, the rain had stopped, and",
    "<html>\n<head>\n<title>",
    "Question: how many legs has a spider? Answer:",
    "The moon is smaller than the",
    "if x > 0:\n    return 1\nelif x < 0:\n    return",
    "My favourite season is",
    "a b c d e f g",
    "The train to the north leaves at",
    "Roses are red, violets are",
    "To bake bread you need",
    "# A list\n- one\n- two\n-",
    "The first thing she noticed was",
    "Zebra, yak, wolf, vole,",
    "In the year 1900, most people",
    "x = 3\ny = 4\nz = x +",
)
NGRAM = SpecShape(steps=4, topk=1, tokens=5, reads_history=True)
CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=3, topk=3, tokens=8, draft_kv=DraftKv.PAIR)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Said:
    """What came of some prompts."""

    outputs: list[tuple[int, ...]]
    spec: SpecStats


Say = Callable[[Sequence[tuple[int, ...]], SpecShape, Head | None], Said]


@pytest.fixture(scope="module")
def model(exact: LLM) -> Decoder:
    """The default model itself."""
    model = exact._running.executor.runner.passes.model
    assert isinstance(model, Decoder)
    return model


@pytest.fixture(scope="module")
def heads(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Head | None]:
    """The head that comes with the model; a random one, by way of its files; and the model itself, mostly right."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "head_dim": 64}
    changes = {**sizes, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    folder = write_eagle3(tmp_path_factory.mktemp("head") / "eagle3", changes, num_tokens=2048)
    eagle3 = load_head(folder, "eagle3", model, layer_ids=None, weights="fp32", device=CPU)
    folder = find_head("default")
    assert folder is not None
    own = load_head(folder, "eagle3", model, layer_ids=None, weights="fp32", device=CPU)
    return {"ngram": None, "own": own, "eagle3": eagle3, "target": TargetHead(model)}


@pytest.fixture(scope="module")
def say(model: Decoder) -> Say:
    """Runs prompts side by side."""

    def run(prompts: Sequence[tuple[int, ...]], shape: SpecShape, head: Head | None) -> Said:
        served = Served(model, configure(page_size=16, pool_tokens=4096, context=128, spec=shape), head=head)
        for number, prompt in enumerate(prompts):
            served.submit(f"r{number}", prompt, NUM_NEW)
        served.run()
        served.executor.close()
        return Said(
            outputs=[served.output(f"r{number}") for number in range(len(prompts))],
            spec=served.engine.state.spec_counters.snapshot(),
        )

    return run


@pytest.fixture(scope="module")
def few(exact: LLM, say: Say) -> tuple[list[tuple[int, ...]], Said]:
    """Some prompts, and what follows them without speculation."""
    prompts = [exact.language.prompt_tokens(text) for text in FEW]
    return prompts, say(prompts, PLAIN, None)


@pytest.fixture(scope="module")
def many(exact: LLM, say: Say) -> tuple[list[tuple[int, ...]], Said]:
    """The same for many."""
    prompts = [exact.language.prompt_tokens(text) for text in MANY]
    assert len(set(prompts)) == NUM_PROMPTS_FULL
    return prompts, say(prompts, PLAIN, None)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("ngram", NGRAM), ("own", CHAIN), ("own", TREE), ("eagle3", TREE), ("target", CHAIN)],
    ids=["ngram", "own-chain", "own-tree", "eagle3-tree", "target-chain"],
)
def test_output_with_speculation_is_that_without(
    name: str,
    shape: SpecShape,
    heads: dict[str, Head | None],
    few: tuple[list[tuple[int, ...]], Said],
    say: Say,
) -> None:
    prompts, plain = few
    found = say(prompts, shape, heads[name])
    assert found.outputs == plain.outputs
    assert all(len(output) == NUM_NEW for output in found.outputs)
    assert found.spec.rounds > 0
    assert name == "eagle3" or found.spec.accept_length > 1.2, found.spec


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ngram", NGRAM),
        ("own", CHAIN),
        ("own", TREE),
        ("eagle3", CHAIN),
        ("eagle3", TREE),
        ("target", CHAIN),
        ("target", TREE),
    ],
    ids=["ngram", "own-chain", "own-tree", "eagle3-chain", "eagle3-tree", "target-chain", "target-tree"],
)
def test_output_of_many_prompts_with_speculation_is_that_without(
    name: str,
    shape: SpecShape,
    heads: dict[str, Head | None],
    many: tuple[list[tuple[int, ...]], Said],
    say: Say,
) -> None:
    prompts, plain = many
    found = say(prompts, shape, heads[name])
    assert found.outputs == plain.outputs
    assert all(len(output) == NUM_NEW for output in found.outputs)
    assert found.spec.rounds > 0
