"""Schemas: what each endpoint accepts, field by field; anything else is refused by name.

A field of type `Any` is unsupported: other servers have it and this one does not, so only values that ask for nothing
are accepted (`compat` lists them). Called by the endpoints; the fuzz test reads them.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from roost.errors import RequestError
from roost.front.options import Options
from roost.sched.intake import STOP_IDS_MAX, STOP_LEN_MAX, STOPS_MAX
from roost.server.compat import (
    Strict,
    UnsupportedCompletionFields,
    UnsupportedGenerateFields,
    check_unsupported,
    unsupported_names,
)
from roost.server.dialects import OPENAI, SGLANG, sampling_of, with_sampling

Value = TypeVar("Value", int, float, bool)
REQUEST_ID_LEN_MAX = 256

# Every output of a request carries these to the engine, so their size is bounded here already.
StopText = Annotated[str, Meta(min_length=1, max_length=STOP_LEN_MAX)]
StopTexts = Annotated[list[StopText], Meta(max_length=STOPS_MAX)]
StopIds = Annotated[list[int], Meta(max_length=STOP_IDS_MAX)]
Label = Annotated[str, Meta(max_length=256)]
Metadata = Annotated[dict[str, str], Meta(max_length=16)]  # as many as OpenAI allows
# an output's name has its number after a #
RequestName = Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_LEN_MAX, pattern=r"^[^#]*\Z")]
AnyName = Annotated[str, Meta(min_length=1, max_length=256)]
# fits into a path, where . and .. would mean something else
SessionName = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._~:@+-]+\Z")]
AtLeastNone = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0.001, le=1e9)]


class Part(Strict):
    """A part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None


class Message(Strict):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None  # of the assistant
    tool_call_id: str | None = None  # of a tool's result
    reasoning_content: str | None = None  # what the assistant thought
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    reasoning: Any = None
    tools: Any = None
    parsed: Any = None


class JsonSchemaFormat(Strict):
    """`json_schema` of a response format."""

    schema: dict[str, Any] | bool
    name: str | None = None  # a label, as the description is: what the model is told stands in the messages
    description: str | None = None
    strict: bool | None = None  # a schema is enforced either way, or refused


class ResponseFormat(Strict):
    """What an answer must be."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict):
    """The same as vLLM has it; exactly one of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_fallback: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    whitespace_pattern: Any = None


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Any = None
    continuous_usage_stats: Any = None


@with_sampling(OPENAI)
class OpenAiBody(UnsupportedCompletionFields, kw_only=True):
    """What chat and text completions have in common, with every sampling parameter.

    Of the fields below the second group say what the output must match, the third are labels, the last one extensions.

    Labels need nothing done: they tell OpenAI whom it serves; metadata would be kept with what is stored, and nothing
    is. `prompt_cache_key` finds the session in which a chat's history already lies.
    """

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: StopText | StopTexts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None

    min_tokens: int | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    include_stop_str_in_output: bool = False  # the same, by vLLM's name
    priority: int | None = None
    timeout: float | None = None
    cache_salt: Label | None = None
    extra_key: Label | None = None  # the same, by SGLang's name
    turn: AtLeastNone | None = None  # of a session
    queue: bool = False


