"""Every number that the source gives a name is on a list: with the test on both sides of it, or why it needs none."""

import ast
from collections.abc import Iterator

from tests.tidy.plain_numbers import UNTESTED
from tests.tidy.source import ROOT, Module, everything, product
from tests.tidy.thresholds import TESTED


def _numbers(module: Module) -> Iterator[str]:
    """The names of a module's own numbers, also of those that are calculated from other numbers."""
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.isupper() and _is_number(getattr(node, "value", None)):
            yield f"{module.name}.{target.id}"


def _is_number(node: ast.AST | None) -> bool:
    match node:
        case ast.Constant():
            return type(node.value) in (int, float)
        case ast.UnaryOp():
            return _is_number(node.operand)
        case ast.BinOp():
            return _is_number(node.left) and _is_number(node.right)
        case _:
            return False


def test_every_number_with_a_name_is_on_a_list() -> None:
    numbers = {name for module in product() for name in _numbers(module)}
    assert numbers - set(TESTED) - set(UNTESTED) == set(), (
        "add them to tests/tidy/thresholds.py, or to plain_numbers.py beside it"
    )
    assert (set(TESTED) | set(UNTESTED)) - numbers == set(), "gone from the source"
    assert set(TESTED) & set(UNTESTED) == set() and all(UNTESTED.values())


def test_the_tests_on_both_sides_of_a_number_are_there() -> None:
    known = {
        f"{module.path.relative_to(ROOT)}::{function.name}"
        for module in everything()
        for function in module.functions()
    }
    assert {name: test for name, test in TESTED.items() if test not in known} == {}
