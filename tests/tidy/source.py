"""What the house rules look at: the project's Python files, parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed file."""

    path: Path
    tree: ast.Module

    @property
    def place(self) -> str:
        """Where it lies in the project."""
        return str(self.path.relative_to(ROOT))

    @property
    def name(self) -> str:
        """Its dotted name, for files below src."""
        parts = self.path.relative_to(SOURCE).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def functions(self) -> Iterator[FunctionNode]:
        """Every function and method."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def imports(self) -> Iterator[tuple[str, str]]:
        """(module, name) of everything it imports; name is '' for a plain import."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.place}: relative import"
                yield from ((node.module or "", alias.name) for alias in node.names)


@cache
def product() -> tuple[Module, ...]:
    """The files of the package."""
    return _parsed(SOURCE / "roost")


@cache
def everything() -> tuple[Module, ...]:
    """The files of the package, the tests, the benchmarks and the examples."""
    return product() + _parsed(ROOT / "tests") + _parsed(ROOT / "bench") + _parsed(ROOT / "examples")


def _parsed(folder: Path) -> tuple[Module, ...]:
    return tuple(Module(path, ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py")))
