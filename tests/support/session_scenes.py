"""Scenes of sessions: what clients do to one engine, whatever drafts, pages, layers and load it has.

Each plays on an engine at rest. What every scene must leave behind is checked by `Talks`; a scene itself asserts only
what it is about. Used by the tests of sessions on the real engine.
"""

from collections.abc import Callable

from roost.config.options import SessionConfig
from roost.messages import ForkSession, GetSession, OpenSession, Refused, RewindSession, SessionState
from tests.support.session_clients import Asked, Talks
from tests.support.session_matrix import MAX_RUNNING, Cell
from tests.support.slow_reference import next_tokens
from tests.support.spec_engines import text_of
from tests.support.tiny_models import VOCAB

Scene = Callable[[Talks], None]


# --- turns that end well ---------------------------------------------------------------------------------------------


def turns(talks: Talks) -> None:
    """What a turn inherits is predicted: ends by length, no output, one token, no input, a stop at once."""
    talks.begin("s")
    talk = talks.talks["s"]
    for num_in, num_new in ((21, 4), (5, 1), (3, 0), (1, 6), (0, 3), (30, 9), (2, 2)):
        assert talks.turn("s", num_in, num_new).finished.reason == "length"
    tokens = talks.prompt(6)
    (first,) = next_tokens(talks.cell.kind, talk.tokens + tokens, 1, talks.cell.kv_cache_dtype)
    asked = talks.turn("s", tokens, 9, stop_token_ids=frozenset([first]))
    assert (asked.finished.reason, asked.finished.matched, asked.tokens) == ("stop", first, (first,))
    assert len(talks.turn("s", 4, 7).tokens) == 7  # its own limit, not one of those before it
    assert talk.num_turns == 9


def stop_strings(talks: Talks) -> None:
    """A stop string ends a turn inside an accepted run; the session inherits tokens, not text."""
    talks.begin("s")
    for num_in in (19, 4, 5):
        tokens = talks.prompt(num_in, first=num_in == 19)
        said = next_tokens(talks.cell.kind, talks.talks["s"].tokens + tokens, 5, talks.cell.kv_cache_dtype)
        stop = text_of(said[2:4], in_special=True)
        end = next(end for end in range(1, 6) if stop in text_of(said[:end], in_special=True))
        asked = talks.turn("s", tokens, 12, stop=(stop,), stop_in_special=True)
        assert (asked.finished.reason, asked.finished.matched, asked.tokens) == ("stop", stop, said[:end])


def logprobs(talks: Talks) -> None:
    """Sessions side by side: log-probabilities of outputs, of prompts, and none."""
    talks.begin("out", "in", "none")
    for num_in in (14, 5, 6):
        talks.say("out", num_in, 6, num_top_logprobs=3)
        talks.say("in", num_in, 5, num_top_logprobs=2, prompt_logprobs_from=0)
        talks.say("none", num_in, 7)
        talks.finish_all()


def together(talks: Talks) -> None:
    """Turns and plain requests under load, more than can run at once."""
    names = [f"s{number}" for number in range(MAX_RUNNING + 1)]
    talks.begin(*names)
    for wave in range(3):
        for number, name in enumerate(names):
            talks.say(name, 3 + 5 * ((wave + number) % 4), 2 + (7 * wave + 3 * number) % 8, priority=number % 2)
        talks.tick(2)
        for number in range(2):
            talks.say(None, 11 + 9 * number, 5 + wave)
        talks.finish_all()
        talks.assert_at_rest()


def waits(talks: Talks) -> None:
    """Turns that wait for their session run one after the other, each on what the one before committed."""
    talks.begin("s")
    talks.turn("s", 17, 3)
    asked = [talks.say("s", 4, 5, queue=True) for _ in range(3)]
    talks.finish_all()
    assert [each.finished.usage.prompt_tokens for each in asked] == [24, 33, 42]


# --- turns that do not -----------------------------------------------------------------------------------------------


