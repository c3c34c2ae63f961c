"""Two ranks say what one says: greedily, by seed, with log-probabilities, grammars, sessions and drafts.

Each group is started once, for all that it is asked. The matrix's other cells run in the full suite.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roost import LLM, EngineConfig, Options, SpecConfig
from roost.library.llm import Output
from roost.parallel import ranks
from roost.parallel.agreement import RankAgreement
from roost.parallel.digest import StepDigest
from roost.parallel.executor import CHECK_STEPS
from roost.runner.runner import Finish, Runner
from roost.step import StepPlan
from tests.parallel.conftest import CONFIG, Start, odd
from tests.parallel.odd_follower import AT_STEP, summing
from tests.support.config_files import LLAMA
from tests.support.random_heads import write_eagle3
from tests.support.small_vocabularies import byte_level

NEAR = 1e-4
TEXTS = ("hello", "one two one two one two one", "x" * 150, "The sea was", "a", "once more, once more, once")
SPECS: dict[str, dict[str, object]] = {
    "plain": {"spec": "none"},
    "chain": {"spec": "eagle3", "spec_steps": 3},
    "auto": {"spec": "eagle3"},
    "tree": {"spec": "eagle3", "spec_steps": 3, "spec_topk": 3, "spec_tokens": 10},
    "n-gram": {"spec": "ngram", "spec_steps": 3},
}
CELLS = [
    pytest.param(
        spec, depth, marks=() if (spec, depth) in (("plain", 0), ("tree", 1), ("n-gram", 1)) else pytest.mark.full
    )
    for spec in SPECS
    for depth in (0, 1)
]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a draft head."""
    vocab_size = byte_level().vocab_size
    made = {"hidden_size": LLAMA["hidden_size"], "vocab_size": vocab_size}
    return write_eagle3(tmp_path_factory.mktemp("heads") / "eagle3", made, num_tokens=vocab_size)


def config_of(spec: str, depth: int, head: Path) -> EngineConfig:
    """A cell of the matrix."""
    draft = {"draft": str(head)} if SPECS[spec]["spec"] == "eagle3" else {}
    return replace(
        CONFIG,
        spec=SpecConfig(**SPECS[spec], **draft),
        sched=replace(CONFIG.sched, overlap=depth == 1),  # type: ignore[arg-type]
    )


def numbers(outputs: list[Output]) -> np.ndarray:
    """Every log-probability, in order."""
    entries = [each for output in outputs for each in (*output.choices[0].logprobs, *output.prompt_logprobs)]
    return np.array([[entry.logprob, *(logprob for _, logprob in entry.top_logprobs)] for entry in entries])


def say(llm: LLM, options: Options) -> list[Output]:
    """Requests side by side."""
    return llm.generate_all(list(TEXTS), options)


def tokens(outputs: list[Output]) -> list[tuple[int, ...]]:
    """What they said."""
    return [output.choices[0].tokens for output in outputs]


def talk(llm: LLM) -> list[str]:
    """A session that is rewound and forked, and one whose turn is left."""
    said = []
    with llm.session() as session:
        for text, seed in (("hello", 1), (" and", 2), (" then", 3)):
            options = Options(max_new_tokens=12, seed=seed, ignore_eos=True)
            said.append("".join(piece.text for piece in session.generate(text, options)))
        session.rewind(turn=1)
        with session.fork() as fork:
            for each in (session, fork):
                pieces = each.generate(" again", Options(max_new_tokens=9, temperature=0))
                said.append("".join(piece.text for piece in pieces))
        next(session.generate("left", Options(max_new_tokens=500, temperature=0, ignore_eos=True)))
        said.append("".join(p.text for p in session.generate("on", Options(max_new_tokens=5, temperature=0))))
    return said


@pytest.mark.parametrize(("spec", "depth"), CELLS)
def test_two_ranks_say_what_one_says(spec: str, depth: int, folder: Path, head: Path) -> None:
    config = config_of(spec, depth, head)
    two_config = replace(config, model=replace(config.model, tp=2))
    with LLM(str(folder), config) as one, LLM(str(folder), two_config) as two:
        for options in (
            Options(max_new_tokens=40, temperature=0, ignore_eos=True),
            Options(max_new_tokens=40, seed=7, top_p=0.9, frequency_penalty=0.5),
            Options(max_new_tokens=20, temperature=0, grammar="start: /[a-d]{3,30}(ef)*/"),
        ):
            assert tokens(say(one, options)) == tokens(say(two, options)), options
        scored = Options(max_new_tokens=12, temperature=0, logprobs=2, prompt_logprobs_from=0)
        np.testing.assert_allclose(numbers(say(two, scored)), numbers(say(one, scored)), atol=NEAR)
        assert talk(one) == talk(two)
        assert one.stats().failed_steps == two.stats().failed_steps == 0


def test_a_step_that_breaks_alike_on_all_ranks_is_tried_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    odd(monkeypatch, "as all")
    breaks = [AT_STEP]

    def broken(self: Runner, plan: StepPlan) -> Finish:
        if plan.step in breaks:
            raise RuntimeError("as the test wants it")
        return summing(self, plan)

    monkeypatch.setattr(Runner, "run", broken)
    llm = start()
    assert (
        len(llm.generate("hello", Options(max_new_tokens=30, temperature=0, ignore_eos=True)).choices[0].tokens) == 30
    )
    assert llm.stats().failed_steps > 0


def test_ranks_compare_what_came_of_so_many_steps(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = RankAgreement.check

    def noted(self: RankAgreement, digest: StepDigest, collected: bytes) -> None:
        checked.append(digest.num_steps)
        check(self, digest, collected)

    monkeypatch.setattr(RankAgreement, "check", noted)
    monkeypatch.setattr(ranks, "BEAT_S", 3600)  # nothing but their number has them compared
    llm = start()
    llm.generate("hello", Options(max_new_tokens=2 * CHECK_STEPS + 1, temperature=0, ignore_eos=True))
    assert checked == [CHECK_STEPS, CHECK_STEPS]
