"""What images and the service are made of exists: files, stages, flags and variables; neither is built here."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from argparse import ArgumentParser
from configparser import ConfigParser
from fnmatch import fnmatch
from pathlib import Path

import pytest

from roost.cli import serve
from roost.cli.flag_parser import engine_of, group_of
from roost.environment import cache_folder, triton_folder
from roost.server.app import _OPEN
from roost.server.config import ServerConfig, check_server
from tests.install.resolve import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNIT = ROOT / "deploy" / "systemd" / "roost.service"
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and what follows them, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def of(name: str) -> list[str]:
    return [rest for each, rest in instructions() if each == name]


def served(*flags: str) -> ServerConfig:
    """What `roost serve` makes of these flags; whatever it would refuse at once fails here."""
    parser = ArgumentParser()
    serve.add_flags(parser)
    args = parser.parse_args(flags)
    config = group_of(args, ServerConfig)
    check_server(config)
    assert engine_of(args).model.model == "default"
    return config


def reaches_the_build(path: str) -> bool:
    """Whether .dockerignore lets a path into the build: the last line that matches decides."""
    kept = True
    for line in IGNORED:
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = [path, *path.split("/")] if "**/" in line else [path, path.split("/", maxsplit=1)[0]]
        if any(fnmatch(part, pattern) for part in parts):
            kept = line.startswith("!")
    return kept


# --- images ----------------------------------------------------------------------------------------------------------


def test_an_image_is_built_of_files_that_exist_and_reach_the_build() -> None:
    copied = [shlex.split(rest)[:-1] for rest in of("COPY") if not rest.startswith("--from=")]
    names = [name for each in copied for name in each]
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} == set(names)
    assert all((ROOT / name).exists() and reaches_the_build(name) for name in names)
    head = next((ROOT / "src" / "roost" / "heads").glob("*/*.safetensors"))
    assert reaches_the_build(str(head.relative_to(ROOT)))
    left_out = (".git", ".venv", "tests", "docs", "src/roost/__pycache__", "src/roost.egg-info")
    assert not [name for name in left_out if reaches_the_build(name)]


def test_every_stage_and_what_is_copied_from_it_was_made_before() -> None:
    made: set[str] = set()
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            assert base.startswith("python:") or base in made, rest
            made.add(stage)
        elif rest.startswith("--from="):
            stage, source, _ = shlex.split(rest)
            assert stage.removeprefix("--from=") in made
            assert any(source in run for run in of("RUN")), source
    assert {"cpu", "cuda"} <= made


def test_an_image_has_a_python_that_the_project_takes_and_installs_the_server() -> None:
    (default,) = (rest for rest in of("ARG") if rest.startswith("PYTHON_VERSION="))
    least = PROJECT["requires-python"].removeprefix(">=")
    assert tuple(map(int, default.partition("=")[2].split("."))) >= tuple(map(int, least.split(".")))
    installs = [run for run in of("RUN") if "'.[" in run]
    extras = [extra for run in installs for extra in re.findall(r"'\.\[(\w+)\]'", run)]
    assert len(installs) == 2 and set(extras) == {"server"} <= set(PROJECT["optional-dependencies"])


def test_an_image_serves_as_its_own_user_at_the_port_that_it_names() -> None:
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    (script,) = json.loads(entry)
    name, *flags = json.loads(command)
    assert script in PROJECT["scripts"] and name == "serve"
    config = served(*flags)
    assert config.host == "0.0.0.0" and of("EXPOSE") == [str(config.port)]
    (probe,) = (rest for rest in of("HEALTHCHECK"))
    (path,) = re.findall(rf"127\.0\.0\.1:{config.port}(/\w+)", probe)
    assert path in _OPEN, "it needs no key"
    compile(json.loads(probe.partition("CMD ")[2])[2], "probe", "exec")
    assert of("USER")[-1] == "roost" and any("useradd" in run and " roost " in run for run in of("RUN"))


def test_what_an_image_keeps_is_on_its_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    for rest in of("ENV"):
        for each in shlex.split(rest):
            monkeypatch.setenv(*each.split("=", 1))
    (volume,) = of("VOLUME")
    assert cache_folder() == Path(volume) and triton_folder().is_relative_to(volume)


# --- the service -----------------------------------------------------------------------------------------------------


@pytest.fixture
def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_service_runs_a_command_that_is_accepted(unit: ConfigParser) -> None:
    program, name, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name in PROJECT["scripts"] and name == "serve"
    assert flags == ["$FLAGS"], "a flag here would win over a file that --config names, and over the environment"
    assert served().host == "127.0.0.1"


def test_the_service_keeps_its_files_where_it_may_write(unit: ConfigParser, monkeypatch: pytest.MonkeyPatch) -> None:
    service = unit["Service"]
    state = f"/var/lib/{service['StateDirectory']}"
    for each in service["Environment"].replace("%S", "/var/lib").split():
        monkeypatch.setenv(*each.split("=", 1))
    assert cache_folder() == Path(state) and triton_folder().is_relative_to(state)
    assert service["WorkingDirectory"].replace("%S", "/var/lib") == state


def test_the_service_is_hardened_and_starts_again_after_a_failure(unit: ConfigParser) -> None:
    service = unit["Service"]
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2"
    for name in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert service[name] == "yes", name
    assert service["CapabilityBoundingSet"] == "" and service["ProtectSystem"] == "strict"
    assert "MemoryDenyWriteExecute" not in service, "kernels are compiled"
    assert int(service["TimeoutStopSec"]) > ServerConfig().drain_s


def test_systemd_understands_the_service(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/roost/bin/roost", "/bin/true"))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
