"""Where kernels run: the team, the memory they share, and recordings.

An operation hands its records to `perform`, which has the team run them at once; while a pass is being recorded they
are kept instead, and run later, all in one go and as often as wanted (`Recording.run`). What a recorded pass reads and
writes stays where it was while it was recorded, for as many tokens as it was made for; how many of them count is said
at each run. There is one execution in a process; whoever uses it holds its lock from the first word it writes to the
last one it reads. Called by the operations of the numba backend.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from roost.errors import first_line
from roost.layers.ops import PassFunction
from roost.numba_kernels.records import NUM_FIELDS
from roost.numba_kernels.support import compiled_folder, discard_compiled
from roost.numba_kernels.team import Team

logger = logging.getLogger(__name__)

TOKENS_MAX = 64  # of a recorded pass: with more, what a pass costs beside its kernels matters little
_LINE = 64  # bytes of a cache line


class NotRecordable(Exception):
    """A pass computes something that no record can say."""


class Recording:
    """The records of a pass over up to `tokens_max` tokens, and the tensors that it reads and writes."""

    def __init__(self, team: Team, tokens_max: int, arena: "Arena") -> None:
        self.tokens_max = tokens_max
        self.arena = arena
        self.count = np.zeros(1, dtype=np.int64)  # of tokens
        self._team = team
        self._parts: list[np.ndarray] = []
        self._refreshes: list[Callable[[Any], None]] = []
        self._records = np.zeros((0, NUM_FIELDS), dtype=np.int64)
        self._places = self._inputs = np.zeros(0, dtype=np.int64)  # among all numbers, and which input's address it is

    def add(self, records: np.ndarray) -> None:
        """Records behind those so far."""
        self._parts.append(records.copy())

    @property
    def last(self) -> np.ndarray | None:
        """The record that was kept last, where it lies."""
        return self._parts[-1][-1] if self._parts else None

    def before_run(self, refresh: Callable[[Any], None]) -> None:
        """Have something done before each run: `refresh` is given what the pass is told of the batch."""
        self._refreshes.append(refresh)

    def end(self, inputs: Sequence[Tensor]) -> None:
        """Nothing more is recorded; `inputs` are tensors in whose place others will be read."""
        self._records = np.concatenate(self._parts)
        self._parts.clear()
        numbers = self._records.reshape(-1)
        places = [np.flatnonzero(numbers == tensor.data_ptr()) for tensor in inputs]
        self._places, self._inputs = (
            np.concatenate(places),
            np.repeat(range(len(places)), [len(each) for each in places]),
        )

    def run(self, inputs: Sequence[Tensor], batch: object) -> None:
        """Run the pass over the tokens of other inputs."""
        num_tokens = len(inputs[0])
        assert 0 < num_tokens <= self.tokens_max, num_tokens
        self.count[0] = num_tokens
        assert all(tensor.is_contiguous() for tensor in inputs)
        addresses = np.array([tensor.data_ptr() for tensor in inputs])
        self._records.reshape(-1)[self._places] = addresses[self._inputs]
        for refresh in self._refreshes:
            refresh(batch)
        self._team.run(self._records)


class Arena:
    """Memory for what recorded passes of one kind compute on their way: only one of them runs at a time."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._outgrown: list[Tensor] = []  # recordings name their memory
        self._next = 0

    def restart(self) -> None:
        """Give the same memory out again."""
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of its own among those given out since the last restart."""
        number = self._next
        self._next += 1
        if number == len(self._tensors):
            self._tensors.append(torch.empty(0, dtype=torch.uint8))
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._tensors[number]) < size:
            self._outgrown.append(self._tensors[number])
            self._tensors[number] = torch.empty(size, dtype=torch.uint8)
        return self._tensors[number][:size].view(dtype).view(shape)


class RecordedPass:
    """A pass over few tokens that is recorded the first time it is asked for in some shape, and run from then on.

    Over many tokens it is not worth it, and a pass that computes what no record can say is never recorded.
    """

    def __init__(self) -> None:
        self._arena = Arena()
        self._recordings: dict[Hashable, tuple[Recording, tuple[Tensor, ...]]] = {}
        self._is_recordable = True

    def run(
        self, shape: Hashable, function: PassFunction, inputs: Sequence[Tensor], batch: object
    ) -> tuple[Tensor, ...]:
        """What `function` makes of `inputs`; see `layers.ops.Pass`."""
        if not self._is_recordable or not 0 < len(inputs[0]) <= TOKENS_MAX:
            return tuple(function(inputs))
        with execution().lock:
            return self._replay(shape, function, inputs, batch)

    def _replay(
        self, shape: Hashable, function: PassFunction, inputs: Sequence[Tensor], batch: object
    ) -> tuple[Tensor, ...]:
        if shape not in self._recordings:
            try:
                self._recordings[shape] = self._record(function, inputs)
            except NotRecordable:
                self._is_recordable = False
                return tuple(function(inputs))
        recording, outputs = self._recordings[shape]
        own = {each.data_ptr() for each in outputs}  # what it returned may come back: it must not write where it reads
        recording.run([each.clone() if each.data_ptr() in own else each.contiguous() for each in inputs], batch)
        return tuple(each[: len(inputs[0])] for each in outputs)

    def _record(self, function: PassFunction, inputs: Sequence[Tensor]) -> tuple[Recording, tuple[Tensor, ...]]:
        # of zeros: if torch computes with them, it can do so before that is refused
        stand_ins = [torch.zeros((TOKENS_MAX, *each.shape[1:]), dtype=each.dtype) for each in inputs]
        with execution().record(TOKENS_MAX, self._arena) as recording:
            outputs = tuple(function(stand_ins))
        recording.end(stand_ins)
        return recording, outputs


class Execution:
    """A team, scratch memory, and what is being recorded."""

    def __init__(self, size: int) -> None:
        self.team = Team(size)
        self.lock = threading.RLock()
        self._count = np.zeros(1, dtype=np.int64)
        self._scratch: list[Tensor] = []  # each larger than the one before, which recordings may still name
        self._single = np.zeros((1, NUM_FIELDS), dtype=np.int64)
        self._recording: Recording | None = None

    @property
    def is_recording(self) -> bool:
        """Whether records are kept for later."""
        return self._recording is not None

    @property
    def last_recorded(self) -> np.ndarray | None:
        """The record that was kept last, if one was: it may still be changed."""
        return None if self._recording is None else self._recording.last

    def perform(self, records: np.ndarray) -> None:
        """Run records, or keep them for later."""
        if self._recording is not None:
            self._recording.add(records)
        else:
            self.team.run(records)

    def perform_one(self, kind: int, fields: Mapping[int, int]) -> None:
        """The same for one record, from its kind and its fields."""
        self._single[0] = 0
        self._single[0, 0] = kind
        for number, value in fields.items():
            self._single[0, number] = value
        self.perform(self._single)

    def count_at(self, num_tokens: int) -> int:
        """The address at which records find the number of tokens."""
        if self._recording is not None:
            assert num_tokens == self._recording.tokens_max, (num_tokens, self._recording.tokens_max)
            return self._recording.count.ctypes.data
        self._count[0] = num_tokens
        return self._count.ctypes.data

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor to write to."""
        return torch.empty(shape, dtype=dtype) if self._recording is None else self._recording.arena.empty(shape, dtype)

    def scratch(self, num_bytes: int) -> int:
        """The address of so many bytes that nothing else uses while an operation runs, at the start of a cache line."""
        if not self._scratch or len(self._scratch[-1]) < num_bytes + _LINE:
            self._scratch.append(torch.empty(2 * num_bytes + _LINE, dtype=torch.uint8))
        first = self._scratch[-1].data_ptr()
        return first + -first % _LINE

    def before_run(self, refresh: Callable[[Any], None]) -> None:
        """Have something done before each run of what is being recorded, if anything is."""
        if self._recording is not None:
            self._recording.before_run(refresh)

    @contextmanager
    def record(self, tokens_max: int, arena: Arena) -> Iterator[Recording]:
        """Record what is performed; raises NotRecordable where torch would compute something in between."""
        arena.restart()
        self._recording = recording = Recording(self.team, tokens_max, arena)
        try:
            with _ViewsAlone():
                yield recording
        finally:
            self._recording = None