def aborts(talks: Talks) -> None:
    """A later turn aborted in prefill and in rounds: back to the commit point, KV kept."""
    talks.begin("s")
    talks.turn("s", 25, 4)
    for num_ticks in (1, 2, 3, 5, 8):
        committed = talks.talks["s"].tokens
        gone = talks.say("s", 12, 40)
        talks.tick(num_ticks)
        talks.abort(gone)
        talks.finish_all()
        assert (gone.finished.reason, talks.talks["s"].tokens) == ("abort", committed)
        talks.assert_at_rest()
        talks.turn("s", 3, 4)


def first_aborts(talks: Talks) -> None:
    """The first turn aborted in prefill and in rounds: an empty session, and nothing pinned."""
    for num_ticks in (1, 2, 4, 7):
        name = f"s{num_ticks}"
        talks.begin(name)
        gone = talks.say(name, 33, 40)
        talks.tick(num_ticks)
        talks.abort(gone)
        talks.finish_all()
        assert gone.finished.reason == "abort"
        talks.assert_at_rest()
        talks.turn(name, 9, 3)
        talks.turn(name, 3, 3)


def _blockers(talks: Talks) -> list[Asked]:
    """All places taken for a while."""
    blockers = [talks.say(None, 9, 25) for _ in range(MAX_RUNNING)]
    talks.tick()
    return blockers


def queue_aborts(talks: Talks) -> None:
    """Turns aborted in the queue, a first one and a later one: the sessions are free at once."""
    talks.begin("new", "old")
    talks.turn("old", 15, 4)
    blockers = _blockers(talks)
    gone = [talks.say(name, 8, 5) for name in ("new", "old")]
    talks.tick()
    for each in gone:
        talks.abort(each)
    talks.tick()
    assert [(each.finished.reason, each.tokens) for each in gone] == [("abort", ())] * 2
    after = [talks.say(name, 4, 3) for name in ("new", "old")]  # taken, not 409
    talks.finish_all()
    assert [each.finished.reason for each in blockers + after] == ["length"] * (len(blockers) + 2)


def disconnects(talks: Talks) -> None:
    """The client goes and its next turn is there at once: it goes on from the commit point."""
    talks.begin("s")
    talks.turn("s", 20, 3)
    for num_ticks in range(6):
        committed = len(talks.talks["s"].tokens)
        gone = talks.say("s", 7, 40)
        talks.tick(num_ticks)
        talks.abort(gone)
        after = talks.say("s", 4, 3)
        talks.finish_all()
        assert (gone.finished.reason, after.finished.usage.prompt_tokens) == ("abort", committed + 4)
        talks.assert_at_rest()


def refusals(talks: Talks) -> None:
    """A turn that is refused before it starts touches neither its session nor the turn that has it."""
    talks.begin("s")
    first = talks.turn("s", 20, 5, turn=0)
    context = talks.cell.context

    def refused() -> list[int]:
        asked = [
            talks.say("s", 3, context),  # too long
            talks.say("s", talks.prompt(context), 1),
            talks.say("s", (VOCAB,), 4),  # bad values
            talks.say("s", 3, -1),
            talks.say("s", 3, 4, cache_salt="other"),
            talks.say("nobody", 3, 4),
        ]
        talks.tick()
        return [each.refused.status for each in asked]

    assert refused() == [413, 413, 400, 400, 400, 404]
    repeated, too_early = talks.say("s", 3, 4, turn=0), talks.say("s", 3, 4, turn=2)
    talks.tick()
    assert (repeated.refused.status, too_early.refused.status) == (409, 409)
    assert repeated.refused.usage == first.finished.usage
    talks.assert_at_rest()
    running = talks.say("s", 6, 20)
    talks.tick(3)
    busy = [talks.say("s", 2, 2) for _ in range(2)]
    talks.tick()
    assert [each.refused.status for each in busy] == [409, 409]
    assert refused()[2:] == [400, 400, 400, 404]
    talks.finish_all()
    assert len(running.tokens) == 20
    talks.turn("s", 4, 4)


def over_length(talks: Talks) -> None:
    """Turns that are too long, again and again, cost a session nothing; one that just fits still runs."""
    talks.begin("s")
    talks.turn("s", talks.cell.context - 60, 3)
    for _ in range(3):
        too_long = [talks.say("s", 58, 0), talks.say("s", 5, 53), talks.say("s", talks.cell.context, 1)]
        talks.tick()
        for each in too_long:
            assert each.refused.status == 413 and "maximum allowed length" in each.refused.message
        talks.assert_at_rest()
        talks.turn("s", 2, 3)
    rest = talks.cell.context - len(talks.talks["s"].tokens)
    assert len(talks.turn("s", 5, rest - 5).tokens) == rest - 5
    full = talks.say("s", 1, 0)
    talks.finish_all()
    assert full.refused.status == 413


