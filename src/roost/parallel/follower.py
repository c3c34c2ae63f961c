"""Follower: the process of a rank that is not the first. Loads its part and runs the plans that rank 0 sends, in order.

It decides nothing: rank 0 says what to launch and what to collect. When its channel ends, rank 0 is gone, and so is
this process; nor does it outlive a rank 0 that is silent. Started by `ranks`.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from roost.errors import ConfigError, InvariantError, StepFailure, first_line
from roost.grammar.compiler import Compiler
from roost.parallel.channel import Channel, Gone, Kind
from roost.parallel.digest import StepDigest
from roost.parallel.executor import collected_of
from roost.parallel.grammars import asked, numbered
from roost.parallel.group import COLLECTIVE_S, JOIN_S, STORE, DistributedGroup
from roost.parallel.identity import checkpoint_of, from_text, versions
from roost.parallel.peers import Sizes
from roost.parallel.plan_wire import decode
from roost.parallel.ranks import BEAT_S, PAUSED_S, SILENT_S
from roost.runner.executor import TorchExecutor
from roost.startup import Built, build, choose
from roost.step import StepId, Ticket

_log = logging.getLogger(__name__)
_DIE_WITH_PARENT = 1  # of prctl: a signal when the parent's thread ends


class FromRank0:
    """What rank 0 sends, as it comes; and the group's peer at start-up."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.work: SimpleQueue[tuple[Kind, bytes]] = SimpleQueue()
        self._told: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._heard_at = time.monotonic()
        self._limit_s: float = JOIN_S
        self._group: DistributedGroup | None = None
        self._own_process: int | None = None  # rank 0's, if that has nothing to do but to run the engine
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def told(self) -> dict[str, Any]:
        """What rank 0 says next, while the group starts."""
        return self._told.get()

    def join(self, settings: Mapping[str, Any], device: torch.device) -> None:
        """Meet the others."""
        self._own_process = settings["own_process"]
        store = Path(settings["folder"]) / STORE
        self._group = DistributedGroup(
            settings["rank"], settings["size"], transport=settings["transport"], device=device, store=store
        )

    def begin(self) -> None:
        """Say that all is ready, and wait for the others; from now on rank 0 may not be silent."""
        self.channel.tell({"ready": True})
        self.told()
        self.group.limit(COLLECTIVE_S)
        self._limit_s = SILENT_S

    @property
    def group(self) -> DistributedGroup:
        """The collectives."""
        assert self._group is not None
        return self._group

    def same(self, what: Mapping[str, str]) -> None:
        """Say what this rank has."""
        self.channel.tell(dict(what))
        if refused := self.told()["refused"]:
            raise ConfigError(refused)

    def smallest(self, sizes: Sizes) -> Sizes:
        """Say what this rank has room for, and hear what all have."""
        self.channel.tell({"sizes": list(sizes)})
        agreed: Sizes = self.told()["sizes"]
        return agreed

    def _read(self) -> None:
        while True:
            try:
                kind, payload = self.channel.receive()
            except (Gone, InvariantError):
                os._exit(0)  # nobody is left to hear anything
            self._heard_at = time.monotonic()
            if kind is Kind.TELL:
                self._told.put(json.loads(payload))
            elif kind is not Kind.BEAT:
                self.work.put((kind, payload))

    def _beat(self) -> None:
        looked_at = time.monotonic()
        while True:
            self.channel.beat()
            time.sleep(BEAT_S)
            now = time.monotonic()
            if now - looked_at > BEAT_S + PAUSED_S:
                self._heard_at = now
            looked_at = now
            if now - self._heard_at > self._limit_s:
                self._end_silent()

    def _end_silent(self) -> None:
        """Rank 0 hangs, and would find this rank gone; its process, where it is its own, cannot end itself."""
        if self._own_process is not None:
            _log.critical("rank 0 has not been heard of for %g s: its process is ended", self._limit_s)
            with suppress(ProcessLookupError):
                os.kill(self._own_process, signal.SIGKILL)
        os._exit(1)


class Steps:
    """The steps of this rank, in the order that rank 0 gives them."""

    def __init__(self, rank0: FromRank0, built: Built) -> None:
        self._rank0 = rank0
        self._executor: TorchExecutor = built.executor
        self._compiler = built.compiler
        self._digest = StepDigest()
        self._num_checks = 0
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def run(self) -> None:
        """Until rank 0 is gone."""
        while True:
            kind, payload = self._rank0.work.get()
            if kind is Kind.GRAMMAR:
                self._compiling.submit(self._compile, payload)
                continue
            collected, rest = collected_of(payload)
            for step in collected:
                self._collect(step)
            if kind is Kind.STEP:
                self._launch(rest)
            elif kind is Kind.CHECK:
                self._tell_digest()

    def _launch(self, data: bytes) -> None:
        plan = decode(data)
        self._executor.watch(self._executor.launch(plan), partial(self._note, plan.step))

    def _note(self, step: StepId, error: BaseException | None) -> None:
        """A step was started, or broke."""
        if error is None:
            return
        if not isinstance(error, StepFailure):
            fail(self._rank0.channel, error)
        said = {"step": step, "calls": self._rank0.group.num_calls, "why": first_line(error)}
        self._rank0.channel.tell(said, Kind.BROKE)

    def _collect(self, step: StepId) -> None:
        with suppress(StepFailure):  # rank 0 has been told
            self._digest.add(self._executor.collect(Ticket(step=step)))

    def _tell_digest(self) -> None:
        self._rank0.channel.tell({"check": self._num_checks, "digest": self._digest.text()}, Kind.DIGEST)
        self._num_checks += 1
        self._digest = StepDigest()

    def _compile(self, payload: bytes) -> None:
        (number, grammar), error = numbered(payload), ""
        try:
            compiler: Compiler | None = self._compiler
            assert compiler is not None, "rank 0 has one"
            compiler.new_matcher(grammar)
        except Exception as broken:  # noqa: BLE001 (whatever it was, somebody waits for an answer)
            error = first_line(broken) or "it broke"
        self._rank0.channel.send(Kind.COMPILED, asked(number, error))


def fail(channel: Channel, error: BaseException) -> None:
    """Tell rank 0 why this rank cannot go on, and end."""
    try:
        channel.send(Kind.FAILED, f"{type(error).__name__}: {first_line(error)}".encode())
    finally:
        os._exit(1)


def main() -> int:
    """Follow rank 0 until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; rank 0 decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # also where this process is stopped
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    rank0 = FromRank0(channel)
    try:
        settings = rank0.told()
        chosen = choose(from_text(settings["config"]))
        rank0.same({**versions(), **checkpoint_of(*chosen.files)})
        rank0.join(settings, chosen.device)
        built = build(chosen, rank0)
        rank0.begin()
        Steps(rank0, built).run()
    except ConfigError as error:
        channel.tell({"config_error": str(error)})
        return 2
    except Gone:
        return 0
    except Exception as error:  # noqa: BLE001 (a bug, or the device is lost: nothing can go on)
        fail(channel, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