class _ViewsAlone(TorchFunctionMode):
    """Refuses operations of torch that compute: a recording would not repeat them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise NotRecordable(name)
        if func is not torch.empty:
            known = {_storage(each) for each in args if isinstance(each, Tensor)}
            made = result if isinstance(result, tuple | list) else (result,)
            if any(isinstance(each, Tensor) and _storage(each) not in known for each in made):
                raise NotRecordable(name)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@cache
def execution() -> Execution:
    """The one of this process, with as many threads as torch has."""
    return Execution(torch.get_num_threads())


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def exclusive(operation: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """An operation that holds the lock of the execution while it runs."""

    @wraps(operation)
    def alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with execution().lock:
            return operation(*args, **kwargs)

    return alone


def prepare() -> None:
    """Compile the kernels, or load them as they were compiled before, and start the team."""
    folder = compiled_folder()
    if not any(folder.rglob("*.nbc")):
        logger.warning("compiling kernels for this CPU, once, to %s: this takes about 20 seconds", folder)
    nothing = np.zeros((0, NUM_FIELDS), dtype=np.int64)
    try:
        Team(1).run(nothing)
    except Exception as error:  # noqa: BLE001 (a file that was cut off, say, raises anything)
        logger.warning("compiled kernels in %s cannot be used (%s): compiling again", folder, first_line(error))
        discard_compiled()
        Team(1).run(nothing)
    execution().team.run(nothing)
