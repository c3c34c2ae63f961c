"""Distributed group: the collectives of a forward pass, over torch.distributed: NCCL on GPUs, gloo on CPUs.

A sum has the same bits on every rank. Over gloo it is made in the order of the ranks, from what all of them hand in, so
that it does not depend on the other tokens of a batch; NCCL's all-reduce has an order of its own, which is faster, and
on a GPU results may depend on the batch as it is. NCCL's calls can be captured in CUDA graphs, gloo's cannot. Made at
start-up, handed to models in their `Ops`.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from roost.config.options import NCCL
from roost.errors import ConfigError

torch_distributed: Any = distributed  # whose types are not all declared
collectives: Any = distributed.distributed_c10d
JOIN_S = 300  # for which a rank waits for the others while the group starts: they load, and compile
COLLECTIVE_S = 7  # for which a step waits for the other ranks, once all have started
STORE = "store"  # the file by which ranks meet, in their folder
_LOOPBACK = "127.0.0.1"


class DistributedGroup:
    """The ranks of one model, this process being one of them."""

    def __init__(self, rank: int, size: int, *, transport: str, device: torch.device, store: Path) -> None:
        """Meet the others, by a file in a private folder; raises ConfigError if torch lacks the transport."""
        self.rank, self.size, self.transport = rank, size, transport
        self.num_calls = 0  # collectives of this process; a replayed graph counts as none
        self._device = device
        self._limit: Any = collectives.AllgatherOptions()
        meeting = torch_distributed.FileStore(str(store), size)
        # of this group alone, not the one and only group of torch.distributed, which a program may have for itself
        self._ranks: Any
        if transport == NCCL:
            if not distributed.is_nccl_available():
                raise ConfigError("--tp on GPUs needs a build of torch with NCCL; this one has none")
            options: Any = collectives.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=JOIN_S)
            self._ranks = collectives.ProcessGroupNCCL(meeting, rank, size, options)
            # on the stream of the step: another one would cut a graph in pieces that wait for each other
            self._sum: Any = collectives.AllreduceOptions()
            self._sum.asyncOp = self._limit.asyncOp = False
        else:
            options = collectives.ProcessGroupGloo._Options()
            options._devices = [collectives.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
            options._timeout = timedelta(seconds=JOIN_S)
            self._ranks = collectives.ProcessGroupGloo(meeting, rank, size, options)
        self.limit(JOIN_S)
        self.all_reduce(torch.zeros(1, device=device))  # before anything is captured, NCCL must have connected
        self.num_calls = 0

    def limit(self, seconds: float) -> None:
        """Have collectives fail that take longer than so many seconds from now on."""
        self._limit.timeout = timedelta(seconds=seconds)

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the ranks' tensors; `part` may be overwritten."""
        if self.transport == NCCL:
            self.num_calls += 1
            part = part.contiguous()
            self._ranks.allreduce([part], self._sum)  # in the order of its stream: there is nothing to wait for
            return part
        parts = self._gathered(part)
        total = parts[0] if part.dtype in (torch.float32, torch.float64) else parts[0].float()
        for each in parts[1:]:
            total = total + each
        return total.to(part.dtype)

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors side by side, along the last dimension, in the order of the ranks."""
        return torch.cat(tuple(self._gathered(part)), dim=-1)

    def abort(self) -> None:
        """End what waits for other ranks: one is lost, or all end. gloo's connections break by themselves."""
        if self.transport == NCCL:
            with suppress(RuntimeError):
                self._ranks.abort()

    def _gathered(self, part: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks."""
        self.num_calls += 1
        part = part.contiguous()
        if self.transport == NCCL:
            out = part.new_empty((self.size, *part.shape))
            self._ranks._allgather_base(out, part, self._limit)
            return out.unbind()
        here = part.cpu()  # where ranks share a GPU for want of more
        parts = [torch.empty_like(here) for _ in range(self.size)]
        self._ranks.allgather([parts], [here], self._limit).wait()
        return [each.to(part.device) for each in parts]
