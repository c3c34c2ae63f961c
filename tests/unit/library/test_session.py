"""Sessions in the library: what a turn inherits, what undoes one, and how they end."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, Options, SchedConfig, SessionConfig
from roost.errors import CapacityError, RequestError
from roost.front.answer import Piece, RepeatedTurn
from roost.library.session import Session
from tests.support.chain_model import save_chain, token
from tests.unit.library.test_llm import idle

GREEDY = Options(temperature=0, max_new_tokens=6)
ENDLESS = Options(temperature=0, ignore_eos=True)
SPELT = ("\n", "h", "e", "12", "!", "<|im_end|>")  # the answer to any message
USER = {"role": "user", "content": "hi"}
CONFIG = EngineConfig(
    model=ModelConfig(weights="fp32", threads=1),
    memory=MemoryConfig(page_size=4, pool_tokens=8192, strict_memory=2),
    sched=SchedConfig(max_running=4),
    session=SessionConfig(max_sessions=8),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain(tmp_path_factory.mktemp("chain"), *SPELT)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), CONFIG) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The same, for a test that must leave nothing behind."""
    yield shared
    stats = idle(shared)
    assert (stats.sessions, stats.pools[0].leased) == (0, 0)


def text(pieces: Iterator[Piece]) -> str:
    """All of a turn's text."""
    return "".join(piece.text for piece in pieces)


def last(pieces: Iterator[Piece]) -> Piece:
    """How a turn ended."""
    (*_, piece) = pieces
    assert piece.finished is not None
    return piece


def usage(pieces: Iterator[Piece]) -> tuple[int, int, int]:
    """Prompt, inherited and new tokens of a turn."""
    finished = last(pieces).finished
    assert finished is not None
    return finished.usage.prompt_tokens, finished.usage.cached_tokens, finished.usage.completion_tokens


def test_each_turn_inherits_all_before_it(llm: LLM) -> None:
    with llm.session() as session:
        assert session.append("xa").prompt_tokens == 2
        assert usage(session.generate("x", GREEDY)) == (3, 2, 6)
        assert usage(session.generate([token("x"), token("h")], GREEDY)) == (11, 9, 4)
        state = session.state()
        assert (state.length, state.turns, state.state) == (15, 3, "idle")
        assert state.resident >= 14
    with pytest.raises(RequestError, match="there is no session"):
        session.state()


def test_a_chat_is_the_same_text_as_one_conversation(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be <|im_end|>"}, USER]
    with llm.session() as session:
        for turn in range(3):
            answer = llm.chat(messages, GREEDY)
            finished = last(session.chat(messages if turn == 0 else messages[-1:], GREEDY)).finished
            assert finished is not None
            assert finished.usage.prompt_tokens == answer.usage.prompt_tokens
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "x" * turn}]
        assert session.append([{"role": "user", "content": "more"}]).cached_tokens > 0
        assert text(session.generate(options=GREEDY)) == "he12!", "an appended message is answered"


def test_a_turn_that_is_left_is_undone_and_the_next_goes_on_from_before(llm: LLM) -> None:
    with llm.session() as session:
        first = text(session.chat([USER], GREEDY))
        before = session.state().length
        for piece in session.chat([USER], ENDLESS):
            if piece.tokens:
                break
        assert (session.state().length, session.state().state) == (before, "idle")
        assert text(session.chat([USER], GREEDY)) == first
        state = session.state()
        added = len(llm.language.chat_tokens([USER])) + 1 + 5  # the line end after the answer before it
        assert (state.turns, state.length) == (2, before + added)


def test_a_turn_that_is_still_read_is_in_the_way(llm: LLM) -> None:
    with llm.session() as session:
        stream = session.generate("x", ENDLESS)
        next(stream)
        for call in (lambda: session.append("y"), session.fork, lambda: session.rewind(turn=0)):
            with pytest.raises(RequestError) as refused:
                call()
            assert refused.value.status == 409
        assert session.state().state == "running"
    assert list(stream)[-1].finished is not None, "closing ends it"


def test_rewind_and_fork_go_on_from_where_they_are(llm: LLM) -> None:
    with llm.session() as session:
        first = text(session.chat([USER], GREEDY))
        length = session.state().length
        text(session.chat([USER], GREEDY))
        with session.fork() as copy:
            assert session.rewind(turn=1).length == length
            assert copy.state().turns == 2
            assert text(session.chat([USER], GREEDY)) == text(copy.chat([USER], GREEDY)) == first
            assert copy.state().length > session.state().length
        session.rewind(length=length - 1)
        with pytest.raises(RequestError, match="the session holds plain text or ids"):
            text(session.chat([USER], GREEDY))
        assert session.rewind(length=0).turns == 0
        assert text(session.chat([USER], GREEDY)) == first


