"""The list of options: for each one a check that it is exact, whatever the mode of speculation, or refused.

The tests run every check, and the table of docs/OPTIONS.md is what came of them. Options of a request come first, then
what may happen to a request, then what the server refuses because nobody here can do it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import msgspec

from roost.errors import RequestError
from roost.front.options import Options, submits
from roost.messages import Abort, OpenSession, Refused, Submit
from roost.sampling.params import SamplingParams
from roost.server import schema
from tests.support import option_requests as option_asks
from tests.support.spec_engines import TOKENIZER, Setting, Speculating, expected, repetitive

SEEDED = SamplingParams(temperature=0.5, frequency_penalty=0.2, seed=71)
GREEDY = SamplingParams(temperature=0)
MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    says: str  # what was tried
    check: Callable[[Setting], None]
    refused: bool = False  # then the check is that it is


def some(number: int = 5, seed: int = 60, num_new: int = 14) -> list[Submit]:
    """Requests of no particular kind: greedy and seeded, one with logprobs."""
    return [
        Submit(
            request_id=f"r{i}",
            tokens=prompt,
            max_new_tokens=num_new,
            sampling=replace(SEEDED, seed=i) if i % 2 else GREEDY,
            num_top_logprobs=2 if i == 1 else None,
        )
        for i, prompt in enumerate(repetitive(number, seed=seed))
    ]


# --- options of a request --------------------------------------------------------------------------------------


@cache
def side_by_side(setting: Setting) -> Speculating:
    """All requests of `option_asks`, served at the same time."""
    served = Speculating(setting)
    served.serve(option_asks.asked(setting.kind))
    return served


def _among_all(option: str, setting: Setting) -> None:
    side_by_side(setting).check(option_asks.of(option, setting.kind))


def _priority(setting: Setting) -> None:
    asks = [replace(each, priority=number) for number, each in enumerate(some())]
    served = Speculating(setting, max_running=2)
    served.serve(asks)
    served.check(asks)
    admitted = [subject for kind, subject, _ in served.notes if kind == "admit"]
    assert admitted == [each.request_id for each in reversed(asks)]


def _timeout(setting: Setting) -> None:
    """One runs out of time, one has enough, some have no limit."""
    late, early, *others = some(num_new=30)
    late, early = replace(late, timeout_ms=6), replace(early, timeout_ms=10**6)
    served = Speculating(setting)
    for submit in (late, early, *others):
        served.post(submit)
    while served.engine.has_work:
        served.engine.tick()
        served.clock.advance(MS)
    served.check([early, *others])
    _assert_cut_short(served, late, "timeout")


def _assert_cut_short(served: Speculating, submit: Submit, reason: str) -> None:
    """What came of a request before it was ended is the beginning of its output."""
    got, whole = served.output(submit.request_id), expected(submit, served.setting.kind)[0]
    assert served.finish(submit.request_id).reason == reason
    assert 0 < len(got) < len(whole) and got == whole[: len(got)]


def _outputs_of_one_prompt(setting: Setting) -> None:
    (prompt,) = repetitive(1, seed=62, length=19)
    options = Options(n=4, max_new_tokens=12, temperature=0.5, presence_penalty=0.3, seed=5, ignore_eos=True)
    asks = submits("r", prompt, options, TOKENIZER)
    served = Speculating(setting)
    served.serve(asks)
    served.check(asks)
    cached = [served.finish(each.request_id).usage.cached_tokens for each in asks]
    assert cached == [0] + [_found(setting, len(prompt), len(prompt))] * 3


def _found(setting: Setting, shared_len: int, prompt_len: int) -> int:
    """Tokens found of a prompt that has `shared_len` in common with one served before.

    With pairs the last common slot stands for a token that is not common. The last token always runs.
    """
    slots = shared_len - setting.shape.pair
    return min(slots, prompt_len - 1) // setting.page_size * setting.page_size


def _turns(queued: bool, setting: Setting) -> None:
    """Three turns of a session, beside others; each is what its whole history as a prompt gives."""
    served, others = Speculating(setting), some()
    served.post(OpenSession(session_id="s"))
    asks = [
        replace(each, request_id=f"turn{number}", session_id="s", queue=queued)
        for number, each in enumerate(some(3, seed=63, num_new=9))
    ]
    for submit in others:
        served.post(submit)
    for submit in asks:
        served.post(submit)
        if not queued:
            served.run()
    served.run()
    served.check(others)
    history: tuple[int, ...] = ()
    for submit in asks:
        alone = replace(submit, tokens=history + submit.tokens, session_id=None, queue=False)
        served.check([alone], accepts=False)
        history = alone.tokens + served.output(submit.request_id)
    assert not setting.expects_accepts or served.num_accepted(asks) > 0


def _numbers(setting: Setting) -> None:
    """Three numbered turns, each sent twice: the copy is refused with what the first one cost."""
    served = Speculating(setting)
    history: tuple[int, ...] = ()
    served.post(OpenSession(session_id="s"))
    for number, each in enumerate(some(3, seed=66, num_new=9)):
        turn = replace(each, request_id=f"turn{number}", session_id="s", turn=number)
        served.serve([turn])
        served.post(replace(turn, request_id=f"again{number}"))
        served.run()
        alone = replace(turn, tokens=history + turn.tokens, session_id=None, turn=None)
        served.check([alone], accepts=False)
        history = alone.tokens + served.output(turn.request_id)
        refused = [event for event in served.events if isinstance(event, Refused)]
        assert [event.request_id for event in refused] == [f"again{past}" for past in range(number + 1)]
        assert refused[-1].status == 409 and refused[-1].usage == served.finish(turn.request_id).usage


def _salt(setting: Setting) -> None:
    (prompt,) = repetitive(1, seed=64, length=21)
    asks = [replace(each, tokens=prompt, cache_salt=salt) for each, salt in zip(some(4), "abab", strict=True)]
    served = Speculating(setting)
    for submit in asks:
        served.serve([submit])
    served.check(asks)
    found = _found(setting, len(prompt), len(prompt))
    assert [served.finish(each.request_id).usage.cached_tokens for each in asks] == [0, 0, found, found]


# --- what may happen to a request ------------------------------------------------------------------------------


def _served_with(setting: Setting, *, preempt_ticks: int = 0, num_new: int = 14, **changes: int | bool) -> Speculating:
    """Some requests under a changed configuration."""
    asks = some(4, num_new=num_new)
    asks[3] = replace(asks[3], prompt_logprobs_from=2)
    served = Speculating(setting, **changes)
    served.serve(asks, preempt_ticks)
    served.check(asks)
    return served


def _chunks(setting: Setting) -> None:
    _served_with(setting, chunk=5, max_running=3)


def _no_mixed(setting: Setting) -> None:
    _served_with(setting, chunk=5, max_running=3, mixed=False)


def _preemptions(setting: Setting) -> None:
    # in small chunks a prompt would take longer than it is left to run, and never come to its end
    assert _served_with(setting, preempt_ticks=3, chunk=512).count("suspend") > 3


def _too_few_pages(setting: Setting) -> None:
    shape, num_new = setting.shape, 60
    need = 14 + num_new + shape.alloc_len_per_decode + shape.accept_max  # of one, at its end
    served = _served_with(setting, num_new=num_new, pool_tokens=need * 8 // 5, context=96)
    if setting.page_size <= 4:  # the reserve of a tree on large pages keeps a second request out from the start
        assert served.count("suspend") > 0


def _max_batch(setting: Setting) -> None:
    changes = {"spec_max_batch": 3} if setting.shape.speculates else {}  # without drafts it is refused at start
    served, asks = Speculating(setting, **changes), some(7)
    asks = [replace(each, max_new_tokens=6 + 3 * number) for number, each in enumerate(asks)]
    served.serve(asks)
    served.check(asks)
    if setting.shape.speculates and setting.chunk > 14:  # all start at once, without drafts; the last ones get some
        assert served.finish("r0").spec.rounds == 0 and served.finish("r6").spec.rounds > 0


def _abort(setting: Setting) -> None:
    gone, *others = some(num_new=30)
    served = Speculating(setting)
    for submit in (gone, *others):
        served.post(submit)
    while not served.output(gone.request_id):
        served.engine.tick()
    served.engine.tick()
    served.post(Abort(request_id=gone.request_id))
    served.run()
    served.check(others)
    _assert_cut_short(served, gone, "abort")


def _prefix_cache(setting: Setting) -> None:
    (first,) = repetitive(1, seed=65, length=26)
    asks = some(7)
    for number, shared_len in enumerate((26, 25, 24, 21, 20, 9), start=1):
        tail = tuple((token + 7) % 90 + 3 for token in first[shared_len:])
        asks[number] = replace(asks[number], tokens=first[:shared_len] + tail)
    asks[0] = replace(asks[0], tokens=first)
    served = Speculating(setting)
    for submit in asks:
        served.serve([submit])
    served.check(asks)
    cached = [served.finish(each.request_id).usage.cached_tokens for each in asks]
    found = [0] + [_found(setting, shared_len, 26) for shared_len in (26, 25, 24, 21, 20, 9)]
    if served.engine.state.resolved.states is None:
        assert cached == found
    else:  # as far as a state was kept
        assert all(0 <= own <= most for own, most in zip(cached, found, strict=True)) and cached[1] > 0


def _windows(setting: Setting) -> None:
    """Layers with sliding windows beside full ones."""
    setting = replace(setting, kind="gemma3")
    served, asks = Speculating(setting, chunk=5), some(6, seed=68, num_new=20)
    served.serve(asks)
    served.check(asks)


# --- what the server refuses -----------------------------------------------------------------------------------


def _refused(body: type[msgspec.Struct], setting: Setting) -> None:
    """Whatever the engine's mode: the server turns each of these fields away by name."""
    needed = {"messages": [], "prompt": "", "role": "user", "type": "text"}
    given = {name: needed[name] for name in body.__struct_fields__ if name in needed}
    for field in schema.UNSUPPORTED[body]:
        try:
            schema.refuse_unsupported(body(**{**given, field: "anything"}))
        except RequestError as error:
            assert (error.status, error.param) == (400, field)
        else:
            raise AssertionError(f"{field} was not refused")


