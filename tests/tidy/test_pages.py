"""Pages stay true: the map of CONTRIBUTING.md has every folder, paths and links exist, the log has dates and areas."""

import re

import roost
from tests.tidy.source import ROOT, SOURCE

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def _map() -> list[tuple[str, str]]:
    section = PAGE.partition("## Changed this, run that")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [(changed, run) for changed, run in rows[1:]]


def test_the_map_of_what_to_run_has_every_folder_of_the_package() -> None:
    named = {name for changed, _ in _map() for name in re.findall(r"`([\w/]+)/`", changed)}
    folders = {path.name for path in (SOURCE / "roost").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert named == folders


def test_paths_and_targets_of_the_page_are_there() -> None:
    paths = re.findall(r"(?:tests|bench)/[\w/.]*\w", PAGE)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)", PAGE))
    assert [target for target in sorted(targets) if f"\n{target}:" not in makefile] == []


def test_links_between_pages_lead_to_files() -> None:
    broken = [
        f"{page.name}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_every_entry_of_the_log_has_its_date_and_area_in_order() -> None:
    entries = [line for line in (ROOT / "docs" / "LOG.md").read_text().splitlines() if line.startswith("- ")]
    dated = [re.match(r"- (\d{4}-\d\d-\d\d), [a-z]+: \*\*", line) for line in entries]
    assert [line for line, found in zip(entries, dated, strict=True) if found is None] == []
    dates = [found[1] for found in dated if found]
    assert dates == sorted(dates)


def test_every_section_of_figures_has_its_date_and_command_and_every_result_is_named() -> None:
    page = (ROOT / "docs" / "BENCHMARKS.md").read_text()
    _, *sections = page.split("\n## ")
    measured = re.compile(r"^\*\d{4}-\d\d-\d\d, (CPU|H200).*?`(make|python -m|pytest) ", re.MULTILINE | re.DOTALL)
    assert [section.splitlines()[0] for section in sections if not measured.search(section)] == []
    named = set(re.findall(r"bench/results/(\w+\.json)", page))
    assert named == {path.name for path in (ROOT / "bench" / "results").iterdir()}


def test_the_changelog_has_this_version() -> None:
    assert f"\n## [{roost.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
