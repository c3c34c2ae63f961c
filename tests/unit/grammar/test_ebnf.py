"""EBNF, as others write it, allows as Lark what it says: and what it does not say is refused with its place."""

import pytest

from roost.errors import RequestError
from roost.grammar.ebnf import DEPTH_MAX, REPEATS_MAX, lark_of
from roost.grammar.forms import ebnf_grammar
from tests.unit.grammar.test_forms import allows

SUMS = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= num | "(" sum ")"\nnum ::= [0-9]+ # digits'
OBJECTS = 'root ::= "{" pair ("," pair)* "}"\npair ::= "\\"" [a-z]+ "\\":" value\nvalue ::= root | [0-9]+'


@pytest.mark.parametrize(
    ("grammar", "allowed", "forbidden"),
    [
        ('root ::= "caf\\u00e9de"', ["caf\u00e9de"], ["caf", "caf\ue9de"]),
        ('root ::= "\\x41\\U0001F600\\n\\t\\\\"', ["A\U0001f600\n\t\\"], ["A"]),
        ('root ::= ([0-9]+)? "x"', ["x", "12x"], ["12"]),
        ('root ::= ("a"{2}){3} ("b"?)+', ["aaaaaa", "aaaaaabb"], ["aa"]),
        ('root ::= start\nstart ::= "a" | "b"', ["a", "b"], ["c"]),
        (SUMS, ["1", "1+2", "(1+2)+33", "((7))"], ["1+", "()", ""]),
        (OBJECTS, ['{"a":1}', '{"a":{"b":2},"c":3}'], ["{}"]),
        ('root ::= ws "a" ws\nws ::= ([ \\t\\n] ws)?', ["a", "\n\t a "], ["b"]),
        ("root ::= [^a-c] .", ["dx", "-\u00e9"], ["ax", "d"]),
        ("root ::= [-a] [\\]\\-] [a-]", ["-]a", "a--"], ["b]a", "-aa"]),
        ('root ::= "" | "y"', ["", "y"], ["n"]),
        ('root ::= "a"\n  | "b"\n  | c\nc ::=\n "d" {2,3}', ["a", "b", "dd", "ddd"], ["d", "dddd"]),
        ('root ::= "a"{2,} [a-z]+ "ab"', ["aazab", "aaaabab"], ["azab", "aazz"]),
        ("root ::= 'it' \"s\"", ["its"], ["it"]),
    ],
    ids=range(14),
)
def test_what_it_says_is_allowed_and_nothing_else(grammar: str, allowed: list[str], forbidden: list[str]) -> None:
    made = ebnf_grammar(grammar)
    for text in allowed:
        assert allows(made, text), (text, made)
    for text in forbidden:
        assert not allows(made, text), (text, made)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ("root ::= (", "expected \\) at character 10"),
        ("root ::= nobody", "there is no rule 'nobody'"),
        ('root ::= "a', "at character 9"),
        ('x ::= "a"', "no rule is called root"),
        ('root ::= "a"\nroot ::= "b"', "is there twice"),
        ('root ::= "a"{3,2}', "must be {n}"),
        ('root ::= "a"{}', "must be {n}"),
        ("root ::= []", "has no characters"),
        ('root ::= "\\ud800"', "is no character"),
        ('root ::= (="x")', "at character 10"),
        ('root ::= "a" )', "expected the name of a rule"),
    ],
    ids=range(11),
)
def test_what_cannot_be_read_is_refused_with_its_place(grammar: str, told: str) -> None:
    with pytest.raises(RequestError, match=f"grammar: .*{told}"):
        lark_of(grammar)


def test_groups_may_be_so_deep_and_no_deeper() -> None:
    lark_of("root ::= " + "(" * DEPTH_MAX + '"a"' + ")" * DEPTH_MAX)
    with pytest.raises(RequestError, match="nested too deep"):
        lark_of("root ::= " + "(" * 100_000)


def test_a_part_may_come_so_often_and_no_oftener() -> None:
    lark_of(f'root ::= "a"{{{REPEATS_MAX}}}')
    with pytest.raises(RequestError, match=f"<= {REPEATS_MAX}"):
        lark_of(f'root ::= "a"{{1,{REPEATS_MAX + 1}}}')


def test_long_chains_of_rules_are_read_all_the_same() -> None:
    rules = "\n".join(f'r{number} ::= "a" r{number + 1}' for number in range(200))
    made = ebnf_grammar(f'root ::= r0\n{rules}\nr200 ::= "z"')
    assert allows(made, "a" * 200 + "z") and not allows(made, "a" * 199 + "z")