def test_what_cannot_be_done_is_refused_and_the_session_stays(llm: LLM) -> None:
    with llm.session(max_tokens=20) as session:
        text(session.generate("xa", GREEDY))
        calls = {
            "n": lambda: text(session.generate("x", replace(GREEDY, n=2))),
            "tokens": lambda: text(session.generate("x" * 20, GREEDY)),
            "turn": lambda: session.rewind(turn=9),
            "length": lambda: session.rewind(length=99),
            "temperature": lambda: text(session.generate("x", Options(temperature=-1.0))),
        }
        for param, call in calls.items():
            with pytest.raises(RequestError) as refused:
                call()
            assert refused.value.param == param
        with pytest.raises(RequestError, match="must be a text, token ids or messages"):
            session.append([1, "x"])  # type: ignore[list-item]
        assert usage(session.generate("x", GREEDY))[:2] == (9, 8)
    with pytest.raises(RequestError, match="ttl_s: must be"):
        llm.session(ttl_s=0)


def test_a_turn_sent_twice_is_made_once(llm: LLM) -> None:
    with llm.session() as session:
        used = session.append("xa", turn=0)
        made = usage(session.generate("x", GREEDY, turn=1))
        for call in (lambda: session.append("xa", turn=0), lambda: text(session.generate("x", GREEDY, turn=0))):
            with pytest.raises(RepeatedTurn) as repeated:
                call()
            assert (repeated.value.status, repeated.value.usage) == (409, used)
        with pytest.raises(RequestError, match=r"the next turn of .* is 2"):
            text(session.generate("x", GREEDY, turn=3))
        assert session.state().turns == 2 and session.state().length == sum(made) - made[1]


def test_a_turn_without_anything_new_leaves_a_chat_a_chat(llm: LLM) -> None:
    with llm.session() as session:
        first = text(session.chat([USER], GREEDY))
        session.append("")
        session.append([])
        assert usage(session.generate("", GREEDY))[2] > 0
        with pytest.raises(RequestError, match="messages: must hold at least 1"):
            session.chat([])
        assert text(session.chat([USER], GREEDY)) == first


def test_sessions_without_a_name_get_one_that_nobody_else_has(llm: LLM) -> None:
    named = [llm.session(id=f"session-{number}") for number in range(3)]
    with llm.session() as session, session.fork() as copy:
        assert len({session.id, copy.id, *(each.id for each in named)}) == 5
    for each in named:
        each.close()


def test_sessions_have_names_and_there_are_so_many(llm: LLM) -> None:
    sessions: list[Session] = [llm.session(id="mine")]
    with pytest.raises(RequestError, match="'mine' is open already"):
        llm.session(id="mine")
    sessions += [llm.session() for _ in range(7)]
    with pytest.raises(CapacityError, match="--max-sessions"):
        llm.session()
    for session in sessions:
        session.close()
        session.close()


def test_a_session_outlives_its_engine_quietly(folder: Path) -> None:
    llm = LLM(str(folder), CONFIG)
    with llm.session() as session:
        stream = session.generate("x", ENDLESS)
        next(stream)
        llm.close()
        with pytest.raises(CapacityError, match="the engine has ended"):
            session.state()


def test_a_session_goes_on_in_another_engine_with_its_messages(folder: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, session=SessionConfig(journal=str(tmp_path / "journal")))
    with LLM(str(folder), config) as llm:
        session = llm.session(id="walk")
        first = text(session.chat([USER], GREEDY))
        with pytest.raises(RequestError, match="is open already"):
            llm.session(id="walk")
        for _ in session.chat([USER], ENDLESS):
            break
        session.append([USER])
        before = session.state()
    with LLM(str(folder), config) as llm:
        session = llm.resume("walk")
        assert replace(session.state(), idle_ms=0, resident=before.resident) == replace(before, idle_ms=0)
        with pytest.raises(RepeatedTurn):
            session.append([USER], turn=1)
        with session:
            assert text(session.generate(None, GREEDY)) == text(session.chat([USER], GREEDY)) == first
            assert session.state().turns == 4
        with pytest.raises(RequestError, match="there is no session 'walk'"):
            llm.resume("walk")
