"""What is deployed, and what is refused before anything is."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from roost.cli.config_file import namespace_of
from roost.cli.main import main
from roost.config.options import EngineConfig, ModelConfig
from roost.errors import ConfigError
from roost.ray.build import INGRESS, OWN, REPLICA, REPLICAS_MAX, app, check_cluster, plan_of, replicas_of, resources_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("given", ["", "0", "two", "1:", ":2", "3:2", "1:2:3", "-1", "1.5", str(REPLICAS_MAX + 1)])
def test_a_number_of_replicas_that_cannot_be_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--replicas must be N or MIN:MAX"):
        replicas_of(given)


def test_a_number_of_replicas_may_be_a_range() -> None:
    assert [replicas_of(given) for given in ("2", "1:4", str(REPLICAS_MAX))] == [(2, 2), (1, 4), (REPLICAS_MAX,) * 2]


def test_a_cluster_that_is_too_small_is_refused_with_what_is_needed_and_there() -> None:
    nodes = [{"CPU": 3.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}]
    check_cluster(nodes, {"CPU": 1, "GPU": 1}, 3)
    check_cluster(nodes, {"CPU": 2, "GPU": 2}, 1)
    with pytest.raises(ConfigError, match=r"2 replicas need 2 CPU and 2 GPU each, on one node.*room for 1.*3 CPU"):
        check_cluster(nodes, {"CPU": 2, "GPU": 2}, 2)
    with pytest.raises(ConfigError, match="room for 0"):
        check_cluster([], {"CPU": 1}, 1)


def test_a_replica_takes_a_gpu_for_each_rank_or_its_threads() -> None:
    assert resources_of(EngineConfig(model=ModelConfig(tp=2)), on_gpu=True) == {"CPU": 2, "GPU": 2}
    assert resources_of(EngineConfig(model=ModelConfig(tp=2, threads=3)), on_gpu=False) == {"CPU": 6}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"keep_alive_s": 3}, "--keep-alive-s has no effect on Ray Serve"),
        ({"port": "8000"}, "--port has no effect on Ray Serve"),
        ({"engine_restarts": 2}, "--engine-restarts has no effect on Ray Serve: a replica ends with its engine"),
        ({"modle": "x"}, "there is no such option; did you mean model"),
        ({"max_running": "many"}, "max_running must be a whole number"),
        ({"cluster_grows": "perhaps"}, "cluster_grows must be true or false"),
        ({"replicas": "2:1"}, "--replicas must be"),
        ({"log-level": "loud"}, "log-level must be one of"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        app(args)


def test_arguments_are_those_of_the_command_line() -> None:
    args = namespace_of({"max-running": "3", "served_model_name": ["owl", "eule"], "drain_s": 5, "mixed": "off"})
    args.replicas, args.cluster_grows = "1:2", None
    plan = plan_of(args, has_address=False)
    assert (plan.engine.sched.max_running, plan.engine.sched.mixed, plan.replicas) == (3, False, (1, 2))
    assert (plan.config.served_model_name, plan.config.drain_s) == (("owl", "eule"), 5)


def test_the_page_shows_kubernetes_a_file_that_serve_deploy_takes() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "CLUSTER.md").read_text(), re.DOTALL)
    service = yaml.safe_load(shown)
    for text in (service["spec"]["serveConfigV2"], (ROOT / "deploy" / "ray" / "roost.yaml").read_text()):
        (deployed,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
        assert deployed.import_path == "roost.ray:app"
        assert {each.name for each in deployed.deployments} <= {REPLICA, INGRESS}
        namespace_of({name: value for name, value in deployed.args.items() if name not in OWN})


def test_replicas_need_ray_to_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--replicas", "2"]) == 2
    assert "--replicas needs --ray" in capsys.readouterr().err
