"""The answers of all replicas become one."""

import json

from prometheus_client.parser import text_string_to_metric_families

from roost.ray.every_replica import joined_metrics, merged

METRICS = """\
# HELP roost_queued Requests that wait
# TYPE roost_queued gauge
roost_queued {}
# HELP roost_seconds Time
# TYPE roost_seconds histogram
roost_seconds_bucket{{le="0.1"}} 1.0
roost_seconds_bucket{{le="+Inf"}} 2.0
roost_seconds_count 2.0
roost_seconds_sum 0.5
"""


def test_metrics_have_each_family_once_and_each_sample_with_its_replica() -> None:
    families = list(text_string_to_metric_families(joined_metrics({"a": METRICS.format(1), "b": METRICS.format(2)})))
    assert [(family.name, family.type) for family in families] == [
        ("roost_queued", "gauge"),
        ("roost_seconds", "histogram"),
    ]
    queued = {sample.labels["replica"]: sample.value for sample in families[0].samples}
    assert queued == {"a": 1, "b": 2}
    assert len(families[1].samples) == 8


def test_a_deployment_is_healthy_as_long_as_one_replica_is() -> None:
    good, bad = b'{"status": "ok"}', b'{"error": {"message": "the engine is not running"}}'
    answer = merged("/health", [("a", 503, bad), ("b", 200, good)])
    assert answer.status_code == 200
    assert json.loads(bytes(answer.body)) == {"status": "ok", "replicas": {"a": "unhealthy", "b": "ok"}}
    assert merged("/health", [("a", 503, bad)]).status_code == 503
    assert merged("/health", []).status_code == 503


def test_a_command_to_all_that_one_refuses_is_refused() -> None:
    answer = merged("/flush_cache", [("a", 200, b"done"), ("b", 403, b'{"error": {}}')])
    assert (answer.status_code, bytes(answer.body)) == (403, b'{"error": {}}')
    lists = [(name, 200, json.dumps({"data": [{"id": name}]}).encode()) for name in "ab"]
    listed = json.loads(bytes(merged("/v1/sessions", lists).body))["data"]
    assert listed == [{"id": "a", "replica": "a"}, {"id": "b", "replica": "b"}]
