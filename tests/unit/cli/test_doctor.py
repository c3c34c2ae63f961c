"""`roost doctor`: what it says of a machine, of what is missing, and of nobody in particular."""

import getpass
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from roost.cli import doctor, engine_checks, machine_checks
from roost.cli.check_report import Privacy, ReportSection, as_text, checked
from roost.cli.flag_parser import engine_of
from roost.cli.main import main
from roost.config.options import EngineConfig, MemoryConfig, ModelConfig
from roost.device import open as open_device
from roost.server.config import ServerConfig
from roost.weights import pull
from tests.support.chain_model import save_chain
from tests.tidy.source import ROOT

ENGINE = ("--weights", "fp32", "--threads", "1", "--pool-tokens", "2048", "--backend", "torch")
PATIENCE_S = 300  # kernels may be compiled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain(tmp_path_factory.mktemp("chain"), "h", "e")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds no model; compiled kernels are those of the usual one."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(pull, "cache_folder", lambda: folder)
    monkeypatch.setattr(machine_checks, "cache_folder", lambda: folder)
    return folder


def names(printed: str, private: str) -> bool:
    """Whether a text has a name as a word of its own: short ones are part of other words."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(private)}(?![A-Za-z0-9])", printed) is not None


def section_of(title: str, printed: str) -> str:
    return next(each for each in printed.split("\n\n") if each.startswith(title + "\n"))


# --- as users see it -------------------------------------------------------------------------------------------------


def on_a_terminal(*flags: str, **variables: str) -> tuple[int, str]:
    """The exit code, and all that the terminal showed."""
    screen, inside = pty.openpty()
    command = [sys.executable, "-m", "roost", "doctor", *flags]
    ran = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, **variables}, start_new_session=True
    )
    os.close(inside)
    printed = b""
    try:
        while select.select([screen], [], [], PATIENCE_S)[0]:
            try:
                data = os.read(screen, 65536)
            except OSError:  # the other end is closed
                break
            printed += data
        return ran.wait(PATIENCE_S), printed.decode().replace("\r\n", "\n")
    finally:
        ran.kill()
        ran.wait()
        os.close(screen)


def test_somebody_at_a_terminal_sees_plain_sections_and_a_verdict(folder: Path) -> None:
    code, printed = on_a_terminal("--model", str(folder), *ENGINE)
    assert code == 0, printed
    titles = [lines.splitlines()[0] for lines in printed.split("\n\n")]
    assert titles[:3] == ["versions", "environment", "cpu"] and titles[-2:] == ["self-test", "no problems found"]
    assert "\x1b" not in printed and max(map(len, printed.splitlines())) < 500
    tested = section_of("self-test", printed)
    assert re.search(r"tokens per s +\d+\.\d", tested) and re.search(r"same twice +yes", tested)
    assert re.search(r"backend +torch \(as asked for\)", section_of("engine", printed))


def test_the_report_names_neither_home_nor_user_nor_host_nor_a_secret(tmp_path: Path) -> None:
    home = tmp_path / "house"
    who = {"HOME": str(home), "LOGNAME": "wilhelmina", "USER": "wilhelmina", "ROOST_API_KEY": "hush-hush"}
    where = {"ROOST_CACHE": str(home / "wilhelmina" / "models"), "ROOST_WHATEVER": "murmur"}
    flags = ("--no-self-test", "--model", str(home / f"of-{socket.gethostname()}.gguf"))
    for how in ((), ("--json",)):
        code, printed = on_a_terminal(*flags, *how, **who, **where)
        assert code == 1, "there is no such model"
        for private in (str(home), "wilhelmina", socket.gethostname(), "hush-hush", "murmur"):
            assert not names(printed, private), private
        assert "~/USER/models" in printed and "~/of-HOST.gguf" in printed and "ROOST_API_KEY" in printed


def test_the_report_of_this_machine_names_neither_home_nor_user_nor_host(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--no-self-test"])
    printed = capsys.readouterr().out
    for private in (str(Path.home()), getpass.getuser(), socket.gethostname()):
        assert not names(printed, private), private


def test_json_says_the_same_as_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(folder), "--json", "--no-self-test", *ENGINE]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True and said["problems"] == []
    assert said["sections"]["engine"]["weights"] == "fp32 (as asked for)"
    assert isinstance(said["sections"]["memory"]["total_bytes"], int) and "self-test" not in said["sections"]


def test_a_problem_is_said_with_what_to_do_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "nowhere", "--no-self-test"]) == 1
    printed = capsys.readouterr().out
    assert "PROBLEM: --model: there is no file or folder nowhere" in printed and "what to do: " in printed
    assert printed.endswith("1 problem found: see PROBLEM above\n")


def test_options_of_a_file_and_of_the_environment_are_the_doctors_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roost.toml").write_text(f'model = "{folder}"\nweights = "fp32"\nhost = "0.0.0.0"\n')
    monkeypatch.setenv("ROOST_BACKEND", "torch")
    assert main(["doctor", "--no-self-test", "--json", "--config", str(tmp_path / "roost.toml")]) == 0
    engine = json.loads(capsys.readouterr().out)["sections"]["engine"]
    assert (engine["backend"], engine["weights"]) == ("torch (as asked for)", "fp32 (as asked for)")


def test_a_port_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "roost doctor: error: --port must be in [0, 65535], got 70000\n"


# --- with things missing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["uvicorn", "torch"])
def test_what_is_missing_is_said_by_a_doctor_that_does_without_it(package: str, tmp_path: Path) -> None:
    code = (
        f"import sys, importlib.metadata as m; sys.modules[{package!r}] = None; known = m.version\n"
        f"def version(name):\n"
        f"    if name == {package!r}: raise m.PackageNotFoundError(name)\n"
        f"    return known(name)\n"
        f"m.version = version\n"
        f"from roost.cli.main import main; sys.exit(main(['doctor', '--no-self-test']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in ran.stderr and ran.returncode == (package == "torch")
    versions = section_of("versions", ran.stdout)
    assert re.search(rf"{package} +missing", versions)
    assert f"pip install {package}" in versions
    assert ("this cannot be checked: torch is missing" in ran.stdout) == (package == "torch")
    assert ("roost serve needs them" in versions) == (package == "uvicorn")


def test_every_extra_that_users_install_is_looked_at() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(machine_checks._EXTRAS) == set(extras) - {"test"}


def test_a_doctor_run_from_the_sources_alone_needs_no_list_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine_checks, "requires", missing)
    section = checked("versions", machine_checks.versions)
    assert section.problems == [] and {"torch", "numpy", "triton"} <= set(section.facts)


def test_a_default_model_that_is_not_there_is_a_note_and_a_damaged_one_a_problem(cache: Path) -> None:
    section = checked("models", machine_checks.models)
    assert section.problems == [] and section.notes == ["the default model is not there yet: roost pull fetches it"]
    cache.mkdir()
    pull.default_file().write_bytes(b"GGUF and then nothing")
    (problem,) = checked("models", machine_checks.models).problems
    assert "is not the file that was published" in problem.what and problem.remedy.endswith("roost pull")


def test_a_draft_head_that_was_not_installed_is_a_problem(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "HEADS", tmp_path)
    (problem,) = checked("models", machine_checks.models).problems
    assert "draft head" in problem.what


def test_a_folder_that_cannot_be_written_is_a_problem(cache: Path) -> None:
    cache.write_text("a file in its place")
    section = checked("models", machine_checks.models)
    assert any("cannot be written" in problem.what and "ROOST_CACHE" in problem.remedy for problem in section.problems)


def test_kernels_that_cannot_be_kept_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    section = checked("kernels", machine_checks.kernels)
    assert ["ROOST_CACHE" in each.remedy for each in section.problems] == [True, False]
    assert "TRITON_CACHE_DIR" in section.problems[1].remedy
    note = checked("cpu", machine_checks.processor).notes
    assert any("torch computes" in each and "cannot be written" in each for each in note)


def test_a_port_in_use_is_a_problem_where_it_was_asked_for_and_else_a_note() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ServerConfig(port=taken.getsockname()[1])
        asked, usual = ReportSection(title="port"), ReportSection(title="port")
        machine_checks.port(asked, config, must_be_free=True)
        machine_checks.port(usual, config, must_be_free=False)
    assert len(asked.problems) == 1 and asked.notes == [] and "another --port" in asked.problems[0].remedy
    assert usual.problems == [] and "a server may run already" in usual.notes[0]


def test_a_check_that_fails_is_a_problem_of_its_own() -> None:
    def breaks(section: ReportSection) -> None:
        section.facts["one"] = 1
        raise ZeroDivisionError("of all things")

    section = checked("sums", breaks)
    assert section.facts == {"one": 1}
    assert section.problems[0].what == "this check failed: ZeroDivisionError: of all things"


def test_a_gpu_is_named_with_its_memory_and_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name, said in {"name_of": "A GPU", "capability_of": (9, 0), "memory_of": (3, 4)}.items():
        monkeypatch.setattr(open_device, name, lambda device, said=said: said)
    monkeypatch.setattr(machine_checks.shutil, "which", lambda name: None)
    section = checked("gpu", machine_checks.gpus)
    assert section.facts["devices"] == 2 and section.facts["device_1"] == "A GPU, compute capability 9.0"
    assert (section.facts["device_1_memory_bytes"], section.facts["device_1_free_bytes"]) == (4, 3)
    assert section.problems == [] and "C compiler" in section.notes[0]


def test_a_gpu_that_torch_does_not_see_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(machine_checks, "_DRIVER", tmp_path / "version")
    assert checked("gpu", machine_checks.gpus).notes == []
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\nGCC version: 12.3.0"
    )
    section = checked("gpu", machine_checks.gpus)
    assert section.facts["nvidia_driver"] == "580.95.05" and section.facts["devices"] == 0
    assert section.notes[0].startswith("an NVIDIA driver is loaded, but torch ")


def test_a_containers_limits_are_said_and_too_many_threads_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"cpu.max": f"{torch.get_num_threads() * 50_000} 100000", "memory.max": "1000"}
    monkeypatch.setattr(machine_checks, "_cgroup", limits.__getitem__)
    cpu, memory = checked("cpu", machine_checks.processor), checked("memory", machine_checks.memory)
    assert cpu.facts["cores_of_quota"] == torch.get_num_threads() / 2
    assert any("give --threads" in note for note in cpu.notes)
    assert memory.facts["container_limit_bytes"] == 1000
    monkeypatch.setattr(machine_checks, "_cgroup", {"cpu.max": "max 100000", "memory.max": "max"}.__getitem__)
    assert "cores_of_quota" not in checked("cpu", machine_checks.processor).facts
    assert "container_limit_bytes" not in checked("memory", machine_checks.memory).facts


# --- the engine ------------------------------------------------------------------------------------------------------


def test_where_no_model_was_downloaded_a_random_one_is_run_and_nothing_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_fetch", lambda *args, **kwargs: pytest.fail("nothing may be downloaded"))
    config = EngineConfig(model=ModelConfig(backend="torch", threads=1), memory=MemoryConfig(pool_tokens=2048))
    chosen, ran = ReportSection(title="engine"), ReportSection(title="self-test")
    engine_checks.choices(chosen, config)
    engine_checks.self_test(ran, config)
    assert chosen.problems == ran.problems == []
    assert chosen.facts["model"] == ran.facts["model"] == "a tiny random one"
    assert ran.facts["same_twice"] is True and ran.facts["tokens"] == 64 and ran.facts["pool_tokens"] == [2048]


@pytest.mark.parametrize(
    ("flags", "name", "said"),
    [
        ("", "speculation", "none (no draft head is known for this model)"),
        ("--spec ngram", "speculation", "ngram (as asked for)"),
        ("--device cpu", "device", "cpu (as asked for)"),
        ("--weights bf16", "weights", "bf16 (as asked for)"),
        ("--weights bf16", "backend", "torch (numba does not take these weights or this KV)"),
        ("--backend torch", "backend", "torch (as asked for)"),
        ("--threads 1", "threads", 1),
    ],
)
def test_each_choice_has_its_reason(flags: str, name: str, said: object, folder: Path) -> None:
    section, parser = ReportSection(title="engine"), ArgumentParser()
    doctor.add_flags(parser)
    engine_checks.choices(section, engine_of(parser.parse_args(["--model", str(folder), *flags.split()])))
    assert section.problems == [] and section.facts[name] == said


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A self-test that runs this code instead."""
    code = ["-c", ""]
    real = subprocess.run
    monkeypatch.setattr(
        engine_checks.subprocess, "run", lambda command, **options: real([command[0], *code], **options)
    )
    yield code


