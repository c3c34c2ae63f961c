"""Compatibility: fields of OpenAI's, vLLM's and SGLang's bodies that this server does not implement.

Client libraries send many of them with values that ask for nothing. Such a no-op value is accepted, since the server
already does what it asks; any other value is refused, with the field's name. A field of type `Any` is one of these,
here and in `schema`. Used by the schemas, by the check of a body, and by the OpenAPI description.
"""

import json
from typing import Any

import msgspec

from roost.errors import RequestError


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body without unknown fields."""


class UnsupportedCompletionFields(Strict, kw_only=True):
    """Fields of vLLM's and SGLang's chat and text completions, beyond OpenAI's."""

    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    watermarking: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    prompt_logprobs: Any = None
    logprob_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None
    return_prompt_token_ids: Any = None
    return_token_offsets: Any = None
    return_mm_kwargs: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    routed_experts_start_len: Any = None
    routed_experts_prompt_start: Any = None
    return_cached_tokens_details: Any = None
    stream_interval: Any = None
    lora_path: Any = None
    session_params: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    images_config: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
    disagg_prefill_dp_rank: Any = None
    ngram_corpus_id: Any = None
    custom_labels: Any = None


class UnsupportedGenerateFields(Strict, kw_only=True):
    """Fields of SGLang's /generate that are not implemented here."""

    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: Any = None
    input_embeds: Any = None
    positional_embed_overrides: Any = None
    lora_path: Any = None
    lora_id: Any = None
    custom_logit_processor: Any = None
    token_ids_logprob: Any = None
    log_metrics: Any = None
    no_logs: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    routed_experts_start_len: Any = None
    return_indexer_topk: Any = None
    return_sampling_mask: Any = None
    return_prompt_token_ids: Any = None
    return_bytes: Any = None
    return_entropy: Any = None
    require_reasoning: Any = None
    background: Any = None
    routing_key: Any = None
    custom_labels: Any = None
    external_trace_header: Any = None
    received_time: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    bootstrap_pair_key: Any = None
    decode_tp_size: Any = None
    routed_dp_rank: Any = None
    disagg_prefill_dp_rank: Any = None
    data_parallel_rank: Any = None
    need_wait_for_mm_inputs: Any = None
    num_items_assigned: Any = None
    max_dynamic_patch: Any = None
    min_dynamic_patch: Any = None
    image_max_dynamic_patch: Any = None
    video_max_dynamic_patch: Any = None


# By field, the values that ask for nothing; null is accepted for every field.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    # llguidance enforces grammars, and writes JSON with fixed whitespace
    "guided_decoding_backend": ("auto", "guidance"),
    "disable_fallback": (True, False),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
    # one kind of output: text
    "modalities": (["text"], []),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "bad_words": ([],),
    "custom_params": ({},),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),  # for beam search, which there is none of
    "watermarking": (False,),
    "thinking_token_budget": (-1,),  # no limit
    "spaces_between_special_tokens": (True, False),  # nothing is ever put between tokens; True never changed a text
    "functions": ([],),
    "function_call": ("none", "auto"),
    "annotations": ([],),
    # reasoning is told apart as --reasoning-format says, and streamed as it comes
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "require_reasoning": (False,),
    "verbosity": ("medium",),
    # prompts are rendered and tokenised as the model's template and tokenizer say
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "use_audio_in_video": (False,),
    "suffix": ("",),
    "echo": (False,),  # on chat completions
    # nothing extra is returned
    "token_ids_logprob": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_meta_info": (False,),
    "return_mm_kwargs": (True, False),  # multi-modal inputs, which there are none of
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "routed_experts_prompt_start": (0,),
    "return_cached_tokens_details": (False,),
    "return_indexer_topk": (False,),
    "return_sampling_mask": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "stream_interval": (1,),  # every token is sent as soon as it is known
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
    # nothing is stored, and the prefix cache keeps what it can for as long as it can
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_cache_breakpoint": ({"mode": "explicit"},),
    "background": (False,),
    # one engine with one rank; every request is counted in the metrics
    "routed_dp_rank": (0,),
    "data_parallel_rank": (0,),
    "log_metrics": (True,),
    "no_logs": (False,),
    "custom_labels": ({},),
    "vllm_xargs": ({},),
    # Anthropic's
    "betas": ([],),
    "mcp_servers": ([],),
    "fallbacks": ([],),
    "speed": ("standard",),
    "diagnostics": ({}, {"previous_message_id": None}),  # then there is nothing to compare with
    "billing_policy": ({"type": "billing_policy"}, {"type": "billing_policy", "bill_to": "self"}),
    "block_binding": ({}, {"prefix_mismatch_behavior": None}),
    "clear_at": ("never",),
}

REASONS: dict[str, str] = {
    "store": "nothing is stored here",
    "service_tier": "all requests are served alike; `priority` orders them",
    "reasoning_effort": "how much a model thinks is its own choice",
    "chat_template_kwargs": "chat templates get only messages and tools",
    "functions": "their newer name is `tools`",
    "function_call": "its newer name is `tool_choice`",
    "separate_reasoning": "--reasoning-format says whether reasoning is told apart",
    "include_reasoning": "--reasoning-format says whether reasoning is told apart",
    "include_obfuscation": "chunks are not padded",
    "prompt_cache_retention": "how long something stays in the cache is not promised",
    "prompt_cache_options": "how long something stays in the cache is not promised",
    "prompt_cache_breakpoint": "how long something stays in the cache is not promised",
}


def unsupported_names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The unsupported fields of a body."""
    return tuple(field.encode_name for field in msgspec.structs.fields(kind) if field.type is Any)


def check_unsupported(body: msgspec.Struct, names: tuple[str, ...], path: str = "") -> None:
    """Refuse the first unsupported field whose value asks for something."""
    values = msgspec.structs.asdict(body)
    for name in names:
        value = values[name]
        if isinstance(value, list) and value and all(each is None for each in value):
            continue  # null for each of several prompts
        if value is not None and value not in NO_OP_VALUES.get(name, ()):
            raise RequestError(400, path + name, _reason(name))


def _reason(name: str) -> str:
    """Why a value is refused, and which values are accepted."""
    why = f": {REASONS[name]}" if name in REASONS else ""
    allowed = NO_OP_VALUES.get(name)
    if allowed is None:
        return f"is not supported by this server; leave it out{why}"
    return f"is not supported by this server except as {' or '.join(map(json.dumps, allowed))}{why}"