def closes(talks: Talks) -> None:
    """A session closed under its turn, in prefill and in rounds: the turn ends, then it is gone."""
    for num_ticks in (0, 1, 2, 4, 7):
        talks.begin("s", "other")
        talks.turn("s", 13, 3)
        beside = talks.say("other", 9, 8)
        running, waiting = talks.say("s", 8, 40), talks.say("s", 3, 3, queue=True)
        talks.tick(num_ticks)
        talks.end("s")
        assert running.finished.reason == "abort" and waiting.refused.status == 410
        assert len(beside.tokens) == 8
        talks.assert_at_rest()
        talks.end("other")


# --- idle sessions ---------------------------------------------------------------------------------------------------


def crowd(talks: Talks) -> None:
    """More sessions than rows and than pages: all get their turns, and go on after their pages were taken."""
    num_pages = talks.engine.state.resolved.books[0].num_pages
    tokens_each = 24
    number = min(16, num_pages // -(-tokens_each // talks.cell.page_size)) + 3
    names = [f"s{index}" for index in range(number)]
    talks.begin(*names)
    for num_in in (18, 3):
        for name in names:
            talks.say(name, num_in, 3)
        talks.finish_all()
    large = talks.say(None, 40, 8)
    talks.finish_all()
    assert len(large.tokens) == 8


def ttl(talks: Talks) -> None:
    """An idle session is closed when its time is up, counted from its last turn's end; one with a turn is not."""
    talks.begin("s", "other", ttl_ms=1000)
    for _ in range(2):
        talks.turn("s", 11, 3)
        talks.clock.advance(900_000_000)
        talks.tick()
        assert isinstance(talks.answer(GetSession(session_id="s")), SessionState)
    del talks.talks["other"]  # its time was up
    running = talks.say("s", 5, 12)
    talks.tick(3)
    talks.clock.advance(5_000_000_000)
    talks.finish_all()
    assert running.finished.reason == "length"
    talks.assert_at_rest()
    talks.clock.advance(1_000_000_000)
    talks.tick()
    del talks.talks["s"]
    gone = talks.answer(GetSession(session_id="s"))
    assert isinstance(gone, Refused) and gone.status == 404


def limits(talks: Talks) -> None:
    """As many sessions as there may be; idle ones keep no more KV than they may, and the last used keep theirs."""
    names, most = ["a", "b", "c"], LIMITS.max_resident_tokens
    talks.begin(*names)
    table = talks.engine.state.sessions.table
    for command in (OpenSession(session_id="d"), ForkSession(session_id="a", new_id="d")):
        refused = talks.answer(command)
        assert isinstance(refused, Refused) and refused.status == 429 and "--max-sessions" in refused.message
    for num_in in (21, 4, 5):
        for name in names:
            talks.turn(name, num_in, 4)
            talks.assert_at_rest()
            kept = {each.id: each.lease.settled_len for each in table.values() if each.lease is not None}
            assert name in kept and most is not None and sum(kept.values()) <= most
    assert talks.engine.state.sessions.num_reclaimed > 0
    talks.end("a")
    talks.begin("d")
    talks.turn("d", 9, 3)


# --- rewind and fork -------------------------------------------------------------------------------------------------


def _rewind(talks: Talks, **point: int) -> SessionState:
    """Rewind the session and what its client knows."""
    state = talks.answer(RewindSession(session_id="s", **point))
    assert isinstance(state, SessionState), state
    talk = talks.talks["s"]
    talk.tokens, talk.num_turns = talk.tokens[: state.length], state.turns
    # a shared page is not written, and a window may be gone: then less
    talk.kept, talk.is_exact = min(talk.kept, state.length), False
    assert state.resident <= talk.kept
    return state


def rewinds(talks: Talks) -> None:
    """A rewound session goes on from where it was then, by turns and by tokens, and to its start."""
    talks.begin("s")
    lengths = []
    for num_in in (22, 9, 12, 5, 14):
        talks.turn("s", num_in, 4)
        lengths.append(len(talks.talks["s"].tokens))
    assert _rewind(talks, turn=4).length == lengths[3]
    talks.assert_at_rest()
    talks.turn("s", 3, 5)
    state = _rewind(talks, length=lengths[1] + 3)
    assert (state.length, state.turns) == (lengths[1] + 3, 2)
    if talks.cell.layers == "full":  # pages past the first prompt are the session's own, but for preempted turns
        whole = (state.length - 1) // talks.cell.page_size * talks.cell.page_size
        assert state.resident >= (whole if talks.cell.load == "preemptions" else state.length)
    talks.turn("s", 7, 6)
    talks.turn("s", 2, 3)
    assert _rewind(talks, turn=1).length == lengths[0]
    talks.turn("s", 1, 4)
    assert _rewind(talks, turn=0).length == 0
    talks.assert_at_rest()
    talks.turn("s", 9, 3)


def forks(talks: Talks) -> None:
    """A fork and its source go on apart, both from the same tokens; whole pages are shared."""
    talks.begin("s")
    for num_in in (22, 13):
        talks.turn("s", num_in, 4)
    source, page_size = talks.talks["s"], talks.cell.page_size
    for name in ("one", "two"):
        state = talks.answer(ForkSession(session_id="s", new_id=name))
        assert isinstance(state, SessionState) and state.length == len(source.tokens), state
        talks.talks[name] = type(source)(tokens=source.tokens, num_turns=source.num_turns, kept=source.kept)
    talks.assert_at_rest()
    whole = (source.kept - 1) // page_size * page_size
    asked = [talks.say(name, 5, 6) for name in ("s", "one", "two")]
    talks.finish_all()
    if talks.cell.layers == "full":
        assert all(each.finished.usage.cached_tokens >= whole for each in asked)
    talks.end("s")
    for name in ("one", "two", "one"):
        talks.turn(name, 4, 3)


def own_limits(talks: Talks) -> None:
    """A session's own limit: what would pass it is refused, what just fits runs; a fork has it, a rewind makes room."""
    talks.begin("s", max_tokens=40)
    talks.turn("s", 20, 5)

    def assert_full(name: str, *too_long: tuple[int, int]) -> None:
        asked = [talks.say(name, num_in, num_new) for num_in, num_new in too_long]
        talks.tick()
        for each in asked:
            assert each.refused.status == 413 and "max_tokens 40" in each.refused.message

    assert_full("s", (16, 0), (10, 6), (1, 40))
    talks.assert_at_rest()
    assert len(talks.turn("s", 10, 5).tokens) == 5
    assert_full("s", (1, 0), (0, 1))
    source = talks.talks["s"]
    state = talks.answer(ForkSession(session_id="s", new_id="copy"))
    assert isinstance(state, SessionState) and state.max_tokens == 40, state
    talks.talks["copy"] = type(source)(tokens=source.tokens, num_turns=source.num_turns, kept=source.kept)
    assert_full("copy", (1, 0))
    _rewind(talks, turn=1)
    assert_full("s", (10, 6))
    talks.turn("s", 3, 12)


LIMITS = SessionConfig(max_sessions=3, max_resident_tokens=70)
SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (
        *(turns, stop_strings, logprobs, together, waits),
        *(aborts, first_aborts, queue_aborts, disconnects, refusals, over_length, closes),
        *(crowd, ttl, rewinds, forks, limits, own_limits),
    )
}


def play(cell: Cell, *names: str) -> Talks:
    """Play scenes one after the other on one engine; after each, every page is back."""
    talks = Talks(cell)
    for name in names:
        own = _engine_of(cell, name)
        SCENES[name](own or talks)
        (own or talks).wind_up()
        if own is not None:
            own.executor.close()
    talks.executor.close()
    return talks


def _engine_of(cell: Cell, name: str) -> Talks | None:
    """The engine of a scene that needs one of its own: as small as it can be, or with limits."""
    match name:
        case "crowd":
            return Talks(cell, max_running=1, context=96)
        case "limits":
            return Talks(cell, limits=LIMITS)
        case _:
            return None
