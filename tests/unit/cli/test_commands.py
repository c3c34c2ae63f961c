"""The commands, from their arguments to what they print, on a checkpoint whose output is known."""

import io
import json
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

import roost
from roost.cli import bench, pull
from roost.cli.main import main
from roost.errors import ConfigError
from tests.unit.chain import save_chain

SPELT = ("\n", "h", "e", "12", "!", "<|im_end|>")  # what follows the line end that opens an answer
ENGINE = ("--weights", "fp32", "--threads", "1", "--pool-tokens", "2048", "--page-size", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain(tmp_path_factory.mktemp("chain"), *SPELT)


def python(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, timeout=120)


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# --- generate --------------------------------------------------------------------------------------------------


def test_generate_prints_what_follows_the_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "h", "--model", str(folder), *ENGINE]) == 0
    assert capsys.readouterr().out == "e12!\n"


def test_generate_reads_the_prompt_from_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "a text that ends in h")
    assert main(["generate", "--model", str(folder), "--max-new-tokens", "2", *ENGINE]) == 0
    assert capsys.readouterr().out == "e12\n"


def test_generate_as_a_chat_and_to_a_stop(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "hi", "--model", str(folder), "--stop", "2!", "--stop", "x", *ENGINE]) == 0
    assert capsys.readouterr().out == "he1\n"


def test_generate_refuses_an_empty_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "")
    assert main(["generate", "--model", str(folder), *ENGINE]) == 2
    assert capsys.readouterr().err == "roost: tokens: must hold at least 1 token\n"


# --- chat ------------------------------------------------------------------------------------------------------


def test_chat_answers_each_line_and_finds_the_conversation_in_its_cache(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "hello\nand again\n\nnever read\n")
    assert main(["chat", "--model", str(folder), "--temperature", "0", "--system", "Be brief.", *ENGINE]) == 0
    printed = capsys.readouterr()
    assert printed.out == "he12!\nhe12!\n"
    assert "is ready" in printed.err and printed.err.count("5 tokens, ") == 2
    assert " 0 of " in printed.err.splitlines()[1] and " 0 of " not in printed.err.splitlines()[2]


def test_chat_ends_with_its_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "hello")
    assert main(["chat", "--model", str(folder), "--temperature", "0", *ENGINE]) == 0
    assert capsys.readouterr().out == "he12!\n"


def test_chat_goes_on_after_a_message_that_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "x" * 3000 + "\nshort\n")
    assert main(["chat", "--model", str(folder), "--temperature", "0", *ENGINE]) == 0
    printed = capsys.readouterr()
    assert printed.out == "he12!\n" and "tokens: " in printed.err


# --- bench -----------------------------------------------------------------------------------------------------


def test_bench_measures_every_concurrency_and_writes_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--requests", "6", "--new-tokens", "5", "--concurrency", "1,3", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "--model", str(folder), *flags, *ENGINE]) == 0
    assert "6 requests of 5 tokens, in this process" in capsys.readouterr().out
    runs = json.loads((tmp_path / "out.json").read_text())
    assert [run["concurrency"] for run in runs] == [1, 3]
    for run in runs:
        assert run["requests"] == 6
        assert run["output_tokens_s"] * run["wall_s"] == pytest.approx(6 * 5)
        assert 0 < run["first_token_s_p50"] <= run["first_token_s_p99"] <= run["wall_s"]
        assert 0 <= run["between_ms_p50"] <= run["between_ms_p99"]
    assert runs[0]["cached_share"] < runs[1]["cached_share"] <= 1, "the second run finds the first one's prompts"


def test_bench_reads_prompts_of_every_form(tmp_path: Path) -> None:
    lines = ["a plain line", "", '{"prompt": "one"}', '{"turns": ["two", "later"]}', '  {"text": "three"}  ', "[4]"]
    (tmp_path / "prompts").write_text("\n".join(lines) + "\n", encoding="utf-8")
    args = ["--prompts", str(tmp_path / "prompts")]
    assert prompts_of(*args) == ["a plain line", "one", "two", "three", "[4]"]
    assert prompts_of(*args, "--prompt-tokens", "4")[0] == "a plain line a"
    assert len(prompts_of()) > 8


def prompts_of(*flags: str) -> list[str]:
    """The prompts that a command would send."""
    parser = ArgumentParser()
    bench.add_flags(parser)
    return bench._prompts(parser.parse_args(list(flags)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('fine\n{"prompt": 3}', "line 2 of .* has no prompt"),
        ('{"question": "?"}', "line 1 of .* has no prompt"),
        ('{"turns": []}', "line 1 of .* has no prompt"),
        ('{"prompt": ', "line 1 of .* is not JSON"),
    ],
)
def test_bench_says_what_is_wrong_with_a_prompt_file(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(content)
    with pytest.raises(ConfigError, match=f"--prompts: .*{said}"):
        prompts_of("--prompts", str(tmp_path / "prompts"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--prompts nowhere", "--prompts: there is no file nowhere"),
        ("--concurrency 1,x", "--concurrency must be numbers"),
        ("--concurrency 0", "--concurrency must be at least 1"),
        ("--requests 0", "--requests"),
        ("--new-tokens 0", "--new-tokens"),
        ("--url ftp://x", "--url must be like http://host:port"),
        ("--url http://127.0.0.1:9 --requests 1", "--url: cannot reach 127.0.0.1:9"),
    ],
)
def test_bench_refuses_what_cannot_be_measured(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags.split()]) == 2
    assert said in capsys.readouterr().err


# --- the rest --------------------------------------------------------------------------------------------------


def test_pull_says_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "default_model", lambda progress: tmp_path / "model.gguf")
    assert main(["pull"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model.gguf'}\n"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"roost {roost.__version__}\n"


def test_a_command_is_needed_and_help_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("serve", "chat", "generate", "pull", "bench"))


def test_python_runs_the_package_and_passes_its_code_on(folder: Path) -> None:
    ran = python("-m", "roost", "generate", "h", "--model", str(folder), *ENGINE)
    assert (ran.returncode, ran.stdout) == (0, "e12!\n"), ran.stderr
    refused = python("-m", "roost", "generate", "h", "--model", "nowhere")
    assert refused.returncode == 2 and refused.stdout == "" and "Traceback" not in refused.stderr
