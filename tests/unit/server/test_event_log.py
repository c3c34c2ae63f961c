"""An event log is read from any event on, by any number of readers, while it grows and afterwards."""

import asyncio

from roost.server.event_log import Event, EventLog


async def read(log: EventLog, after: int = -1) -> list[int]:
    """The numbers of the events that a reader gets."""
    return [event["sequence_number"] async for event in log.read(after)]


def event(number: int) -> Event:
    """An event of this number."""
    return {"sequence_number": number}


def test_readers_get_every_event_after_the_one_they_name() -> None:
    async def story() -> None:
        log = EventLog()
        log.add(event(0), event(1))
        readers = [asyncio.create_task(read(log, after)) for after in (-1, 0, 2)]
        await asyncio.sleep(0)
        for number in (2, 3):
            log.add(event(number))
            await asyncio.sleep(0)
        log.add(event(4))
        log.close()
        assert [await reader for reader in readers] == [[0, 1, 2, 3, 4], [1, 2, 3, 4], [3, 4]]
        assert await read(log, 3) == [4] and await read(log, 4) == []

    asyncio.run(story())


def test_a_reader_that_leaves_disturbs_nobody() -> None:
    async def story() -> None:
        log = EventLog()
        leaver, reader = (asyncio.create_task(read(log)) for _ in range(2))
        await asyncio.sleep(0)
        leaver.cancel()
        log.add(event(0))
        log.close()
        assert await reader == [0]

    asyncio.run(story())
