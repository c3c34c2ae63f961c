"""Chat templates with tools, after those that models are published with."""

_LISTED = "{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}"
_END = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = (
    "{%- if tools %}<|im_start|>system\n<tools>" + _LISTED + "</tools><|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- else %}" + _CHATML + "{%- for call in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + _END
)
# the order of older Hermes models
ARGUMENTS_FIRST = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    '{ "arguments": {{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"}',
)
# an answer after the last question shows its thought, an earlier one does not
QWEN3 = HERMES.replace(
    _CHATML,
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 + 2 >= messages | length %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}",
)
QWEN_CODER = (
    "{%- if tools %}<|im_start|>system\n" + _LISTED + "<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{%- for key, value in call.function.arguments | items %}\n<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>{% endfor %}\n</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}" + _END
)
LLAMA_JSON = (
    "{{ bos_token }}{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\n\n' }}"
    "{%- if loop.first and tools %}Answer with JSON.\n\n" + _LISTED + "{% endif %}"
    "{%- if m.tool_calls %}{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{%- else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_PYTHONIC = (
    "{%- for m in messages %}<|header_start|>{{ m.role }}<|header_end|>{{ '\n\n' }}"
    "{%- if loop.first and tools %}" + _LISTED + "{% endif %}{{ m.content }}"
    "{%- if m.tool_calls %}[{%- for call in m.tool_calls %}{{ call.function.name }}("
    "{%- for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|eot|>{% endfor %}"
    "{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if loop.first and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{%- elif m.tool_calls %}CALLS{{ eos_token }}"
    "{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{%- elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{%- else %}{{ raise_exception('roles are user and assistant') }}{% endif %}{% endfor %}"
)
MISTRAL = _MISTRAL.replace(
    "CALLS",
    '[TOOL_CALLS][{%- for call in m.tool_calls %}{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]",
)
MISTRAL_ARGS = _MISTRAL.replace(
    "CALLS",
    "{%- for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}",
)
# writes calls in a way that no format knows
UNKNOWN = HERMES.replace("<tool_call>", "<|call|>").replace("</tool_call>", "<|/call|>")
WITH_TOOLS = {
    "hermes": HERMES,
    "qwen3-coder": QWEN_CODER,
    "llama3-json": LLAMA_JSON,
    "llama-pythonic": LLAMA_PYTHONIC,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
}