def _refusals() -> dict[str, Case]:
    """A line for the fields of each body that the server knows and cannot do."""
    lines: dict[str, Case] = {}
    for body, names in schema.UNSUPPORTED.items():
        says = f"400, by name: {', '.join(f'`{name}`' for name in names)}"
        lines[body.__name__] = Case(says=says, check=partial(_refused, body), refused=True)
    return lines


def _ask(option: str, says: str) -> Case:
    return Case(says=says, check=partial(_among_all, option))


OPTIONS: dict[str, Case] = {
    "temperature": _ask("temperature", "0, nearly 0, 0.5, 1 and 2"),
    "top_k": _ask("top_k", "1, 3, more than the vocabulary"),
    "top_p": _ask("top_p", "0.01, 0.6 and 0.9"),
    "min_p": _ask("min_p", "0.1, 0.3 and 0.5"),
    "repetition_penalty": _ask("repetition_penalty", "greedy and drawn, repetition avoided and sought"),
    "presence_penalty": _ask("presence_penalty", "greedy and drawn, both signs"),
    "frequency_penalty": _ask("frequency_penalty", "greedy and drawn, both signs, with the other penalties and top-k"),
    "logit_bias": _ask("logit_bias", "towards and away, greedy and drawn, with a penalty"),
    "seed": _ask("seed", "five, up to the largest"),
    "max_new_tokens": _ask("max_new_tokens", "0 to 7: also cut inside an accepted run"),
    "min_new_tokens": _ask("min_new_tokens", "stop ids held back, greedy, drawn and penalised"),
    "stop_token_ids": _ask("stop_token_ids", "met inside an accepted run, greedy and drawn"),
    "stop": _ask("stop", "texts over two tokens, inside an accepted run, after min_new_tokens, beside stop ids"),
    "stop_in_special": _ask("stop_in_special", "a special token's text, counted and not"),
    "logprobs": _ask("logprobs", "values within 1e-4, alternatives' ids equal; under penalties and top-k too"),
    "grammar": _ask(
        "grammar", "a schema, a choice and a regular expression, with and without an end; greedy and drawn"
    ),
    "prompt_logprobs_from": _ask("prompt_logprobs_from", "from the start, from inside, without output"),
    "priority": Case(says="two run at a time, five priorities", check=_priority),
    "timeout_ms": Case(says="one runs out of time, one does not", check=_timeout),
    "shares_with": Case(says="n = 4: each output as alone, cached tokens as predicted", check=_outputs_of_one_prompt),
    "session_id": Case(says="three turns, each as its whole history", check=partial(_turns, False)),
    "queue": Case(says="three turns sent at once", check=partial(_turns, True)),
    "turn": Case(says="three turns, each sent twice: the copy does not run", check=_numbers),
    "cache_salt": Case(says="two salts, one prompt: cached tokens as predicted", check=_salt),
}
CIRCUMSTANCES: dict[str, Case] = {
    "chunked prefill": Case(says="chunks of 5, mixed steps", check=_chunks),
    "--no-mixed": Case(says="prefill in steps of its own", check=_no_mixed),
    "preempt": Case(says="all that run, every 3 ticks", check=_preemptions),
    "too few pages": Case(says="preemptions for want of pages", check=_too_few_pages),
    "--spec-max-batch": Case(says="3, seven requests", check=_max_batch),
    "abort": Case(says="of one in flight, among others", check=_abort),
    "prefix cache": Case(says="prompts with 9 to 26 tokens in common: cached tokens as predicted", check=_prefix_cache),
    "sliding window": Case(says="window and full layers, chunks of 5", check=_windows),
}
REFUSED: dict[str, Case] = _refusals()
CASES: dict[str, Case] = {**OPTIONS, **CIRCUMSTANCES, **REFUSED}
