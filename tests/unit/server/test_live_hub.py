"""The live hub asks only while somebody watches, tells all the same, and starts anew where something was missed."""

import asyncio
from typing import Any

import pytest

from roost.errors import CapacityError
from roost.messages import Event, Frame, GetFrame
from roost.server.live_hub import WATCHERS_MAX, LiveHub


class Engine:
    """Answers with the number of the question."""

    def __init__(self) -> None:
        self.health = "ok"
        self.asked: list[bool] = []  # whether everything was asked for
        self.let_go = 0
        self.fails = False

    def tell(self, command: GetFrame) -> None:
        assert not command.watching
        self.let_go += 1

    async def ask(self, command: GetFrame, limit_s: float) -> Event:
        self.asked.append(command.whole)
        if self.fails:
            raise CapacityError(503, "busy")
        return Frame(told={"whole": command.whole, "number": len(self.asked)})

    def dressed(self, told: dict[str, Any]) -> dict[str, Any]:
        return {**told, "health": "ok"}


async def soon(seconds: float) -> None:
    await asyncio.sleep(0)


async def _some(hub: LiveHub, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    frames = hub.frames()
    async for told in frames:
        found.append(told)
        if len(found) == number:
            break
    await frames.aclose()
    return found


async def _rest() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_frames_are_built_while_somebody_watches_and_once_for_all() -> None:
    async def watch() -> None:
        engine = Engine()
        hub = LiveHub(engine, soon)
        await _rest()
        assert engine.asked == []
        first, second = await asyncio.gather(_some(hub, 4), _some(hub, 4))
        assert first == second and [told["whole"] for told in first] == [True, False, False, False]
        await _rest()
        asked = len(engine.asked)
        await _rest()
        assert len(engine.asked) == asked and engine.let_go == 1
        assert (await _some(hub, 1))[0]["whole"]

    asyncio.run(watch())


def test_a_newcomer_has_everybody_told_everything() -> None:
    async def watch() -> None:
        hub = LiveHub(Engine(), soon)
        old = asyncio.create_task(_some(hub, 8))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        new = await _some(hub, 2)
        assert new[0]["whole"]
        assert sum(told["whole"] for told in await old) >= 1

    asyncio.run(watch())


def test_what_was_missed_is_made_up_for() -> None:
    async def watch() -> None:
        engine = Engine()
        hub, found = LiveHub(engine, soon), list[dict[str, Any]]()
        async for told in hub.frames():
            found.append(told)
            engine.fails = len(found) == 2
            if len(found) == 4:
                break
        assert [told["health"] for told in found] == ["ok", "ok", "stalled", "ok"]
        assert [told["whole"] for told in found] == [True, False, False, True]

    asyncio.run(watch())


def test_while_the_model_loads_that_is_told_and_nothing_is_asked() -> None:
    async def watch() -> None:
        engine = Engine()
        engine.health = "loading"
        found = await _some(LiveHub(engine, soon), 3)
        assert [told["health"] for told in found] == ["loading"] * 3 and engine.asked == []

    asyncio.run(watch())


def test_all_are_let_go_when_the_engine_is_gone() -> None:
    async def watch() -> None:
        engine = Engine()
        found = []
        async for told in LiveHub(engine, soon).frames():
            found.append(told)
            engine.health = "gone"
        assert len(found) <= 2

    asyncio.run(watch())


def test_who_does_not_keep_up_is_let_go() -> None:
    async def watch() -> None:
        hub = LiveHub(Engine(), soon)
        slow = hub.frames()
        await anext(slow)
        keeps_up = await _some(hub, 40)
        assert len(keeps_up) == 40
        assert len([told async for told in slow]) < 40

    asyncio.run(watch())


@pytest.mark.parametrize("number", range(12, 20))  # some fill the queue, and some are too many for it
def test_who_is_behind_hears_of_the_end(number: int) -> None:
    async def watch() -> None:
        engine = Engine()

        async def until_gone(seconds: float) -> None:
            engine.health = "gone" if len(engine.asked) >= number else "ok"
            await asyncio.sleep(0)

        behind = LiveHub(engine, until_gone).frames()
        await anext(behind)
        for _ in range(number):
            await _rest()
        async with asyncio.timeout(5):
            assert len([told async for told in behind]) < number

    asyncio.run(watch())


def test_only_so_many_watch() -> None:
    async def watch() -> None:
        hub = LiveHub(Engine(), soon)
        watching = [hub.frames() for _ in range(WATCHERS_MAX)]
        await asyncio.gather(*(anext(each) for each in watching))
        with pytest.raises(CapacityError, match="64 watch already"):
            await anext(hub.frames())
        for each in watching:
            await each.aclose()

    asyncio.run(watch())
