"""The commands, from their arguments to what they print, on a checkpoint whose output is known."""

import io
import json
import re
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import roost
from roost import LLM, Options
from roost.cli import bench, chat, pull
from roost.cli.main import main
from roost.errors import ConfigError
from roost.front.speculation import as_json
from roost.messages import SpecStats
from roost.sched.counters import SpecCounters
from tests.support import speculating_engine as speculating
from tests.support.chain_model import save_chain

SPELT = ("\n", "h", "e", "12", "!", "<|im_end|>")  # what follows the line end that opens an answer
ENGINE = ("--weights", "fp32", "--threads", "1", "--pool-tokens", "2048", "--page-size", "4")
MADE = SpecStats(
    rounds=4,
    drafts_offered=12,
    drafts_accepted=6,
    overshoot=1,
    lookup_rounds=2,
    lookup_offered=7,
    lookup_accepted=5,
    histogram=(1, 1, 1, 1),
)
OLDER = replace(MADE, lookup_rounds=0, lookup_offered=0, lookup_accepted=0)


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
    assert capsys.readouterr().err == "roost generate: error: tokens: must hold at least 1 token\n"


# --- chat ------------------------------------------------------------------------------------------------------


def test_chat_answers_each_line_and_finds_the_conversation_in_its_cache(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "hello\n\n  \nand again\n/exit\nnever read\n")
    assert main(["chat", "--model", str(folder), "--temperature", "0", "--system", "Be brief.", *ENGINE]) == 0
    printed = capsys.readouterr()
    assert printed.out == "he12!\nhe12!\n"
    assert "is ready" in printed.err and printed.err.count("5 tokens, ") == 2
    first, second = re.findall(r"inherited (\d+) of (\d+)", " ".join(printed.err.split()))
    assert int(first[0]) == 0 and int(second[0]) == int(first[1]) + 5, "all of the first turn, its end too"


def test_chat_rewinds_forks_and_says_how_things_stand(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = ["/fork", "and again", "/stats", "/rewind 2", "/back"]
    lines = ["/help", "/rewind", "hello", *copy, "/back", "/stats", "/no", "/rewind x", "and again", "/exit"]
    typed(monkeypatch, "\n".join([*lines, "never read"]))
    assert main(["chat", "--model", str(folder), "--temperature", "0", *ENGINE]) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert printed.out == "he12!\n" * 3
    assert "/rewind: there are 0 turns to forget, got 1" in said and "got x" in said
    assert "2 turns, " in said and "0 turns and 0 tokens are left" in said
    assert "back, after 1 turns" in said and "/back: this is no copy" in said and "1 turns, " in said
    assert "there is no /no" in said
    inherited = re.findall(r"inherited (\d+) of (\d+)", said)
    assert inherited[1][1] == inherited[2][1], "the copy and where it was made go on from the same place"


def test_chat_forgets_the_conversation_and_begins_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["hello", "/fork", "more", "/clear", "/stats", "/back", "hello", "/clear", "/clear", "/stats", "hello"]
    typed(monkeypatch, "\n".join(lines))
    assert main(["chat", "--model", str(folder), "--temperature", "0", "--max-sessions", "2", *ENGINE]) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert printed.out == "he12!\n" * 4
    assert said.count("the conversation is forgotten") == 3 and said.count("0 turns, 0 tokens") == 2
    assert "/back: this is no copy" in said, "copies are forgotten too"
    lengths = [whole for _, whole in re.findall(r"inherited (\d+) of (\d+)", said)]
    assert lengths[0] == lengths[2] == lengths[3]


def test_chat_takes_a_system_message_and_begins_anew_with_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["/system", "hello", "/system  Be brief.", "/system", "hello", "/system -", "hello"]
    typed(monkeypatch, "\n".join(lines))
    assert main(["chat", "--model", str(folder), "--temperature", "0", *ENGINE]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the system message: none, or the template's own") == 1
    assert "the system message of a new conversation: Be brief." in said
    assert said.count("the system message: Be brief.") == 1
    lengths = [int(whole) for _, whole in re.findall(r"inherited (\d+) of (\d+)", said)]
    assert lengths[1] > lengths[0] == lengths[2], "every conversation is new, and the second has a system message"


def test_chat_takes_several_lines_between_marks_as_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['"""a', "", "/stats", 'b"""', '"""one line"""', "/stats", '"""', "not ended"]
    typed(monkeypatch, "\n".join(lines))
    heard: list[str] = []
    take = chat._ChatLoop.take

    def hear(talk: chat._ChatLoop, text: str) -> None:
        heard.append(text)
        take(talk, text)

    monkeypatch.setattr(chat._ChatLoop, "take", hear)
    assert main(["chat", "--model", str(folder), "--temperature", "0", *ENGINE]) == 0
    assert heard == ["a\n\n/stats\nb", "one line", "/stats", "not ended"]
    assert capsys.readouterr().out == "he12!\n" * 3


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


def test_chat_goes_on_after_what_it_cannot_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "\n".join(["hello", "/fork", "/fork", "/rewind " + "9" * 5000, "/rewind -1", "again"]))
    assert main(["chat", "--model", str(folder), "--temperature", "0", "--max-sessions", "2", *ENGINE]) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert printed.out == "he12!\n" * 2
    assert "2 sessions are open: --max-sessions" in said
    assert said.count("/rewind: there are 1 turns to forget, got ") == 2


def test_chat_says_no_rate_where_there_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "hello")
    assert main(["chat", "--model", str(folder), "--max-new-tokens", "0", *ENGINE]) == 0
    assert re.search(
        r"0 tokens; first after \d+\.\d\d s; inherited 0 of \d+", " ".join(capsys.readouterr().err.split())
    )


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