@pytest.mark.parametrize(
    ("code", "what", "remedy"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL: it said nothing", "--pool-tokens"),
        ("import os; os.kill(os.getpid(), 4)", "was ended by SIGILL", "--backend torch"),
        ("raise ValueError('why')", "ended with 1: ValueError: why", "report it"),
        ("print('noise'); print('{\"error\": \"--threads must be 1\"}')", "--threads must be 1", "option"),
    ],
    ids=["memory", "instruction", "bug", "option"],
)
def test_an_engine_that_ends_is_a_problem_with_its_cause(
    folder: Path, ended: list[str], code: str, what: str, remedy: str
) -> None:
    ended[1] = code
    section = ReportSection(title="self-test")
    engine_checks.self_test(section, EngineConfig(model=ModelConfig(model=str(folder))))
    (problem,) = section.problems
    assert what in problem.what and remedy in problem.remedy


@pytest.mark.parametrize(
    ("device", "weights", "is_broken"), [("cpu", "int8", True), ("cpu", "bf16", False), ("cuda", "bf16", False)]
)
def test_two_texts_of_one_prompt_are_a_problem_where_results_are_exact(
    folder: Path, ended: list[str], device: str, weights: str, is_broken: bool
) -> None:
    settings = {"device": device, "weights": weights, "warnings": ["slow"]}
    said = {"model": "m", "same_twice": False, "failed_steps": 0, "settings": settings}
    ended[1] = f"print({json.dumps(said)!r})"
    section = ReportSection(title="self-test")
    engine_checks.self_test(section, EngineConfig(model=ModelConfig(model=str(folder))))
    assert bool(section.problems) == is_broken and section.notes == ["slow"]


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/houses/ann/models", "~/models"),
        ("/houses/anna/models", "/houses/anna/models"),
        ("ann@box and Annie", "USER@HOST and Annie"),
        (Path("/houses/ann"), "~"),
        (["ann", {"of-ann": "ann"}, 7, None], ["USER", {"of-USER": "USER"}, 7, None]),
    ],
)
def test_what_is_private_is_taken_out_where_it_is_a_word(value: object, shown: object) -> None:
    assert Privacy(("/houses/ann", "/"), {"ann": "USER", "box": "HOST"}).clean(value) == shown


def test_facts_are_lines_with_sizes_that_people_can_read() -> None:
    section = ReportSection(
        title="things", facts={"free_bytes": 2_500_000_000, "is_on": True, "kinds": [], "ROOST_X": None}
    )
    section.facts["files_bytes"] = {"a_b.gguf": 98_362_432}
    assert [" ".join(line.split()) for line in as_text(section).splitlines()] == [
        "free 2.5 GB",
        "is on yes",
        "kinds none",
        "ROOST_X -",
        "files a_b.gguf 98.4 MB",
    ]
