"""The dashboard and the alert rules ask for metrics and labels that exist, and every metric is on the dashboard."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.promql import Selector, grouped_by, selectors
from tests.support.server_process import Server

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "roost.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "roost-alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTED = [rule["expr"] for rule in RULES]
PROMETHEUS_OWN = {"job", "instance"}  # labels that it adds
NOT_SHOWN: dict[str, str] = {}  # metrics without a panel, and why

Exposed = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def families(friendly: Server) -> dict[str, Exposed]:
    """What a server exposes after a request: the samples of each family, with their labels."""
    friendly.generate({"text": "a", "sampling_params": {"max_new_tokens": 2}})
    text = friendly.http.get("/metrics").text
    found: dict[str, Exposed] = {}
    for family in text_string_to_metric_families(text):
        samples = found.setdefault(family.name, {})
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(dict(sample.labels))
    return {name: samples for name, samples in found.items() if not name.endswith("_created")}


@pytest.fixture(scope="module")
def exposed(families: dict[str, Exposed]) -> Exposed:
    """All samples, by name."""
    samples = {name: labels for family in families.values() for name, labels in family.items()}
    return {**samples, "up": [{}]}


@pytest.mark.parametrize("expression", [*SHOWN, *ALERTED])
def test_every_metric_and_label_that_is_asked_for_exists(expression: str, exposed: Exposed) -> None:
    asked = list(selectors(expression))
    assert asked
    labels: set[str] = set()
    for each in asked:
        assert each.metric in exposed, each.metric
        samples = exposed[each.metric]
        own = {label for sample in samples for label in sample}
        labels |= own
        assert set(each.labels) <= own | PROMETHEUS_OWN, each
        for label in set(each.labels) - PROMETHEUS_OWN:
            values = {sample[label] for sample in samples}
            assert all(any(re.fullmatch(form, value) for value in values) for form in each.labels[label]), each
    assert grouped_by(expression) <= labels | PROMETHEUS_OWN


def test_every_metric_has_a_panel_or_a_reason(families: dict[str, Exposed]) -> None:
    shown = {each.metric for expression in SHOWN for each in selectors(expression)}
    hidden = {name for name, samples in families.items() if not shown & set(samples)}
    assert hidden == set(NOT_SHOWN) and all(NOT_SHOWN.values())


@pytest.mark.parametrize(("panel"), PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_legend_and_a_summary_name_labels_that_are_left(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        aggregates = "sum" in target["expr"] or "min(" in target["expr"]
        assert named <= (grouped_by(target["expr"]) if aggregates else PROMETHEUS_OWN)


def test_the_dashboard_has_one_panel_in_each_place_and_reads_the_data_source_that_is_chosen() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
    sources = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert sources == {"${datasource}"}
    assert {each["name"] for each in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert named <= PROMETHEUS_OWN | grouped_by(rule["expr"]), rule["alert"]


@pytest.mark.parametrize(
    ("expression", "read", "grouped"),
    [
        ("up == 0", [Selector("up")], set()),
        ("a < Inf or b offset 5m", [Selector("a"), Selector("b")], set()),
        ('a{x=~"p|q",y!="r"} > 1', [Selector("a", {"x": ("p", "q"), "y": ("r",)})], set()),
        ("sum by (le, b) (rate(a_bucket[$__rate_interval]))", [Selector("a_bucket")], {"le", "b"}),
        ("a / on (i) group_left () b", [Selector("a"), Selector("b")], {"i"}),
        ("histogram_quantile(0.5, sum (rate(a{}[5m])))", [Selector("a")], set()),
    ],
)
def test_the_names_of_an_expression_are_found(expression: str, read: list[Selector], grouped: set[str]) -> None:
    assert list(selectors(expression)) == read and grouped_by(expression) == grouped
