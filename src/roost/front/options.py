"""Options of a generation as people give them, and the requests that the engine gets for them.

One record for every interface: what a caller may ask for is listed here, and of sampling in `sampling.params`. Types
are checked here, ranges by the engine, which refuses by the same names. Called by the server's endpoints, the library
and the command line.
"""

import secrets
from dataclasses import dataclass

from roost.errors import RequestError
from roost.messages import Submit
from roost.sampling.params import SEED_END, SamplingFields, SamplingParams, parameter
from roost.text.tokenizer import Tokenizer
from roost.values import fitted, real, shown

N_MAX = 64
# what OpenAI's bodies call an option, where they have another word
OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "timeout_s": "timeout"}
TIMEOUT_S_MIN = 0.001
_SEED_STRIDE = 0x9E3779B97F4A7C15  # outputs of one request get seeds far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SamplingFields):
    """What a generation may be asked for, with every sampling parameter."""

    seed: int | None = parameter(None, help="the same gives the same text; a new one if absent")
    max_new_tokens: int | None = parameter(None, help="tokens of the answer, at most")  # None: what the context allows
    min_new_tokens: int = 0  # nothing stops the output before
    stop: tuple[str, ...] = parameter((), help="a text that ends the output; repeatable", metavar="TEXT")
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # in the text that comes back
    no_stop_trim: bool = False  # the text keeps the stop that ended it
    n: int = 1  # outputs of one prompt
    logprobs: int | None = None  # alternatives with each token's log-probability; None: neither
    prompt_logprobs_from: int | None = None  # first prompt token of interest
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""  # cached prefixes are shared only under the same salt
    grammar: str = ""  # what the output must match (`grammar.forms` makes such texts); "": anything


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOf:
    """Which session a generation is a turn of."""

    session_id: str
    number: int | None = None  # the turn's; one that was committed already is not made again
    queue: bool = False  # wait for the session if it is busy


def submits(
    request_id: str, tokens: tuple[int, ...], options: Options, tokenizer: Tokenizer, turn: TurnOf | None = None
) -> list[Submit]:
    """The engine's requests for one prompt: one per output, those after the first sharing its prompt."""
    options = plain_options(options)
    if turn is not None and options.n != 1:
        raise RequestError(400, "n", f"must be 1: a turn of a session has one output, got {options.n}")
    if not 1 <= options.n <= N_MAX:
        raise RequestError(400, "n", f"must be in [1, {N_MAX}], got {options.n}")
    _check_beside_grammar(options)
    stop_ids = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else tokenizer.eos_ids)
    first_seed = options.seed if options.seed is not None else secrets.randbelow(SEED_END)
    asked = []
    for number in range(options.n):
        seed = first_seed if number == 0 else (first_seed + number * _SEED_STRIDE) % SEED_END
        submit = Submit(
            request_id=request_id if number == 0 else f"{request_id}#{number}",
            tokens=tokens,
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens,
            sampling=SamplingParams.of(options, seed),
            stop_token_ids=stop_ids,
            stop=options.stop,
            stop_in_special=not options.skip_special_tokens,
            num_top_logprobs=options.logprobs,
            prompt_logprobs_from=options.prompt_logprobs_from if number == 0 else None,
            priority=options.priority,
            timeout_ms=None if options.timeout_s is None else milliseconds("timeout", options.timeout_s),
            shares_with=None if number == 0 else request_id,
            session_id=None if turn is None else turn.session_id,
            queue=turn is not None and turn.queue,
            turn=None if turn is None else turn.number,
            cache_salt=options.cache_salt,
            grammar=options.grammar,
        )
        asked.append(submit)
    return asked


def _check_beside_grammar(options: Options) -> None:
    """Refuse what would go on where a grammar has ended: nothing but end tokens may come there."""
    for name, is_given in (("ignore_eos", options.ignore_eos), ("min_new_tokens", options.min_new_tokens > 0)):
        if options.grammar and is_given:
            raise RequestError(400, name, "cannot be given with a grammar, a response format or tools")


def plain_options(options: Options) -> Options:
    """The options in plain values; raises RequestError for the first that is not of its type."""
    if not isinstance(options, Options):
        raise RequestError(400, "options", f"must be Options, got {shown(options)}")
    return fitted(options)


def milliseconds(param: str, seconds: float) -> int:
    """A time that a caller gave, in milliseconds."""
    seconds = real(param, seconds)
    if not TIMEOUT_S_MIN <= seconds <= 1e9:
        raise RequestError(400, param, f"must be in [{TIMEOUT_S_MIN}, 1e9] seconds, got {seconds}")
    return int(seconds * 1000)