class ChatBody(OpenAiBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    session_id: AnyName | None = None  # then the messages are the new ones
    rid: RequestName | None = None  # what the request is called, here and in /abort_request
    request_id: RequestName | None = None  # the same as vLLM has it: after the kind of answer and a dash
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: bool = False
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    service_tier: Any = None
    store: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    echo: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    include_reasoning: Any = None
    separate_reasoning: Any = None
    stream_reasoning: Any = None
    reasoning: Any = None
    return_meta_info: Any = None
    return_prompt_text: Any = None
    max_dynamic_patch: Any = None
    min_dynamic_patch: Any = None
    use_audio_in_video: Any = None
    task: Any = None
    input_ids: Any = None


class CompletionBody(OpenAiBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    session_id: AnyName | None = None  # then the prompt goes on where the session stands
    rid: RequestName | None = None  # what the request is called, here and in /abort_request
    request_id: RequestName | None = None  # the same as vLLM has it: after the kind of answer and a dash
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True
    suffix: Any = None
    prompt_embeds: Any = None


@with_sampling(SGLANG)
class SamplingBody(Strict):
    """`sampling_params` of POST /generate; null is the default, as there."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    timeout: float | None = None
    spaces_between_special_tokens: Any = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    ebnf: str | None = None
    stream_interval: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    custom_params: Any = None


class SessionParams(Strict):
    """`session_params` of POST /generate."""

    id: AnyName
    rid: Label | None = None  # the request to go on from; null or empty: none
    offset: int | None = None  # tokens of it to keep, from the end if negative; null or 0: all
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateBody(UnsupportedGenerateFields, kw_only=True):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    stream_output: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    cache_salt: Label | None = None
    extra_key: Label | None = None  # the same, by SGLang's name
    session_params: SessionParams | None = None
    conversation_id: str | None = None  # a label, of no effect


class OpenNativeBody(Strict):
    """POST /open_session."""

    capacity_of_str_len: int
    session_id: AnyName | None = None
    streaming: bool | None = None
    timeout: Seconds | None = None


class CloseNativeBody(Strict):
    """POST /close_session."""

    session_id: AnyName


class OpenBody(Strict):
    """POST /v1/sessions."""

    id: SessionName | None = None
    ttl_s: Seconds | None = None
    max_tokens: AtLeastOne | None = None
    salt: Label | None = None


class AppendBody(Strict):
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


class RewindBody(Strict):
    """POST /v1/sessions/{id}/rewind; exactly one of them."""

    turn: AtLeastNone | None = None
    length: AtLeastNone | None = None


class ForkBody(Strict):
    """POST /v1/sessions/{id}/fork; at most one of turn and length."""

    id: SessionName | None = None
    turn: AtLeastNone | None = None
    length: AtLeastNone | None = None


class AbortBody(Strict):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: Any = None
    finished_reason: Any = None


class FlushBody(Strict):
    """POST /flush_cache; pages are the engine's own, so that there is no other cache to empty with them."""

    empty_cache: bool | None = None


class TokenizeBody(Strict):
    """POST /tokenize; exactly one of the first two."""

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None  # null: as for a completion of the same
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None  # with messages
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


UNSUPPORTED: dict[type[msgspec.Struct], tuple[str, ...]] = {
    kind: unsupported_names(kind)
    for kind in (
        *(ChatBody, CompletionBody, TurnBody, Message, Part, StreamOptions, StructuredOutputs),
        *(SamplingBody, GenerateBody, AbortBody, TokenizeBody),
    )
}


def refuse_unsupported(body: msgspec.Struct, path: str = "") -> None:
    """Refuse what a body asks for and nobody here can do."""
    check_unsupported(body, UNSUPPORTED[type(body)], path)


def openai_options(body: OpenAiBody) -> Options:
    """The options of a completion; parameters keep the meaning that OpenAI gives them."""
    return Options(
        max_new_tokens=body.max_tokens,
        min_new_tokens=body.min_tokens or 0,
        stop=stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        no_stop_trim=body.no_stop_trim or body.include_stop_str_in_output,
        n=_or(body.n, 1),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        **sampling_of(body, OPENAI),
        cache_salt=cache_salt(body),
    )


def native_options(params: SamplingBody) -> Options:
    """The options of SGLang's sampling_params."""
    return Options(
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens or 0,
        stop=stops(params.stop),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos or False,
        skip_special_tokens=_or(params.skip_special_tokens, True),
        no_stop_trim=params.no_stop_trim or False,
        n=_or(params.n, 1),
        timeout_s=params.timeout,
        **sampling_of(params, SGLANG),
    )


def cache_salt(body: OpenAiBody | GenerateBody) -> str:
    """Under which salt a request looks into the prefix cache."""
    if body.cache_salt is not None and body.extra_key is not None:
        raise RequestError(400, "extra_key", "is the same as cache_salt: give one of them")
    return body.cache_salt or body.extra_key or ""


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings, one or several."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
