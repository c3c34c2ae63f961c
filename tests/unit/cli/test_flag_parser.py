"""Flags come from the configuration: every field has one, and a bad value ends the command with the flag's name."""

import re
import shlex
from argparse import ArgumentParser
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import pytest

from roost.cli import bench, chat, doctor, generate, serve
from roost.cli.commands import COMMANDS
from roost.cli.flag_parser import engine_of, group_of
from roost.cli.main import main
from roost.config.options import (
    BACKEND_NAMES,
    DEVICES,
    STRICT_MEMORY,
    WEIGHTS,
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    SchedConfig,
    SpecConfig,
)
from roost.drafters.registry import LAYER_ID_SHIFTS, spec_names
from roost.errors import ConfigError
from roost.server.config import LOG_LEVELS, ServerConfig, check_server, served_names
from tests.support.chain_model import save_chain

ENGINE_GROUPS = (ModelConfig, MemoryConfig, SchedConfig, SpecConfig)


def parser(command: object) -> ArgumentParser:
    made = ArgumentParser()
    command.add_flags(made)  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        (serve, (*ENGINE_GROUPS, ServerConfig)),
        (chat, ENGINE_GROUPS),
        (generate, ENGINE_GROUPS),
        (bench, ENGINE_GROUPS),
        (doctor, ENGINE_GROUPS),
    ],
    ids=["serve", "chat", "generate", "bench", "doctor"],
)
def test_every_field_of_the_configuration_has_a_flag_with_its_help(command: object, groups: tuple[type, ...]) -> None:
    actions = {option: action for action in parser(command)._actions for option in action.option_strings}
    for group in groups:
        for field in fields(group):
            flag = "--" + field.name.replace("_", "-")
            assert flag in actions, flag
            assert field.metadata["help"] in (actions[flag].help or ""), flag


def test_without_flags_the_configuration_is_the_default() -> None:
    args = parser(serve).parse_args([])
    assert engine_of(args) == EngineConfig()
    assert group_of(args, ServerConfig) == ServerConfig()


def test_flags_used_by_everybody_reach_their_fields() -> None:
    given = (
        "--model m --weights fp32 --device cpu --threads 3 --page-size 8 --pool-tokens 4096 --window-pool-tokens 512"
    )
    given += " --strict-memory 2 --context 99 --max-running 5 --max-queued 6 --chunk 7 --host ::1 --port 1 --drain-s 2"
    args = parser(serve).parse_args([*given.split(), "--api-key", "one", "--api-key", "two"])
    assert engine_of(args) == EngineConfig(
        model=ModelConfig(model="m", weights="fp32", device="cpu", threads=3),
        memory=MemoryConfig(page_size=8, pool_tokens=4096, window_pool_tokens=512, strict_memory=2),
        sched=SchedConfig(context=99, max_running=5, max_queued=6, chunk=7),
    )
    assert group_of(args, ServerConfig) == ServerConfig(host="::1", port=1, drain_s=2, api_key=("one", "two"))


def test_names_of_the_model_may_be_given_one_by_one_or_with_commas_between() -> None:
    args = parser(serve).parse_args(["--served-model-name", "owl, night/owl", "--served-model-name", "bird"])
    names = served_names(group_of(args, ServerConfig).served_model_name)
    assert names == ("owl", "night/owl", "bird")
    check_server(ServerConfig(served_model_name=(*names, "x" * 256)))
    for bad in ("", "a,", "a\nb", "x" * 257):
        with pytest.raises(ConfigError, match="--served-model-name must have 1 to 256 characters"):
            check_server(ServerConfig(served_model_name=served_names((bad,))))


def test_flags_of_speculation_reach_their_fields() -> None:
    given = "--spec eagle3 --draft head --spec-steps 5 --spec-topk 8 --spec-tokens 32 --spec-max-batch 16"
    args = parser(serve).parse_args([*given.split(), "--draft-layer-ids", "vllm"])
    assert engine_of(args).spec == SpecConfig(
        spec="eagle3",
        draft="head",
        spec_steps=5,
        spec_topk=8,
        spec_tokens=32,
        spec_max_batch=16,
        draft_layer_ids="vllm",
    )


@pytest.mark.parametrize(("given", "steps"), [("auto", "auto"), ("3", 3), ("x", "x")])  # what it may be, start-up says
def test_steps_are_a_number_or_a_word(given: str, steps: int | str) -> None:
    assert engine_of(parser(serve).parse_args(["--spec-steps", given])).spec == SpecConfig(spec_steps=steps)


