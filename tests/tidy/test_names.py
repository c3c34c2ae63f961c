"""Names and words: docstrings, folders that own something, names meant to be used, planted lines that exist."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import roost
from tests.planted.apply import swapped_source
from tests.planted.bug import Bug
from tests.planted.bugs import BUGS
from tests.tidy.source import ROOT, Module, everything, product

EMPTY_WORDS = ("utils", "util", "common", "misc", "manager", "helper", "helpers", "info")
DOCSTRING_LINES = (3, 8)


def test_no_file_is_named_after_nothing() -> None:
    assert [m.place for m in everything() if m.path.stem in EMPTY_WORDS or m.path.parent.name in EMPTY_WORDS] == []


def test_every_module_says_what_it_owns() -> None:
    silent = []
    for module in everything():
        lines = (ast.get_docstring(module.tree) or "").splitlines()
        least = 1 if module.path.name == "__init__.py" or "tests" in module.path.parts else DOCSTRING_LINES[0]
        most = 12 if module.path.name in ("errors.py", "store.py", "lease.py") else DOCSTRING_LINES[1]  # with a drawing
        if not least <= len(lines) <= most:
            silent.append(f"{module.place}: {len(lines)} lines")
    assert silent == []


def _public_without_docstring(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield f"{module.place} {node.name}"
            for item in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and not ast.get_docstring(item):
                    yield f"{module.place} {node.name}.{item.name}"


def test_every_public_name_says_what_it_does() -> None:
    assert [finding for module in product() for finding in _public_without_docstring(module)] == []


def test_no_module_uses_a_private_name_of_another() -> None:
    private = [
        f"{module.place} imports {name} from {target}"
        for module in product()
        for target, name in module.imports()
        if target.startswith("roost") and name.startswith("_") and not name.startswith("__")
    ]
    assert private == []


def test_the_package_exports_what_it_says() -> None:
    public = [
        "LLM",
        "EngineConfig",
        "MemoryConfig",
        "ModelConfig",
        "Options",
        "SchedConfig",
        "SessionConfig",
        "SpecConfig",
        "__version__",
    ]
    assert roost.__all__ == public
    assert all(hasattr(roost, name) for name in roost.__all__)


def test_type_checkers_see_every_public_name_where_it_is_loaded_from() -> None:
    (package,) = (module for module in product() if module.name == "roost")
    seen = {name: target for target, name in package.imports() if name in roost.__all__}
    assert seen == roost._HOMES


def test_the_architecture_page_has_a_line_for_every_module() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    missing = [m.place for m in product() if m.path.name != "__init__.py" and f"`{_short(m)}`" not in page]
    assert missing == []


def test_every_file_that_the_glossary_names_exists() -> None:
    page = (ROOT / "docs" / "GLOSSARY.md").read_text()
    named = set(re.findall(r"`([\w./]+\.\w+)`", page))
    folders = (ROOT, ROOT / "src" / "roost")
    assert sorted(each for each in named if not any((folder / each).is_file() for folder in folders)) == []
    assert len(named) > 80


def test_the_tables_of_the_glossary_are_sorted() -> None:
    for table in (ROOT / "docs" / "GLOSSARY.md").read_text().split("|---|---|")[1:]:
        rows = table.split("\n\n")[0].splitlines()[1:]
        words = [row.split(" | ")[0].lower() for row in rows]
        assert words == sorted(words) and len(words) == len(set(words))


def _short(module: Module) -> str:
    return str(module.path.relative_to(ROOT / "src" / "roost"))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_planted_bug_still_has_its_line(bug: Bug) -> None:
    compile(swapped_source(bug), bug.module, "exec")


def test_every_planted_bug_has_a_pinned_seed_and_a_line_in_the_table() -> None:
    pins = json.loads((ROOT / "tests" / "planted" / "pins.json").read_text())
    table = (ROOT / "docs" / "PLANTED.md").read_text()
    assert set(pins) == {bug.name for bug in BUGS}
    assert [bug.name for bug in BUGS if f"| {bug.name} |" not in table] == []


def test_the_project_names_no_place_of_a_machine() -> None:
    guilty = [str(path) for path in _texts() if "/" + "root/" in path.read_text() or "/" + "home/" in path.read_text()]
    assert guilty == []


def _texts() -> list[Path]:
    kept = ("src", "tests", "bench", "docs", "examples")
    inside = [path for folder in kept for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".json")]
    return [*inside, *ROOT.glob("*.md"), *ROOT.glob("*.lock"), *ROOT.glob("*.toml"), *ROOT.glob(".*.yaml")]
