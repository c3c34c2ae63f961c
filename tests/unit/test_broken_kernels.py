"""A backend whose kernels cannot be compiled is replaced by torch, in one line, or refused where it was asked for."""

from pathlib import Path

import pytest

from roost import LLM
from roost.attention.registry import NUMBA, TORCH, Backend
from roost.config.options import EngineConfig, ModelConfig
from roost.errors import ConfigError
from tests.support.tiny_folder import write_model

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba is the default, and its kernels do not compile."""

    def prepare() -> None:
        raise RuntimeError("no such intrinsic\nand much more")

    def backend_of(config: EngineConfig, *_: object) -> Backend:
        return TORCH if config.model.backend == "torch" else NUMBA

    monkeypatch.setattr("roost.numba_kernels.execution.prepare", prepare)
    monkeypatch.setattr("roost.startup.backend_of", backend_of)


def test_torch_computes_instead_and_one_line_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(write_model(tmp_path))) as llm:
        assert llm._running.settings["backend"] == "torch"
    (said,) = (each.message for each in caplog.records if each.name == "roost.startup")
    assert said == "torch computes: the kernels of --backend numba cannot be compiled here (no such intrinsic)"


def test_it_is_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelConfig(backend="numba"))
    with pytest.raises(
        ConfigError, match=r"^--backend numba: its kernels cannot be compiled here \(no such intrinsic\)"
    ):
        LLM(str(write_model(tmp_path)), config)