@pytest.mark.parametrize(("flags", "spec"), [("", None), ("--spec", "auto"), ("--spec ngram", "ngram")])
def test_spec_alone_is_auto(flags: str, spec: str | None) -> None:
    assert engine_of(parser(serve).parse_args([*flags.split(), "--port", "1"])).spec == SpecConfig(spec=spec)


@pytest.mark.parametrize("name", ["mixed", "overlap"])
def test_what_is_on_can_be_switched_off_and_on_again(name: str) -> None:
    assert engine_of(parser(serve).parse_args([f"--no-{name}"])).sched == replace(SchedConfig(), **{name: False})
    assert engine_of(parser(serve).parse_args([f"--no-{name}", f"--{name}"])).sched == SchedConfig()


@pytest.mark.parametrize(
    "flags",
    ["--page-size x", "--threads 1.5", "--chunk", "--port 80a", "--strict-memory full", "--mixed=yes", "--unknown 1"],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_flag(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags.split()])
    assert ended.value.code == 2
    assert flags.split(maxsplit=1)[0].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        "--page-size 0",
        "--pool-tokens 1",
        "--context 1",
        "--context 100000",
        "--max-running 0",
        "--max-queued 0",
        "--chunk 0",
        "--threads 0",
        "--threads 100000",
        "--spec eagle",
        "--spec-steps 3",
        "--spec-steps many --spec ngram",
        "--spec-steps auto --spec-tokens 5 --spec ngram",
        "--draft head",
        "--temperature -1",
        "--top-p 0",
        "--top-k 0",
        "--min-p 2",
        "--repetition-penalty 0",
        "--seed -1",
        "--max-new-tokens -1",
        "--stop=",
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_flag(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_chain(tmp_path, "a", "b")
    assert main(["generate", "a", "--model", str(folder), *flags.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("roost generate: error: ") and said.count("\n") == 1
    assert flags.split(maxsplit=1)[0].rstrip("=") in said


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "completion"])  # it has another argument
def test_a_usage_error_names_its_command_and_what_is_wrong(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--bogus", "3"])
    assert ended.value.code == 2
    usage, said = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: roost {command} [options]")
    assert said.startswith(f"roost {command}: error: unrecognized arguments: --bogus")


CHOSEN = {
    "weights": WEIGHTS,
    "device": DEVICES,
    "backend": BACKEND_NAMES,
    "strict_memory": STRICT_MEMORY,
    "spec": spec_names(),
    "draft_layer_ids": tuple(LAYER_ID_SHIFTS),
    "log_level": LOG_LEVELS,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_flag_with_a_fixed_set_of_values_offers_them_and_refuses_others(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--" + name.replace("_", "-")
    for value in CHOSEN[name]:
        assert vars(parser(serve).parse_args([flag, str(value)]))[name] == value
    with pytest.raises(SystemExit):
        main(["serve", flag, "7"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"roost serve: error: argument {flag}: invalid choice: ")
    assert all(str(value) in said for value in CHOSEN[name])


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_has_choices_defaults_and_examples_that_can_be_parsed(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    options, _, examples = capsys.readouterr().out.partition("examples:\n")
    lines = [line.strip() for line in examples.splitlines()]
    assert lines and all(line.startswith("roost ") for line in lines)
    made = parser(import_module(f"roost.cli.{command.replace('-', '_')}"))
    for line in lines:
        words = shlex.split(re.split(r"  +|[<>]", line)[0])[1:]
        if words[0] == command:
            made.parse_args(words[1:])
    for action in made._actions:
        if action.dest != "help":
            assert action.help, action.dest
            says_default = action.default in (None, False, []) or action.dest == "chat" or "(default: " in action.help
            assert says_default, action.dest
    if command in ("serve", "chat", "generate", "bench"):
        assert "--weights {auto,int8,fp32,bf16,fp8,int4,gguf}" in options and "(default: 64)" in options
        assert "prefill chunks and decode rounds in one step (default: on)" in options


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_flags_of_an_engine_are_refused_beside_a_running_servers(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--model", "x"], ["--no-overlap"], ["--max-running", "3"]):
        assert main([command, "--url", "http://127.0.0.1:9", *flags]) == 2
        flag = flags[0].replace("--no-", "--")
        assert capsys.readouterr().err.startswith(f"roost {command}: error: {flag} is for an engine in this process")


def test_a_model_that_is_not_there_is_refused_by_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat", "bench", "serve"):
        assert main([command, "--model", "nowhere.gguf"] + (["a"] if command == "generate" else [])) == 2
        assert "--model: there is no file or folder nowhere.gguf" in capsys.readouterr().err
