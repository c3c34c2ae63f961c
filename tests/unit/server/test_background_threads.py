"""Long work is done beside the event loop, little of it at once, and what is shorter does not wait for it."""

import asyncio
import threading

from roost.server.background_threads import INLINE_MAX, MEDIUM_MAX, NUM_THREADS, OffloadThreads


class Gate:
    """Work that lasts until it is let go, and counts how much of it goes on at once."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = threading.Semaphore(0)
        self.running = self.most = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        self.opened.wait()
        with self._lock:
            self.running -= 1
        return threading.get_ident()


def test_long_work_does_not_hold_up_the_event_loop() -> None:
    here = threading.get_ident()

    async def where(length: int) -> int:
        return await OffloadThreads().run(length, threading.get_ident)

    assert asyncio.run(where(INLINE_MAX)) == here
    assert asyncio.run(where(INLINE_MAX + 1)) != here
    assert asyncio.run(where(MEDIUM_MAX + 1)) != here


def _at_once(length: int) -> tuple[int, int]:
    """How many of five such works went on at once, and how many of them ended."""

    async def run() -> tuple[int, int]:
        offload, gate = OffloadThreads(), Gate()
        tasks = [asyncio.create_task(offload.run(length, gate)) for _ in range(5)]
        for _ in range(NUM_THREADS if length <= MEDIUM_MAX else 1):
            await asyncio.to_thread(gate.begun.acquire)
        # while they go on, the loop does too, and shorter work has its own threads
        assert await offload.run(INLINE_MAX, lambda: 7) == 7
        if length > MEDIUM_MAX:
            assert await offload.run(MEDIUM_MAX, lambda: 8) == 8
        gate.opened.set()
        return gate.most, len(await asyncio.gather(*tasks))

    return asyncio.run(run())


def test_so_much_long_work_goes_on_at_once_and_no_more() -> None:
    assert _at_once(MEDIUM_MAX) == (NUM_THREADS, 5)
    assert _at_once(MEDIUM_MAX + 1) == (1, 5)
