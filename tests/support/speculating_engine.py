"""An engine that speculates, over the witness instead of a model: drafts are right as often as the seed's coin says.

Its vocabulary is the small byte-level one. For tests of what the library, the server and the command line say about
speculation.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.front.engine_client import Observer
from roost.library.llm import LLM
from roost.messages import Command, Event, Finished, Refused, Submit
from roost.progress import Progress, silent
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.server.wire_format import Started, pack, unpack
from roost.startup import Running
from roost.text.language import Language
from roost.text.stream import StopFinder
from roost.text.template import ChatTemplate
from tests.sim.model import Model
from tests.sim.witness import Witness
from tests.support.chain_model import END, TEMPLATE, tokenizer

STEPS = 3
CONFIG = EngineConfig(
    memory=MemoryConfig(page_size=4, pool_tokens=16384),
    sched=SchedConfig(context=1024, max_running=4),
    spec=SpecConfig(spec="ngram", spec_steps=STEPS),
)


class _Device(Witness):
    """A witness that can be closed."""

    def close(self) -> None:
        """Nothing is open."""


def start(config: EngineConfig = CONFIG, progress: Progress = silent) -> Running:
    """What `startup.start` gives; the configuration is always ours."""
    vocab_size = tokenizer().vocab_size
    resolved = resolve(CONFIG, ModelTraits(vocab_size=vocab_size))
    model = Model(vocab=vocab_size, window_1=None, window_2=None, draft_skill=0.6)
    device = _Device(resolved, model, (0, 0), lambda what: False)
    template = ChatTemplate(TEMPLATE, bos="<|im_start|>", eos=END)
    return Running(
        name="witness",
        engine=Engine(
            resolved,
            device,
            SystemClock(),
            new_stop_finder=lambda stops, in_special: StopFinder(tokenizer(), stops, skip_special=not in_special),
        ),
        executor=cast(TorchExecutor, device),
        language=Language(tokenizer=tokenizer(), template=template),
        resolved=resolved,
        compiler=None,
        settings={},
        load_s=0.0,
    )


class LocalEngine:
    """The server's way to an engine, which runs in this process here; events go through the wire's encoding."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm._running.engine
        self._num_ids = 0
        self.queued_max = CONFIG.sched.max_queued
        self.has_journal = False
        self.is_gone = asyncio.Event()
        self.is_restarting = False
        self.started = Started(
            model_name=llm.name,
            language=llm.language.to_json(),
            vocab_size=tokenizer().vocab_size,
            context=1024,
            settings={},
            load_s=0.0,
        )

    def new_id(self) -> str:
        """A name for a request."""
        self._num_ids += 1
        return f"r{self._num_ids}"

    async def ask(self, command: Command, within_s: float, observer: Observer | None = None) -> Event:
        """The answer to a command."""
        return await self._post(command).get()

    async def stream_events(
        self, submit: Submit, name: str, observer: Observer | None = None
    ) -> AsyncGenerator[Event, None]:
        """The events of a request."""
        inbox, ended = self._post(submit), False
        while not ended:
            event = await inbox.get()
            ended = isinstance(event, Finished | Refused)
            yield event

    def _post(self, command: Command) -> "asyncio.Queue[Event]":
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def reply(event: Event) -> None:
            ((_, travelled),) = unpack(pack([(1, event)]))
            loop.call_soon_threadsafe(inbox.put_nowait, travelled)

        self._engine.post(command, reply)
        return inbox
