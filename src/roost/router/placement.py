"""Placement: which replica gets a request, by what it names, then by load and by the beginning of its prompt.

Owns what one router knows of its replicas: who holds which keys (sessions, stored responses, conversations, labels)
and who has run which beginnings of prompts. All of it is bounded and can be lost: a router that begins anew learns it
again from what replicas report. Never waits, knows neither time nor chance. Called by `roost.ray`, and by simulations.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

Key = bytes  # what names something that one replica holds; see `key_of`

KEYS_MAX = 2**18
BLOCKS_MAX = 2**16  # beginnings of prompts
SLACK = 4  # requests that a replica may have more than another, for the sake of a prompt that it has run
BLOCK_LEN = 512  # bytes of a prompt's text
PROMPT_BLOCKS_MAX = 64  # of one prompt that are looked at
KEY_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request says about where it belongs."""

    keys: tuple[Key, ...] = ()  # what only its holder can serve, the first that is known decides
    labels: tuple[Key, ...] = ()  # what its holder can serve with less work
    blocks: tuple[Key, ...] = ()  # beginnings of its prompt, the shortest first; see `blocks_of`


class Placement:
    """What one router knows of its replicas, which are named by texts of their own."""

    def __init__(self, *, keys_max: int = KEYS_MAX, blocks_max: int = BLOCKS_MAX, slack: int = SLACK) -> None:
        self._keys_max, self._blocks_max, self._slack = keys_max, blocks_max, slack
        self._replicas: tuple[str, ...] = ()  # that take requests
        self._holders: OrderedDict[Key, str] = OrderedDict()  # the last used key is the last
        self._lost: OrderedDict[Key, None] = OrderedDict()  # keys whose holder is gone, and no other known
        self._runners: OrderedDict[Key, frozenset[str]] = OrderedDict()  # who has run a beginning of a prompt
        self._turns: dict[str, int] = {}  # when each was last chosen, in choices
        self._num_choices = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that take requests."""
        return self._replicas

    @property
    def num_keys(self) -> int:
        """How many keys are known."""
        return len(self._holders)

    def update(self, replicas: Iterable[str]) -> None:
        """These take requests now; what is gone or drains holds nothing any more."""
        live = tuple(sorted(replicas))
        if live == self._replicas:
            return
        gone = set(self._replicas).difference(live)
        self._replicas = live
        if gone:
            for key in [key for key, each in self._holders.items() if each in gone]:
                self._lost[key] = None
            while len(self._lost) > self._keys_max:
                self._lost.popitem(last=False)
            self._holders = OrderedDict((key, each) for key, each in self._holders.items() if each not in gone)
            self._turns = {each: turn for each, turn in self._turns.items() if each not in gone}

    def learn(self, replica: str, keys: Iterable[Key]) -> None:
        """A replica has just begun to hold these, whoever held them before."""
        if replica in self._replicas:
            for key in keys:
                self._hold(key, replica)
                self._lost.pop(key, None)

    def report(self, replica: str, keys: Iterable[Key]) -> None:
        """A replica says all that it holds; where another is known to hold a key, that is newer."""
        if replica in self._replicas:
            for key in keys:
                self._lost.pop(key, None)
                if key not in self._holders:
                    self._hold(key, replica)

    def holder(self, wanted: Wanted) -> str | None:
        """Who holds what a request names; None if nobody is known to, or it names nothing."""
        return next((self._holders[key] for key in (*wanted.keys, *wanted.labels) if key in self._holders), None)

    def is_lost(self, wanted: Wanted) -> bool:
        """Whether what only its holder can serve was held by a replica that is gone, and no other holds it."""
        return any(key in self._lost for key in wanted.keys)

    def choose(self, wanted: Wanted, loads: Mapping[str, int]) -> str:
        """The replica for a request, which holds from now on what the request names; there must be one.

        `loads`: how many requests each has, 0 if absent. A key that nobody holds has its place by its hash alone, so
        that routers which know of no holder agree.
        """
        chosen = self.holder(wanted)
        if chosen is None and wanted.keys:
            chosen = max(self._replicas, key=lambda each: _weight(wanted.keys[0], each))
        if chosen is None:
            chosen = self._by_load(wanted.blocks, loads)
        self._num_choices += 1
        self._turns[chosen] = self._num_choices
        for key in (*wanted.keys, *wanted.labels):
            self._hold(key, chosen)
        self._run(wanted.blocks, chosen)
        return chosen

    def shared_len(self, replica: str, blocks: Iterable[Key]) -> int:
        """How many first blocks of a prompt a replica has run."""
        length = 0
        for block in blocks:
            if replica not in self._runners.get(block, ()):
                break
            length += 1
        return length

    def _by_load(self, blocks: tuple[Key, ...], loads: Mapping[str, int]) -> str:
        """Among those with little to do: who has run most of the prompt, then who has least to do."""
        most = min(loads.get(each, 0) for each in self._replicas) + self._slack

        def worth(replica: str) -> tuple[int, int, int]:
            return self.shared_len(replica, blocks), -loads.get(replica, 0), -self._turns.get(replica, 0)

        return max((each for each in self._replicas if loads.get(each, 0) <= most), key=worth)

    def _hold(self, key: Key, replica: str) -> None:
        self._holders[key] = replica
        self._holders.move_to_end(key)
        if len(self._holders) > self._keys_max:
            self._holders.popitem(last=False)

    def _run(self, blocks: tuple[Key, ...], replica: str) -> None:
        for block in reversed(blocks):  # the longest beginning is forgotten first
            runners = self._runners.pop(block, frozenset())
            self._runners[block] = runners.intersection(self._replicas) | {replica}
        while len(self._runners) > self._blocks_max:
            self._runners.popitem(last=False)


def key_of(kind: str, client: str, name: str) -> Key:
    """The key of a client's session, response, conversation or label, by its name."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (kind, client, name)]
    return blake2b(b"".join(len(part).to_bytes(8) + part for part in parts), digest_size=KEY_BYTES).digest()


def blocks_of(text: bytes) -> tuple[Key, ...]:
    """The beginnings of a prompt's text that end with a whole block, each as a hash of all before its end."""
    digest, blocks = blake2b(digest_size=KEY_BYTES), []
    for end in range(BLOCK_LEN, min(len(text), BLOCK_LEN * PROMPT_BLOCKS_MAX) + 1, BLOCK_LEN):
        digest.update(text[end - BLOCK_LEN : end])
        blocks.append(digest.digest())
    return tuple(blocks)


def _weight(key: Key, replica: str) -> bytes:
    """A number of its own for each pair: the replica with the highest has the key (rendezvous hashing)."""
    return blake2b(replica.encode(), key=key, digest_size=KEY_BYTES).digest()
