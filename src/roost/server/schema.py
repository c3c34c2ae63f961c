"""Schemas: what each endpoint accepts, field by field; anything else is refused by name.

Fields that other servers know and this one does not support are listed too, so that they are refused with a reason
unless they say what would happen anyway. Called by the endpoints; the fuzz test reads them.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from roost.errors import RequestError
from roost.front.options import Options
from roost.sampling import LOGIT_BIAS_ENTRIES_MAX, SEED_END
from roost.sched.intake import STOP_IDS_MAX, STOP_LEN_MAX, STOPS_MAX

Number = TypeVar("Number", int, float)

# Every output of a request carries these to the engine, so their size is bounded here already.
StopText = Annotated[str, Meta(min_length=1, max_length=STOP_LEN_MAX)]
StopTexts = Annotated[list[StopText], Meta(max_length=STOPS_MAX)]
StopIds = Annotated[list[int], Meta(max_length=STOP_IDS_MAX)]
Biases = Annotated[dict[str, float], Meta(max_length=LOGIT_BIAS_ENTRIES_MAX)]
Label = Annotated[str, Meta(max_length=256)]
AnyName = Annotated[str, Meta(min_length=1, max_length=256)]
# fits into a path, where . and .. would mean something else
SessionName = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._~:@+-]+\Z")]
AtLeastNone = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0.001, le=1e9)]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body without unknown fields."""


class Part(_Strict):
    """A part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class Message(_Strict):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None


class StreamOptions(_Strict):
    """How a stream is told."""

    include_usage: bool = False


class OpenAiBody(_Strict):
    """What chat and text completions have in common; the last group are extensions."""

    model: str = "default"
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: StopText | StopTexts | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # a label, of no effect

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int | None = None
    timeout: float | None = None
    cache_salt: Label | None = None
    turn: AtLeastNone | None = None  # of a session
    queue: bool = False


class ChatBody(OpenAiBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    session_id: AnyName | None = None  # then the messages are the new ones
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    service_tier: Any = None
    store: Any = None
    metadata: Any = None


class CompletionBody(OpenAiBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    session_id: AnyName | None = None  # then the prompt goes on where the session stands
    logprobs: int | None = None
    echo: bool = False
    suffix: Any = None
    best_of: int | None = None
    response_format: Any = None


class SamplingParams(_Strict):
    """`sampling_params` of POST /generate."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    logit_bias: Biases | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    timeout: float | None = None
    regex: Any = None
    json_schema: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    custom_params: Any = None


class SessionParams(_Strict):
    """`session_params` of POST /generate."""

    id: AnyName
    rid: AnyName | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateBody(_Strict):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    priority: int | None = None
    cache_salt: Label | None = None
    image_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    session_params: SessionParams | None = None
    return_hidden_states: Any = None
    custom_logit_processor: Any = None
    token_ids_logprob: Any = None


class OpenNativeBody(_Strict):
    """POST /open_session."""

    capacity_of_str_len: int
    session_id: AnyName | None = None
    streaming: bool | None = None
    timeout: Seconds | None = None


class CloseNativeBody(_Strict):
    """POST /close_session."""

    session_id: AnyName


class OpenBody(_Strict):
    """POST /v1/sessions."""

    id: SessionName | None = None
    ttl_s: Seconds | None = None
    max_tokens: AtLeastOne | None = None
    salt: Label | None = None


class AppendBody(_Strict):
    """POST /v1/sessions/{id}/append; exactly one of the first three."""

    text: str | None = None
    input_ids: list[Any] | None = None
    messages: list[Message] | None = None
    turn: AtLeastNone | None = None
    queue: bool = False
    priority: int | None = None
    timeout: float | None = None


class TurnBody(OpenAiBody, kw_only=True):
    """POST /v1/sessions/{id}/generate; at most one of the first three."""

    text: str | None = None
    input_ids: list[Any] | None = None
    messages: list[Message] | None = None
    logprobs: int | None = None


class RewindBody(_Strict):
    """POST /v1/sessions/{id}/rewind; exactly one of them."""

    turn: AtLeastNone | None = None
    length: AtLeastNone | None = None


class ForkBody(_Strict):
    """POST /v1/sessions/{id}/fork."""

    id: SessionName | None = None


class AbortBody(_Strict):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class EmptyBody(_Strict):
    """A POST that needs nothing."""


# What may be said because it is what happens anyway; every other value is refused. An empty tuple: only null.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "tool_calls": ([],),
    "annotations": ([],),
    "return_hidden_states": (False,),
    "spaces_between_special_tokens": (True,),
}
UNSUPPORTED = {
    ChatBody: (
        *("response_format", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        *("modalities", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
        *("service_tier", "store", "metadata"),
    ),
    CompletionBody: ("suffix", "response_format"),
    Message: ("tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations"),
    Part: ("image_url", "input_audio", "file"),
    SamplingParams: (
        *("regex", "json_schema", "ebnf", "structural_tag", "stop_regex", "custom_params"),
        "spaces_between_special_tokens",
    ),
    GenerateBody: (
        *("image_data", "audio_data", "input_embeds", "lora_path", "return_hidden_states"),
        *("custom_logit_processor", "token_ids_logprob"),
    ),
}


def refuse_unsupported(body: msgspec.Struct, path: str = "") -> None:
    """Refuse what a body asks for and nobody here can do."""
    values = msgspec.structs.asdict(body)
    for name in UNSUPPORTED[type(body)]:
        value = values[name]
        if value is not None and value not in _HARMLESS.get(name, ()):
            raise RequestError(400, path + name, "is not supported by this server; leave it out")


def openai_options(body: OpenAiBody) -> Options:
    """The options of a completion; parameters keep the meaning that OpenAI gives them."""
    usual = Options()
    return Options(
        max_new_tokens=body.max_tokens,
        min_new_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=_or(body.top_k, usual.top_k),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=bias(body.logit_bias),
        seed=_seed(body.seed),
        stop=stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        n=_or(body.n, 1),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        salt=body.cache_salt or "",
    )


def native_options(params: SamplingParams) -> Options:
    """The options of SGLang's sampling_params."""
    if params.seed is not None and params.sampling_seed is not None:
        raise RequestError(400, "seed", "is the same as sampling_seed: give one of them")
    seed = params.seed if params.seed is not None else params.sampling_seed
    return Options(
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=bias(params.logit_bias),
        seed=_seed(seed),
        stop=stops(params.stop),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        no_stop_trim=params.no_stop_trim,
        n=params.n,
        timeout_s=params.timeout,
    )


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop texts, one or several."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def bias(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Biases by token id; JSON's keys are texts."""
    try:
        return tuple((int(token), value) for token, value in (biases or {}).items())
    except ValueError as error:
        raise RequestError(400, "logit_bias", "keys must be token ids") from error


def _seed(seed: int | None) -> int | None:
    """A seed as OpenAI allows it, negative ones too."""
    if seed is not None and abs(seed) >= SEED_END:
        raise RequestError(400, "seed", "must be less than 2**63 in size")
    return None if seed is None else seed % SEED_END


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