def test_a_level_finds_nothing_that_another_has_left_in_the_prefix_cache(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\n".join(letter * 40 for letter in "abcd"))
    flags = ["--requests", "4", "--new-tokens", "5", "--concurrency", "1,1,1", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "--model", str(folder), "--prompts", str(tmp_path / "prompts"), *flags, *ENGINE]) == 0
    shares = {run["cached_share"] for run in json.loads((tmp_path / "out.json").read_text())}
    assert len(shares) == 1 and 0 < shares.pop() < 0.5, "the template's beginning alone"


def test_bench_says_how_far_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[int]] = {}

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
        assert total == 6
        yield told.setdefault(label, []).append

    monkeypatch.setattr(bench, "counting_bar", bar)
    assert main(["bench", "--model", str(folder), "--requests", "6", "--concurrency", "1,3", *ENGINE]) == 0
    assert list(told) == ["1 at once", "3 at once"]
    assert told["1 at once"] == [1, 2, 3, 4, 5, 6] and sorted(told["3 at once"]) == told["1 at once"]


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


# --- what speculation did --------------------------------------------------------------------------------------


def test_chat_says_the_accept_length_of_each_turn_that_speculated(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--temperature", "0", "--max-new-tokens", "40"]
    typed(monkeypatch, "hello")
    assert main(["chat", "--model", str(folder), *flags, *ENGINE]) == 0
    assert "accept length" not in capsys.readouterr().err
    monkeypatch.setattr("roost.library.llm.start", speculating.start)
    typed(monkeypatch, "hello\nagain\n")
    assert main(["chat", *flags]) == 0
    notes = " ".join(capsys.readouterr().err.split())
    lengths = [float(each) for each in re.findall(r"inherited \d+ of \d+; accept length (\d\.\d\d)", notes)]
    assert len(lengths) == 2 and all(1 <= each <= speculating.STEPS + 1 for each in lengths)
    assert "looked up" not in notes


def look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rounds of one right draft counted as looked up beside a head."""
    count = SpecCounters.count_round

    def count_round(counters: SpecCounters, num_drafts: int, accept_len: int, kept: int, *_: int, **__: int) -> None:
        is_lookup = accept_len == 2
        offered, accepted = (num_drafts, 1) if is_lookup else (0, 0)
        count(counters, num_drafts, accept_len, kept, lookup_offered=offered, lookup_accepted=accepted)

    monkeypatch.setattr(SpecCounters, "count_round", count_round)


def test_chat_says_what_was_looked_up_beside_a_head(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roost.library.llm.start", speculating.start)
    look_up(monkeypatch)
    typed(monkeypatch, "hello\n/stats\n")
    assert main(["chat", "--temperature", "0", "--max-new-tokens", "40"]) == 0
    notes = " ".join(capsys.readouterr().err.split())
    share = r"(\d+)% of the accepted drafts looked up"
    (turn,) = re.findall(rf"inherited \d+ of \d+; accept length \d\.\d\d, {share}", notes)
    (in_all,) = re.findall(rf"accept length \d\.\d\d in \d+ rounds, {share}", notes)
    assert turn == in_all and 0 < int(turn) < 100


def test_generate_prints_the_text_alone_also_when_it_speculates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roost.library.llm.start", speculating.start)
    assert main(["generate", "h", "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr()
    with LLM() as llm:
        assert printed.out == llm.generate("h", Options(temperature=0, max_new_tokens=12)).text + "\n"
    assert "accept" not in printed.err


def test_bench_reports_the_rounds_of_each_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "out.json"
    flags = ["--requests", "4", "--new-tokens", "21", "--concurrency", "1,2", "--json", str(place)]
    assert main(["bench", "--model", str(folder), *flags, *ENGINE]) == 0
    assert "accept" not in capsys.readouterr().out
    assert [run["spec"]["drafts_offered"] for run in json.loads(place.read_text())] == [0, 0]
    monkeypatch.setattr("roost.library.llm.start", speculating.start)
    assert main(["bench", *flags]) == 0
    printed = capsys.readouterr().out
    first, second = (run["spec"] for run in json.loads(place.read_text()))
    assert first == second, "the same requests, whatever runs beside them"
    assert first["accept_length"] > 1 and first["rounds"] == sum(first["histogram"])
    histogram = " ".join(map(str, second["histogram"]))
    said = f"accept length {second['accept_length']:.2f}, rounds by accept length from 1: {histogram}\n"
    assert f"1 at once: {said}2 at once: {said}" in printed
    assert "looked up" not in printed


def test_bench_says_how_many_rounds_were_looked_up_beside_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "out.json"
    monkeypatch.setattr("roost.library.llm.start", speculating.start)
    look_up(monkeypatch)
    flags = ["--requests", "4", "--new-tokens", "21", "--concurrency", "2", "--json", str(place)]
    assert main(["bench", *flags]) == 0
    (spec,) = (run["spec"] for run in json.loads(place.read_text()))
    looked_up = spec["histogram"][1]
    assert (spec["lookup_rounds"], spec["lookup_accepted"]) == (looked_up, looked_up) and looked_up > 0
    said = f"looked up: {looked_up} of {spec['rounds']} rounds, {looked_up / spec['drafts_accepted']:.0%} of the"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "said", "read"),
    [
        (200, json.dumps({"stats": {"spec": as_json(MADE)}}), MADE),
        (200, json.dumps({"stats": {"spec": {k: v for k, v in as_json(MADE).items() if "lookup" not in k}}}), OLDER),
        (200, json.dumps({"internal_states": []}), SpecStats()),
        (200, "[1]", SpecStats()),
        (200, "hello", SpecStats()),
        (404, json.dumps({"detail": "Not Found"}), SpecStats()),
    ],
)
def test_bench_reads_a_servers_sums_and_does_without_them(status: int, said: str, read: SpecStats) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/server_info"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=lambda: [server.handle_request() for _ in range(2)])
        thread.start()
        assert bench.ServerTarget(f"http://127.0.0.1:{server.server_port}", 1, 0.0).spec() == read
        thread.join()


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
    assert all(name in printed for name in ("serve", "chat", "generate", "pull", "doctor", "bench"))


def test_python_runs_the_package_and_passes_its_code_on(folder: Path) -> None:
    ran = python("-m", "roost", "generate", "h", "--model", str(folder), *ENGINE)
    assert (ran.returncode, ran.stdout) == (0, "e12!\n"), ran.stderr
    refused = python("-m", "roost", "generate", "h", "--model", "nowhere")
    assert refused.returncode == 2 and refused.stdout == "" and "Traceback" not in refused.stderr
