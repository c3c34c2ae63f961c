"""Start of a group: what --tp asks for is checked, the followers are started, and all ranks meet.

Followers are told the configuration as rank 0 has chosen it, so that none chooses differently. Called by `startup`.
"""

import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from roost.config.options import GLOO, NCCL, TRANSPORTS, EngineConfig, at_least
from roost.environment import cuda_devices
from roost.errors import ConfigError
from roost.parallel.group import COLLECTIVE_S, STORE, DistributedGroup
from roost.parallel.identity import as_text, differences
from roost.parallel.peers import Sizes
from roost.parallel.ranks import Ranks


def transport_of(config: EngineConfig, device: torch.device) -> str:
    """Who moves what ranks exchange."""
    asked = config.model.tp_transport
    return asked if asked is not None else NCCL if device.type == "cuda" else GLOO


def check_tp(config: EngineConfig, device: torch.device, num_devices: int) -> None:
    """Refuse a number of ranks that the machine has no room for, and options that contradict it."""
    model = config.model
    at_least("--tp", model.tp, 1)
    if model.tp == 1:
        if model.tp_transport is not None:
            raise ConfigError(f"--tp-transport {model.tp_transport} is for --tp above 1")
        return
    transport = transport_of(config, device)
    if transport not in TRANSPORTS:
        raise ConfigError(f"--tp-transport must be one of {', '.join(TRANSPORTS)}, got {transport}")
    if device.type != "cuda":
        if transport == NCCL:
            raise ConfigError(f"--tp-transport {NCCL} is for CUDA devices; use {GLOO} or leave it out")
        return
    if transport == NCCL and model.tp > num_devices:
        raise ConfigError(
            f"--tp {model.tp} needs {model.tp} CUDA devices, and there {_are(num_devices)}; "
            f"with --tp-transport {GLOO} ranks share them, slowly"
        )
    if transport == GLOO and config.sched.graphs:
        raise ConfigError(f"--graphs: what --tp-transport {GLOO} moves cannot be captured; use --no-graphs")
    if model.tp > num_devices and config.memory.pool_tokens is None:
        raise ConfigError(
            f"--tp {model.tp} on {num_devices} CUDA device{'s' * (num_devices > 1)} needs --pool-tokens: ranks that "
            "share a device cannot tell how much of it is theirs"
        )


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def with_ranks(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The configuration of each rank: its share of the cores, and no graphs where they cannot hold collectives."""
    model = config.model
    if model.tp == 1:
        return config
    if device.type == "cpu" and model.threads is None:
        model = replace(model, threads=max(1, torch.get_num_threads() // model.tp))
    if device.type == "cuda" and transport_of(config, device) == GLOO:
        config = replace(config, sched=replace(config.sched, graphs=False))
    return replace(config, model=model)


def _fail(met: "Future[DistributedGroup]", error: BaseException) -> None:
    with suppress(InvalidStateError):  # it was met, or had failed
        met.set_exception(error)


class Rank0:
    """Rank 0 while a group starts: it asks the followers, compares and decides."""

    def __init__(
        self, config: EngineConfig, device: torch.device, num_devices: int, within: Path | None, own_process: int | None
    ) -> None:
        """Start the followers and tell them who they are; the configuration names everything.

        `own_process` is this one, if it is the engine's own.
        """
        names = cuda_devices(num_devices) if device.type == "cuda" else ()
        size = config.model.tp
        self._group: DistributedGroup | None = None
        self._transport, self._device = transport_of(config, device), device
        on_device = tuple(names[rank % len(names)] for rank in range(size)) if names else ()
        self.ranks = Ranks(size, on_device=on_device, within=within)
        told = {"size": size, "config": as_text(config), "transport": self._transport, "folder": str(self.ranks.folder)}
        told["own_process"] = own_process
        try:
            for rank in self.ranks.pids:
                self.ranks.tell(rank, {"rank": rank, **told})
        except BaseException:
            self.ranks.close()
            raise

    def join(self) -> None:
        """Meet them, once they have said that they are what rank 0 is; raises RankError if one ends before it comes."""
        met: Future[DistributedGroup] = Future()
        threading.Thread(target=self._meet, args=(met,), daemon=True).start()
        self.ranks.tell_loss(partial(_fail, met))
        self._group = met.result()
        self.ranks.tell_loss(lambda lost: self.group.abort())

    def _meet(self, met: "Future[DistributedGroup]") -> None:
        """Wait for all of them, for as long as it takes: nothing can break that off."""
        store, size = self.ranks.folder / STORE, self.ranks.size
        try:
            group = DistributedGroup(0, size, transport=self._transport, device=self._device, store=store)
        except BaseException as error:  # noqa: BLE001 (for whoever waits)
            _fail(met, error)
            return
        with suppress(InvalidStateError):
            met.set_result(group)

    @property
    def group(self) -> DistributedGroup:
        """Their collectives."""
        assert self._group is not None
        return self._group

    def same(self, what: Mapping[str, str]) -> None:
        """Raise ConfigError with what differs, unless all have the same."""
        found = {rank: "; ".join(differences(what, self.ranks.told(rank))) for rank in self.ranks.pids}
        wrong = [f"rank {rank}: {differing}" for rank, differing in found.items() if differing]
        for rank in self.ranks.pids:
            self.ranks.tell(rank, {"refused": " / ".join(wrong)})
        if wrong:
            raise ConfigError(f"--tp: the ranks are not alike (here is rank 0): {' / '.join(wrong)}")

    def smallest(self, sizes: Sizes) -> Sizes:
        """Of each number the smallest that a rank has."""
        every = [sizes, *(self.ranks.told(rank)["sizes"] for rank in self.ranks.pids)]
        columns = zip(*every, strict=True)
        smallest = [min((each for each in column if each is not None), default=None) for column in columns]
        for rank in self.ranks.pids:
            self.ranks.tell(rank, {"sizes": smallest})
        return smallest

    def begin(self) -> None:
        """Wait until all are ready to run steps."""
        for rank in self.ranks.pids:
            self.ranks.told(rank)
        self.group.limit(COLLECTIVE_S)
        for rank in self.ranks.pids:
            self.ranks.tell(rank, {"begin": True})
        if self._transport == GLOO:  # they have met; NCCL may look there again
            shutil.rmtree(self.ranks.folder, ignore_errors=True)
