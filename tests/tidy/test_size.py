"""Sizes a reader can hold in mind: functions, files and classes, with a list of exceptions that may only shrink."""

import ast
from collections.abc import Iterator

from tests.tidy.exceptions import EXCEPTIONS, LENGTH_MAX
from tests.tidy.source import FunctionNode, Module, everything, product

FUNCTION_LINES_MAX = 70
KERNEL_LINES_MAX = 120
FILE_LINES_MAX = 500
PUBLIC_METHODS_MAX = 12


def _is_kernel(function: FunctionNode) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def _too_large() -> Iterator[str]:
    for module in everything():
        lines = len(module.path.read_text().splitlines())
        if lines > FILE_LINES_MAX:
            yield f"{module.place}: {lines} lines"
        for function in module.functions():
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > (KERNEL_LINES_MAX if _is_kernel(function) else FUNCTION_LINES_MAX):
                yield f"{module.place} {function.name}: {length} lines"
    for module in product():
        yield from _classes_too_large(module)


def _classes_too_large(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            if len(methods) > PUBLIC_METHODS_MAX:
                yield f"{module.place} {node.name}: {len(methods)} public methods"


def _name_of(finding: str) -> str:
    return finding.rpartition(":")[0]


def test_nothing_is_larger_than_a_reader_can_hold() -> None:
    assert [finding for finding in _too_large() if _name_of(finding) not in EXCEPTIONS] == []


def test_the_list_of_exceptions_only_shrinks() -> None:
    assert len(EXCEPTIONS) <= LENGTH_MAX
    assert set(EXCEPTIONS) <= {_name_of(finding) for finding in _too_large()}, "an exception is no longer needed"
