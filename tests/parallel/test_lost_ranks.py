"""Ranks that are lost: each is found, named, and nothing is left of the group.

Half of the tests wait some seconds: that is how long a rank may be silent.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from roost import LLM, Options
from roost.errors import CapacityError, ConfigError, RankError
from roost.parallel.executor import GroupExecutor
from roost.parallel.start import Rank0
from tests.parallel.conftest import Start, odd
from tests.parallel.odd_follower import AT_STEP
from tests.support.server_process import ROOT, has_ended, wait_until

ENDLESS = Options(max_new_tokens=4000, temperature=0, ignore_eos=True)


def follower_of(llm: LLM) -> int:
    """The process of rank 1."""
    executor = llm._running.executor
    assert isinstance(executor, GroupExecutor)
    return executor._ranks.pids[1]


def fails(llm: LLM, why: str) -> None:
    """What runs fails for a reason, and so does what comes after it; no rank is left."""
    pid = follower_of(llm)
    with pytest.raises(CapacityError, match=why):
        llm.generate("hello", ENDLESS)
    assert has_ended(pid)
    with pytest.raises(CapacityError, match="the engine has ended"):
        llm.generate("hello", Options(max_new_tokens=1))


def test_a_rank_that_is_killed_is_found_at_once_also_while_nothing_runs(start: Start) -> None:
    llm = start()
    llm.generate("hello", Options(max_new_tokens=3))
    os.kill(follower_of(llm), signal.SIGKILL)
    wait_until(lambda: llm._engine._is_closed)
    fails(llm, "the engine has ended")


def test_a_rank_that_is_killed_within_a_step_ends_what_runs(start: Start) -> None:
    llm = start()
    pieces = llm.stream("hello", ENDLESS)
    next(pieces)
    os.kill(follower_of(llm), signal.SIGKILL)
    with pytest.raises(CapacityError, match="rank 1 has ended: killed by SIGKILL"):
        list(pieces)


def test_a_stopped_rank_is_found_while_nothing_runs(start: Start) -> None:
    llm = start()
    llm.generate("hello", Options(max_new_tokens=3))
    os.kill(follower_of(llm), signal.SIGSTOP)
    wait_until(lambda: llm._engine._is_closed)
    assert "rank 1 has not been heard of for 6 s" in str(llm._engine._failure)
    fails(llm, "the engine has ended")


def test_a_rank_that_ends_before_it_has_met_the_others_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd(monkeypatch, "never comes")
    with pytest.raises(RankError, match="rank 1 has ended: exit code 3"):
        start()


def test_a_rank_that_hangs_in_a_step_is_found_by_those_that_wait_for_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd(monkeypatch, "hangs")
    fails(start(), f"step {AT_STEP} broke on rank 0 .*, and not on rank 1|rank 1 is not done with step")


def test_a_rank_that_breaks_alone_ends_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    odd(monkeypatch, "breaks")
    fails(start(), f"step {AT_STEP} broke on rank 1 .*as the test wants it.*, and not on rank 0")


def test_a_rank_that_finds_another_token_ends_the_engine_with_the_steps_said(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd(monkeypatch, "another token")
    fails(start(), "rank 1 has not found what rank 0 has in steps [0-9]+ to [0-9]+: lengths or tokens differ")


def test_a_rank_of_another_torch_is_refused_with_what_differs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    odd(monkeypatch, "another torch")
    with pytest.raises(
        ConfigError, match=r"the ranks are not alike .* rank 1: roost is .* here and 1.0 there; torch is"
    ):
        start()


def test_ctrl_c_while_the_ranks_start_leaves_nothing_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids: list[int] = []

    def interrupted(rank0: Rank0) -> None:
        pids.extend(rank0.ranks.pids.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(Rank0, "join", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        start()
    assert pids and all(map(has_ended, pids))
    assert list(tmp_path.iterdir()) == []


def test_ranks_end_with_rank_0_however_it_ends_also_those_that_are_stopped(folder: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom roost import LLM\n"
        "llm = LLM(sys.argv[1], tp=2)\nprint(*llm._running.executor._ranks.pids.values(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        pids = [int(each) for each in process.stdout.readline().split()]
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(0)
        process.kill()
    for pid in pids:
        wait_until(lambda pid=pid: has_ended(pid))
    assert list(tmp_path.glob("roost-*")) == []
