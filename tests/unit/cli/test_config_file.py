"""Options from a file and from the environment: flags over file over environment, and nothing is ignored."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from roost.cli import bench, chat, generate, serve
from roost.cli.config_file import completed, ignored_variables
from roost.cli.flag_parser import engine_of, group_of
from roost.cli.main import main
from roost.config.options import EngineConfig
from roost.errors import ConfigError
from roost.server.config import ServerConfig, check_server
from tests.tidy.source import ROOT


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "roost.toml"


def parsed(command: object, *words: str) -> Namespace:
    """What a command makes of its flags."""
    parser = ArgumentParser()
    command.add_flags(parser)  # type: ignore[attr-defined]
    return completed(parser.parse_args(words))


def with_file(file: Path, text: str, *words: str) -> Namespace:
    """The same for `serve`, with a file."""
    file.write_text(text)
    return parsed(serve, "--config", str(file), *words)


def test_flags_are_over_the_file_and_the_file_over_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_PAGE_SIZE", "4")
    monkeypatch.setenv("ROOST_PORT", "1")
    monkeypatch.setenv("ROOST_MAX_RUNNING", "3")
    args = with_file(file, "port = 2\nmax-running = 5", "--max-running", "7")
    assert (args.page_size, args.port, args.max_running) == (4, 2, 7)
    assert engine_of(args).sched.max_running == 7


def test_without_any_of_them_options_have_their_defaults() -> None:
    args = parsed(serve)
    assert (engine_of(args), group_of(args, ServerConfig)) == (EngineConfig(), ServerConfig())


def test_every_kind_of_value_can_be_in_the_file(file: Path) -> None:
    text = """
    model = "m"
    mixed = false
    itl_target_ms = 30
    spec = "ngram"
    spec-steps = 3
    api-key = "one"
    allow-origin = ["https://a.example", "https://b.example"]
    """
    args = with_file(file, text)
    engine, server = engine_of(args), group_of(args, ServerConfig)
    assert (engine.model.model, engine.sched.mixed, engine.sched.itl_target_ms) == ("m", False, 30)
    assert (engine.spec.spec, engine.spec.spec_steps) == ("ngram", 3)
    assert (server.api_key, server.allow_origin) == (("one",), ("https://a.example", "https://b.example"))
    assert engine_of(with_file(file, 'spec-steps = "auto"')).spec.spec_steps == "auto"


def test_a_list_of_flags_takes_the_place_of_the_files(file: Path) -> None:
    args = with_file(file, 'api-key = ["one", "two"]', "--api-key", "three")
    assert group_of(args, ServerConfig).api_key == ("three",)


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("ROOST_MIXED", "off", "mixed", False),
        ("ROOST_GRAPHS", "True", "graphs", True),
        ("ROOST_MEMORY_FRACTION", "0.5", "memory_fraction", 0.5),
        ("ROOST_SPEC_STEPS", "3", "spec_steps", 3),
        ("ROOST_SPEC_STEPS", "auto", "spec_steps", "auto"),
        ("ROOST_API_KEY", "a,b", "api_key", ["a,b"]),
        ("ROOST_LOG_FORMAT", "json", "log_format", "json"),
        ("ROOST_MODEL", "", "model", None),
    ],
)
def test_the_environment_has_every_kind_of_value(
    variable: str, text: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert vars(parsed(serve))[name] == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("page-sise = 4", "page-sise: there is no such option; did you mean page-size?"),
        ("zzz = 4", "zzz: there is no such option"),
        ("temperature = 0.5", "temperature: there is no such option"),
        ("[server]\nport = 1", "server: there is no such option"),
        ('page-size = "4"', "page-size must be a whole number, got a text"),
        ("page-size = true", "page-size must be a whole number, got true or false"),
        ("page-size = 4.0", "page-size must be a whole number, got a number"),
        ('mixed = "no"', "mixed must be true or false, got a text"),
        ("memory-fraction = false", "memory-fraction must be a number, got true or false"),
        ("model = 3", "model must be a text, got a whole number"),
        ("spec-steps = 1.5", "spec-steps must be a whole number or a word, got a number"),
        ('api-key = ["one", 2, 3]', "api-key must be a text or a list of texts, got a list of a text, a whole number"),
        ("api-key = {one = 1}", "api-key must be a text or a list of texts, got a table"),
        ("port = []", "port must be a whole number, got a list of nothing"),
        ("port = 2026-11-19", "port must be a whole number, got a date or a time"),
        ("api-key = [1]", "api-key must be a text or a list of texts, got a list of a whole number"),
        ('device = "tpu"', "device must be one of auto, cpu, cuda, got 'tpu'"),
        ("strict-memory = 7", "strict-memory must be one of 0, 1, 2, got 7"),
        ("page-size = 4\npage_size = 8", "page_size is given twice"),
        ("page-size 4", "is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(file: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_file(file, text)
    assert f"--config {file}: {said}" in str(refused.value)


@pytest.mark.parametrize("key", ["port", "memory-fraction", "mixed"])
def test_a_value_of_a_wrong_type_is_not_repeated(key: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=key) as refused:
        with_file(file, f'{key} = "sk-very-secret"')
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("ROOST_PORT", "tcp://10.0.0.1:8000", "$ROOST_PORT must be a whole number, got 'tcp://10.0.0.1:8000'"),
        ("ROOST_MIXED", "maybe", "$ROOST_MIXED must be true or false, got 'maybe'"),
        ("ROOST_DEVICE", "tpu", "$ROOST_DEVICE must be one of auto, cpu, cuda, got 'tpu'"),
        ("ROOST_ITL_TARGET_MS", "x", "$ROOST_ITL_TARGET_MS must be a number, got 'x'"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(
    variable: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, text)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == f"roost serve: error: {said}\n"


def test_variables_that_are_no_options_are_named_with_what_is_near_and_without_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("ROOST_")]:
        monkeypatch.delenv(name)
    read = ("PORT", "API_KEY", "CACHE", "TEST_BACKEND", "SCREENSHOTS")
    for name in (*read, "PAGE_SISE", "ZZZ", "port", "SERVICE_HOST"):
        monkeypatch.setenv(f"ROOST_{name}", "secret")
    monkeypatch.setenv("ROOST_MODL", "")
    monkeypatch.setenv("ROOSTER", "secret")
    said = "is ignored: there is no such option"
    assert ignored_variables() == [
        f"$ROOST_PAGE_SISE {said}; did you mean $ROOST_PAGE_SIZE?",
        f"$ROOST_SERVICE_HOST {said}",
        f"$ROOST_ZZZ {said}",
        f"$ROOST_port {said}; did you mean $ROOST_PORT?",
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none\.toml: cannot be read: No such file"):
        parsed(serve, "--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize("command", [generate, chat, bench])
def test_other_commands_take_the_engine_of_the_same_file(command: object, file: Path) -> None:
    file.write_text('model = "m"\nport = 9\nmax-running = 2')
    engine = engine_of(parsed(command, "--config", str(file)))
    assert (engine.model.model, engine.sched.max_running) == ("m", 2)


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_running_servers_engine_has_its_own(
    command: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOST_MODEL", "m")  # of a server that is started here, not of this one
    url = ["--url", "http://127.0.0.1:9"]
    assert main([command, *url, "--config", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"roost {command}: error: --config is for an engine in this process")
    assert main([command, *url]) != 0
    assert "--model" not in capsys.readouterr().err


def test_the_example_works() -> None:
    args = parsed(serve, "--config", str(ROOT / "roost.example.toml"))
    check_server(group_of(args, ServerConfig))
    assert engine_of(args).sched.max_running == 64
