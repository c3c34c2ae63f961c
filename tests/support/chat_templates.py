"""Chat templates after those that models are published with, over the special tokens of the small vocabulary."""

from tests.unit.text.test_template import CHAT

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{%- set content = '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"""
LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\n\nToday Date: " + date_string + "\n\n" + system_message + "<|im_end|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
        {{- first_user_message }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\n\n'+ message['content'] | trim + '<|im_end|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- message.content | tojson + "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}
"""
GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<|im_start|>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}{%- for item in message['content'] -%}{{ item['text'] | trim if loop.first }}{%- endfor -%}{%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{'<|im_start|>model\n'}}{%- endif -%}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
QWEN25 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
        (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}{{- tool_call.arguments | tojson }}{%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# whether what was thought is shown depends on the last question
QWEN3 = """{%- set ns = namespace(last_query_index=messages|length - 1, multi_step_tool=true) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and loop.index0 > ns.last_query_index %}
        {{- '<|im_start|>assistant\n<think></think>' + message.content + '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# counts turns as it goes
COUNTING = """{{ bos_token }}{%- set ns = namespace(index=0) %}{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- if message.role != 'system' %}{{- '[' + ns.index | string + ']' }}{%- set ns.index = ns.index + 1 %}{%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# says whether a message's place is even
PARITY = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ '-' if loop.index0 % 2 else '+' }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LOCAL = {
    "chatml": CHAT,
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen2.5": QWEN25,
    "parity": PARITY,
}
OTHERS = {"qwen3": QWEN3, "counting": COUNTING}
