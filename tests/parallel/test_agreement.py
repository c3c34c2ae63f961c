"""Agreement of ranks, by a clock of the test's: who differs, breaks alone or is not done is lost."""

import json
import threading
import time

import numpy as np
import pytest

from roost.errors import RankError
from roost.parallel.agreement import ALONE_S, BEHIND_S, RankAgreement
from roost.parallel.channel import Kind
from roost.parallel.digest import StepDigest
from roost.parallel.ranks import Handler, OnLost
from roost.step import StepId, StepResult


class QuietRanks:
    """Three ranks of which two say what the test wants."""

    size = 3

    def __init__(self) -> None:
        self.lost: RankError | None = None
        self.sent: list[tuple[Kind, bytes]] = []
        self.handlers: dict[Kind, Handler] = {}
        self.at_loss: list[OnLost] = []

    def handle(self, kind: Kind, handler: Handler) -> None:
        """Remember who handles it."""
        self.handlers[kind] = handler

    def tell_loss(self, on_lost: OnLost) -> None:
        """Remember who is told."""
        self.at_loss.append(on_lost)

    def send(self, kind: Kind, payload: bytes) -> None:
        """Remember it."""
        self.sent.append((kind, payload))

    def lose(self, why: str) -> RankError:
        """The first reason counts."""
        self.lost = self.lost or RankError(why)
        for each in self.at_loss:
            each(self.lost)
        return self.lost

    def say(self, rank: int, kind: Kind, **said: object) -> None:
        """A rank sends something."""
        self.handlers[kind](rank, json.dumps(said).encode())


@pytest.fixture
def ranks() -> QuietRanks:
    return QuietRanks()


@pytest.fixture
def agreement(ranks: QuietRanks) -> RankAgreement:
    return RankAgreement(ranks)  # type: ignore[arg-type]


def digest_of(*steps: int, token: int = 7) -> StepDigest:
    """What came of steps of one row."""
    digest, one = StepDigest(), np.ones(1, dtype=np.int32)
    for step in steps:
        digest.add(
            StepResult(
                step=StepId(step), rows=one, epochs=one, accept_lens=one, tokens=np.array([[token]]), lengths=one * step
            )
        )
    return digest


def test_ranks_that_found_the_same_go_on_and_one_that_did_not_is_named_with_its_steps(
    ranks: QuietRanks, agreement: RankAgreement
) -> None:
    now = time.monotonic()
    agreement.check(digest_of(3, 4), b"")
    assert ranks.sent == [(Kind.CHECK, b"")]
    ranks.say(1, Kind.DIGEST, check=0, digest=digest_of(3, 4).text())
    ranks.say(2, Kind.DIGEST, check=0, digest=digest_of(3, 4).text())
    agreement.look(now + 2 * BEHIND_S)
    assert ranks.lost is None
    agreement.check(digest_of(5, 6, 7), b"")
    ranks.say(2, Kind.DIGEST, check=1, digest=digest_of(5, 6, 7, token=8).text())
    agreement.look(now)
    assert str(ranks.lost) == "rank 2 has not found what rank 0 has in steps 5 to 7: lengths or tokens differ"


def test_a_rank_that_is_not_done_is_lost_after_so_long(ranks: QuietRanks, agreement: RankAgreement) -> None:
    agreement.check(digest_of(3), b"")
    ranks.say(1, Kind.DIGEST, check=0, digest=digest_of(3).text())
    agreement.look(time.monotonic() + BEHIND_S - 1)
    assert ranks.lost is None
    agreement.look(time.monotonic() + BEHIND_S + 1)
    assert str(ranks.lost) == "rank 2 is not done with step 3, which rank 0 has finished"


def test_a_device_that_does_not_end_a_step_is_not_waited_for(ranks: QuietRanks, agreement: RankAgreement) -> None:
    agreement.waits(StepId(5))
    agreement.waits(None)
    agreement.look(time.monotonic() + BEHIND_S + 1)
    assert ranks.lost is None
    agreement.waits(StepId(6))
    agreement.look(time.monotonic() + BEHIND_S - 1)
    assert ranks.lost is None
    agreement.look(time.monotonic() + BEHIND_S + 1)
    assert str(ranks.lost).startswith("step 6 does not end on rank 0's device")


def test_a_step_that_breaks_on_one_rank_alone_ends_the_group(ranks: QuietRanks, agreement: RankAgreement) -> None:
    ranks.say(2, Kind.BROKE, step=9, calls=4, why="too hot")
    agreement.look(time.monotonic() + ALONE_S - 1)
    assert ranks.lost is None
    agreement.look(time.monotonic() + ALONE_S + 1)
    assert str(ranks.lost) == "step 9 broke on rank 2 (too hot), and not on rank 0, 1"


def test_a_step_that_breaks_alike_on_all_ranks_is_everybodys(ranks: QuietRanks, agreement: RankAgreement) -> None:
    agreement.broke(StepId(9), 4, "too hot")
    waiting = threading.Thread(target=agreement.await_all_broke, args=(StepId(9),))
    waiting.start()
    for rank in (1, 2):
        ranks.say(rank, Kind.BROKE, step=9, calls=4, why="too hot")
    waiting.join()
    agreement.look(time.monotonic() + ALONE_S + 1)
    assert ranks.lost is None


def test_one_that_breaks_at_another_place_ends_the_group(ranks: QuietRanks, agreement: RankAgreement) -> None:
    agreement.broke(StepId(9), 4, "too hot")
    ranks.say(1, Kind.BROKE, step=9, calls=4, why="too hot")
    ranks.say(2, Kind.BROKE, step=9, calls=5, why="too hot")
    with pytest.raises(RankError, match=r"step 9 did not break at the same place .* rank 2 after 5 collectives"):
        agreement.await_all_broke(StepId(9))


def test_nobody_waits_for_a_group_that_is_lost(ranks: QuietRanks, agreement: RankAgreement) -> None:
    agreement.broke(StepId(9), 4, "too hot")
    ranks.lose("rank 1 has ended")
    with pytest.raises(RankError, match="rank 1 has ended"):
        agreement.await_all_broke(StepId(9))
