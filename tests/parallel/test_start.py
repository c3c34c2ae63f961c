"""What --tp cannot be is refused at the start with what is needed; and ranks get what one process would have."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from roost import EngineConfig, MemoryConfig, ModelConfig, SchedConfig
from roost.cli.main import main
from roost.clients import ClientLimits
from roost.config.resolve import resolve
from roost.environment import cuda_devices
from roost.errors import ConfigError
from roost.parallel.identity import as_text, checkpoint_of, configuration, differences, from_text
from roost.parallel.start import check_tp, with_ranks
from tests.parallel.conftest import CONFIG
from tests.support.tiny_folder import write_model
from tests.support.tiny_models import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
POOL, GRAPHS = MemoryConfig(pool_tokens=64), SchedConfig(graphs=True)


def of(tp: int, transport: str | None = None, **groups: object) -> EngineConfig:
    """A configuration with so many ranks."""
    return EngineConfig(model=ModelConfig(tp=tp, tp_transport=transport), **groups)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "device", "said"),
    [
        (of(0), CPU, "--tp must be at least 1, got 0"),
        (of(1, "gloo"), CPU, "--tp-transport gloo is for --tp above 1"),
        (of(2, "mpi"), CPU, "--tp-transport must be one of nccl, gloo, got mpi"),
        (of(2, "nccl"), CPU, "--tp-transport nccl is for CUDA devices"),
        (of(4), CUDA, "--tp 4 needs 4 CUDA devices, and there are 2; with --tp-transport gloo ranks share them"),
        (of(2, "gloo", sched=GRAPHS), CUDA, "--graphs: what --tp-transport gloo moves cannot be captured"),
        (of(4, "gloo"), CUDA, "--tp 4 on 2 CUDA devices needs --pool-tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_needed(config: EngineConfig, device: torch.device, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_tp(config, device, 2)


@pytest.mark.parametrize(
    ("config", "device"),
    [(of(1), CPU), (of(8), CPU), (of(2), CUDA), (of(2, "gloo"), CUDA), (of(4, "gloo", memory=POOL), CUDA)],
)
def test_what_can_be_is_not(config: EngineConfig, device: torch.device) -> None:
    check_tp(config, device, 2)


def test_ranks_share_the_cores_unless_told_and_gloo_has_no_graphs() -> None:
    cores = torch.get_num_threads()
    assert with_ranks(of(2), CPU).model.threads == max(1, cores // 2)
    told = replace(of(2), model=ModelConfig(tp=2, threads=3))
    assert with_ranks(told, CPU) == told
    assert with_ranks(of(1), CPU) == of(1)
    assert with_ranks(of(2), CUDA).sched.graphs is None
    assert with_ranks(of(2, "gloo"), CUDA).sched.graphs is False


def test_a_model_that_cannot_be_split_is_refused_before_anybody_is_started(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "h", "--model", str(folder), "--tp", "3", "--device", "cpu"]) == 2
    assert "--tp 3: " in capsys.readouterr().err


def test_each_rank_has_a_device_of_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_devices(3) == ("0", "1", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5,7")
    assert cuda_devices(2) == ("3", "GPU-5")


def test_a_configuration_reaches_a_follower_as_it_is() -> None:
    config = replace(CONFIG, clients=(ClientLimits(name="a", running=2),))
    assert from_text(as_text(config)) == config


def test_what_differs_between_checkpoints_and_configurations_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one = checkpoint_of(write_model(tmp_path / "a"))
    assert {Path(name).name for name in one} >= {"config.json", "model.safetensors", "tokenizer.json"}
    (tmp_path / "a" / "config.json").write_text("{}")
    (differing,) = differences(one, checkpoint_of(tmp_path / "a"))
    assert "config.json is " in differing and " here and " in differing
    traits = tiny("llama").model().traits
    resolved = resolve(CONFIG, traits), resolve(replace(CONFIG, sched=SchedConfig(max_running=3)), traits)
    told = [configuration(each, weights="fp32") for each in resolved]
    assert list(differences(told[0], told[0])) == []
    assert any("max_running=8" in each and "max_running=3" in each for each in differences(*told))
