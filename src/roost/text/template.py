"""Chat templates: render messages to the text format that a model was trained on.

Owns the sandbox that a model's template runs in: it reads messages, changes nothing and accesses nothing else. The
length of its output, and of values that its operators build, is limited while they grow; filters are trusted as much
as the model is. Knows no tokens. Called through text.language; one template serves all threads.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, UndefinedError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roost.errors import ConfigError, RequestError
from roost.text.locality import is_local

SOURCE_BYTES_MAX = 256 * 1024
TEXT_CHARS_MAX = 4 * 1024 * 1024
REASON_CHARS_MAX = 300  # of a template's own error message
_ESCAPABLE = re.compile("[\u0080-\ud7ff\ue000-\U0010ffff]")  # not lone surrogates, which text.escaping must find again


class ChatTemplate:
    """A model's template, compiled."""

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        chars_max: int = TEXT_CHARS_MAX,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > SOURCE_BYTES_MAX:
            raise ConfigError(f"chat template: {size} bytes long; at most {SOURCE_BYTES_MAX} are allowed")
        self._source = source
        self._chars_max = chars_max
        self._names = {"bos_token": bos, "eos_token": eos, "documents": None}
        try:
            sandbox = _Sandbox(chars_max, now)
            self._template = sandbox.from_string(source)
            self.is_local = is_local(sandbox.parse(source))
        except (TemplateError, RecursionError, ValueError) as error:
            raise ConfigError(f"chat template: does not compile: {error}") from error

    def to_json(self) -> str:
        """Everything another process needs to build an equal one."""
        return json.dumps({"source": self._source, "bos": self._names["bos_token"], "eos": self._names["eos_token"]})

    @classmethod
    def from_json(cls, text: str) -> "ChatTemplate":
        """What `to_json` wrote."""
        return cls(**json.loads(text))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation; with the generation prompt, up to where the model's answer begins."""
        names = {**self._names, "messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        try:
            return _joined(self._template.generate(names), self._chars_max)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise RequestError(400, "messages", _reason(error)) from error
        except RecursionError as error:
            raise RequestError(400, "messages", "nested too deeply for the chat template") from error


class _TemplateRefusal(TemplateError):
    """Raised by a template itself (`raise_exception`) for messages that it does not accept."""


class _TooLong(TemplateError):
    """A value or a text longer than the limit."""


def _reason(error: Exception) -> str:
    """The message for a client: never more than what the template's author wrote for it."""
    if isinstance(error, _TemplateRefusal | _TooLong):
        return str(error)
    if isinstance(error, SecurityError):
        return "the chat template does something that is not allowed"
    if isinstance(error, UndefinedError):
        return "the chat template needs a field that is missing"
    return "the chat template cannot be applied to these messages"


def _joined(parts: Iterable[str], chars_max: int) -> str:
    """The parts as one text; raises at the part that makes it too long."""
    kept = []
    length = 0
    for part in parts:
        length += len(part)
        if length > chars_max:
            raise _TooLong(f"longer than {chars_max} characters")
        kept.append(part)
    return "".join(kept)


def _grown_len(operator: str, left: Any, right: Any) -> int:
    """Length of what an operator would build: items of a sequence, bits of a power; 0 if it cannot grow."""
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    numbers = [side for side in (left, right) if isinstance(side, int)]
    if operator == "**":
        return left.bit_length() * right if len(numbers) == 2 else 0
    if operator == "*":
        return sizes[0] * numbers[0] if sizes and numbers else 0
    return sum(sizes)


class _Code(CodeGenerator):
    """Compiles `~` to the length-limited `environment.concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Emit the code that joins the operands."""
        self.write("environment.concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja with what published templates use, without access to anything else, and with limits on lengths."""

    intercepted_binops = frozenset(("+", "*", "**"))
    code_generator_class = _Code

    def __init__(self, chars_max: int, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self._chars_max = chars_max
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda format: now().strftime(format)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise at once; Jinja itself would render an unsafe attribute as an empty string."""
        raise SecurityError(f"access to {attribute!r}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute, unless the value would be longer than a text may be."""
        if _grown_len(operator, left, right) > self._chars_max:
            raise _TooLong(f"longer than {self._chars_max} characters")
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str], /) -> str:
        """Join the operands of `~`, and the output of a macro or a set block."""
        return _joined(parts, self._chars_max)


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's words for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the body as if the tag were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: object = "") -> NoReturn:
    raise _TemplateRefusal(str(message)[:REASON_CHARS_MAX])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPABLE.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text
