"""A model's template makes the text of a conversation, and nothing else."""

import copy
from datetime import datetime

import pytest

from roost.errors import ConfigError, RequestError
from roost.text.template import SOURCE_BYTES_MAX, ChatTemplate

CHAT = """
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "hello <&>"}]


def _render(source: str, messages: list[dict[str, object]] | None = None, chars_max: int = 10_000) -> str:
    template = ChatTemplate(source, bos="<s>", eos="</s>", chars_max=chars_max, now=lambda: datetime(2024, 2, 29))
    return template.render(HELLO if messages is None else messages, add_generation_prompt=False)  # type: ignore[arg-type]


def test_a_conversation_is_written_as_its_template_says() -> None:
    template = ChatTemplate(CHAT, bos="", eos="")
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello <&><|im_end|>\n"
    assert template.render(HELLO, add_generation_prompt=False) == text
    assert template.render(HELLO, add_generation_prompt=True) == text + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}x{{ eos_token }}", "<s>x</s>"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello <&>"),
        ("{% if tools is none and documents is none %}plain{% endif %}", "plain"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}", "x\n"),
        ("{{ 3 * 4 }}{{ 2 ** 3 }}{{ '-' * 3 }}", "128---"),
        ("{{ 'a' ~ 1 ~ none ~ messages[0].role ~ (1 + 2) }}", "a1Noneuser3"),
    ],
)
def test_what_published_templates_use_works(source: str, text: str) -> None:
    assert _render(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages.clear() }}",
    ],
)
def test_38_a_template_that_reaches_out_or_changes_its_input_is_refused(source: str) -> None:
    messages = copy.deepcopy(HELLO)
    with pytest.raises(RequestError, match="messages: the chat template does something that is not allowed") as caught:
        _render(source, messages)  # type: ignore[arg-type]
    assert caught.value.status == 400
    assert messages == HELLO


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['name'] + 'x' }}", "needs a field that is missing"),
        ("{{ messages[0].content + 1 }}", "cannot be applied to these messages"),
        ("{{ messages[0].content.index('q') }}", "cannot be applied to these messages"),
        ("{{ 1 / 0 }}", "cannot be applied to these messages"),
        ("{{ range(1000000) | list }}", "cannot be applied to these messages"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    ],
)
def test_messages_a_template_does_not_take_are_refused_in_plain_words(source: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        _render(source)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'x' }}",
        "{{ 10 ** 10 ** 10 ** 10 ** 10 }}",
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set x %}{% for a in range(99999) %}xx{% endfor %}{% endset %}",
        "{% macro m() %}{% for a in range(99999) %}xx{% endfor %}{% endmacro %}{{ m() | length }}",
    ],
)
def test_a_text_without_end_is_refused_while_it_grows(source: str) -> None:
    with pytest.raises(RequestError, match="longer than 10000 characters"):
        _render(source)


def test_a_text_of_just_the_cap_is_taken() -> None:
    assert _render("{{ messages[0].content }}", chars_max=9) == "hello <&>"
    with pytest.raises(RequestError, match="longer than 8 characters"):
        _render("{{ messages[0].content }}", chars_max=8)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x | nofilter }}", "{% endfor %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"]
)
def test_a_template_that_does_not_compile_is_no_template(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template: does not compile"):
        ChatTemplate(source, bos="", eos="")


def test_a_template_longer_than_any_honest_one_is_refused() -> None:
    ChatTemplate("x" * SOURCE_BYTES_MAX, bos="", eos="")
    with pytest.raises(ConfigError, match="at most 262144"):
        ChatTemplate("é" * SOURCE_BYTES_MAX, bos="", eos="")
