"""EBNF, as llama.cpp and xgrammar write it, to Lark as llguidance reads it.

`root ::= …`, rules in any order, over as many lines as they like: texts in quotes, [classes] of characters, `.`,
groups, `|`, `*`, `+`, `?`, {2}, {2,} and {2,5}, # comments. What is regular becomes a terminal, so that llguidance's
lexer reads it as a whole. One pass over the text; what is not understood is refused with its place. Called by
grammar.forms.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from roost.errors import RequestError
from roost.tools.lark import literal

DEPTH_MAX = 64  # of groups, and of rules in rules that are one terminal
REPEATS_MAX = 10_000
_TOKEN = re.compile(
    r"(?P<space>\s+|#[^\n]*)|(?P<define>::=)|(?P<name>[A-Za-z][A-Za-z0-9_-]*)|(?P<repeat>\{[0-9]*,?[0-9]*\}|[*+?])"
    r"|(?P<open>\()|(?P<close>\))|(?P<bar>\|)|(?P<any>\.)"
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<set>\[(?:[^\]\\\n]|\\.)*\])"""
)
_REPEAT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}


def lark_of(text: str) -> str:
    """The Lark grammar of EBNF; raises RequestError where it cannot be read."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise RequestError(400, "grammar", "cannot be read: no rule is called root")
    return _Writer(rules).lark()


@dataclass(slots=True)
class _Expression:
    """A part of a rule."""

    kind: str  # text, set, name, all (one after the other), any (one of them), times
    text: str = ""  # a text, a set of characters as a regular expression, a rule's name, or how often
    parts: list["_Expression"] = field(default_factory=list)


class _Parser:
    """Reads rules."""

    def __init__(self, text: str) -> None:
        self._tokens = [*self._split(text), ("end", "", len(text))]
        self._at = 0

    def rules(self) -> dict[str, _Expression]:
        """All rules by name."""
        found: dict[str, _Expression] = {}
        while self._kind() != "end":
            name = self._take("name")
            self._take("define")
            if name in found:
                self._refuse(f"rule {name[:40]!r} is there twice")
            found[name] = self._choice(0)
        return found

    def _choice(self, depth: int) -> _Expression:
        if depth > DEPTH_MAX:
            raise RequestError(400, "grammar", f"is nested too deep: groups may be {DEPTH_MAX} deep")
        ways = [self._sequence(depth)]
        while self._kind() == "bar":
            self._at += 1
            ways.append(self._sequence(depth))
        return ways[0] if len(ways) == 1 else _Expression("any", parts=ways)

    def _sequence(self, depth: int) -> _Expression:
        parts: list[_Expression] = []
        while self._kind() in ("text", "set", "any", "open", "name"):
            if self._kind() == "name" and self._tokens[self._at + 1][0] == "define":
                break  # the next rule begins
            parts.append(self._repeated(self._one(depth)))
        return parts[0] if len(parts) == 1 else _Expression("all", parts=parts)

    def _one(self, depth: int) -> _Expression:
        kind, text, _ = self._tokens[self._at]
        self._at += 1
        if kind == "open":
            inner = self._choice(depth + 1)
            self._take("close")
            return inner
        if kind == "text":
            return _Expression("text", _unescaped(text[1:-1]))
        if kind == "set":
            return _Expression("set", _set(text))
        return _Expression("set", "(?s:.)") if kind == "any" else _Expression("name", text)

    def _repeated(self, node: _Expression) -> _Expression:
        while self._kind() == "repeat":
            node = _Expression("times", self._times(self._take("repeat")), [node])
        return node

    def _times(self, text: str) -> str:
        """How often, as Lark writes it."""
        if text in "*+?":
            return text
        found = _REPEAT.fullmatch(text)
        least, most = (int(found[1]), int(found[3] or found[1])) if found else (1, 0)
        if least > most or most > REPEATS_MAX:
            self._refuse(f"{text[:40]} must be {{n}}, {{n,}} or {{n,m}} with n <= m <= {REPEATS_MAX}")
        return f"{{{least},}}" if found and found[2] and not found[3] else f"{{{least},{most}}}"

    def _kind(self) -> str:
        return self._tokens[self._at][0]

    def _take(self, kind: str) -> str:
        if self._kind() != kind:
            words = {"name": "the name of a rule", "define": "::=", "close": ")"}
            self._refuse(f"expected {words[kind]}")
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _refuse(self, why: str) -> None:
        raise RequestError(400, "grammar", f"cannot be read: {why} at character {self._tokens[self._at][2]}")

    @staticmethod
    def _split(text: str) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise RequestError(400, "grammar", f"cannot be read: {text[at : at + 20]!r} at character {at}")
            at = found.end()
            if found.lastgroup != "space":
                yield found.lastgroup or "", found[0], found.start()


class _Writer:
    """Writes rules as Lark: those that are regular as terminals."""

    def __init__(self, rules: dict[str, _Expression]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._depths: dict[str, int | None] = {}  # of terminals in terminals; None: the rule is not regular
        self._extra: list[str] = []
        for node in rules.values():
            for used in _names(node):
                if used not in rules:
                    raise RequestError(400, "grammar", f"cannot be read: there is no rule {used[:40]!r}")
        self._find_regular()

    def lark(self) -> str:
        """The grammar."""
        lines = [f"start: {self._name('root')}"]
        for name, node in self._rules.items():
            is_regular = self._depths[name] is not None
            lines.append(f"{self._name(name)}: {self._written(node, in_terminal=is_regular)}")
        return "\n".join([*lines, *self._extra]) + "\n"

    def _find_regular(self) -> None:
        """A rule is regular if no way from it leads back to a rule that is on that way."""
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        left = {}
        for name, node in self._rules.items():
            used = set(_names(node))
            left[name] = len(used)
            for each in used:
                users[each].append(name)
        ready = [name for name, number in left.items() if not number]
        self._depths = dict.fromkeys(self._rules)
        while ready:
            name = ready.pop()
            inner = [self._depths[each] or 0 for each in set(_names(self._rules[name]))]
            depth = max(inner, default=0) + 1
            if depth > DEPTH_MAX:
                continue  # deeper ones are left to the parser
            self._depths[name] = depth
            for user in users[name]:
                left[user] -= 1
                if not left[user]:
                    ready.append(user)

    def _name(self, name: str) -> str:
        number = self._numbers[name]
        return f"r{number}" if self._depths[name] is None else f"T{number}"

    def _written(self, node: _Expression, *, in_terminal: bool) -> str:
        match node.kind:
            case "text":
                return literal(node.text)
            case "set":
                return f"/{node.text}/"
            case "name":
                return self._name(node.text)
        if not in_terminal and all(self._depths[name] is not None for name in _names(node)):
            self._extra.append(f"X{len(self._extra)}: {self._written(node, in_terminal=True)}")
            return f"X{len(self._extra) - 1}"
        parts = [self._written(each, in_terminal=in_terminal) for each in node.parts]
        if node.kind == "times":
            return f"({parts[0]}){node.text}"
        return f"({' | '.join(parts)})" if node.kind == "any" else f"({' '.join(parts)})" if parts else '""'


def _names(node: _Expression) -> Iterator[str]:
    """The rules that a part names."""
    if node.kind == "name":
        yield node.text
    for each in node.parts:
        yield from _names(each)


def _unescaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        said = found[1]
        return chr(_code(said)) if said[0] in "xuU" and len(said) > 1 else _ESCAPED.get(said, said)

    return _ESCAPE.sub(one, text)


def _code(said: str) -> int:
    number = int(said[1:], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise RequestError(400, "grammar", f"cannot be read: \\{said} is no character")
    return number


def _set(text: str) -> str:
    """A class of characters as Rust's regular expressions write it."""
    inner, sign = text[1:-1], ""
    if inner.startswith("^"):
        inner, sign = inner[1:], "^"
    if not inner:
        raise RequestError(400, "grammar", "cannot be read: [] has no characters")
    parts = re.findall(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|.", inner, flags=re.DOTALL)
    written = []
    for index, part in enumerate(parts):
        if part == "-" and 0 < index < len(parts) - 1:
            written.append("-")
        elif len(part) == 2 and part[1] in "dswDSW":
            written.append(part)
        else:
            written.append(f"\\x{{{ord(_unescaped(part)):x}}}")
    return f"[{sign}{''.join(written)}]"
