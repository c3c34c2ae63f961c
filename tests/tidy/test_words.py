"""One word for one thing: no two classes of the package share a name, and retired words stay retired."""

import ast
import re
from collections import defaultdict

from tests.tidy.source import ROOT, SOURCE, product
from tests.tidy.words import RETIRED, SHARED_NAMES


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for module in product():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module.place)
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if name not in SHARED_NAMES} == {}, "rename one of them"
    assert [name for name in SHARED_NAMES if name not in shared] == [], "take them off the list"


def test_retired_words_do_not_come_back() -> None:
    words = re.compile(rf"(?<![A-Za-z])({'|'.join(map(re.escape, RETIRED))})(?![A-Za-z])", re.IGNORECASE)
    history = ROOT / "docs" / "LOG.md"  # tells of the past in its words
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page != history)]
    guilty = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]} (write {RETIRED[found[0].lower()]})"
        for path in [*pages, *sorted((SOURCE / "roost").rglob("*.py"))]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := words.search(line))
    ]
    assert guilty == []
