"""An engine process that says only what the test says; commands are kept as they were sent."""

from roost.config.options import EngineConfig
from roost.messages import Command, Event
from roost.server.engine_process import EngineProcess
from roost.server.wire_format import Started
from roost.text.language import Language
from tests.support.small_vocabularies import byte_level


class SilentEngine(EngineProcess):
    """An engine without a process: the test reads its commands and answers them."""

    def __init__(self) -> None:
        super().__init__(EngineConfig())
        language = Language(tokenizer=byte_level(), template=None).to_json()
        self.started = Started(
            model_name="silent", language=language, vocab_size=300, context=64, settings={}, load_s=0
        )
        self.sent: list[tuple[int, Command]] = []

    async def _send(self, number: int, command: Command, read_by: int | None = None) -> None:
        self.sent.append((number, command))

    def tell(self, command: Command) -> None:
        """Remember it."""
        self.sent.append((0, command))

    def commands(self, kind: type[Command]) -> list[Command]:
        """The commands of a kind that were sent."""
        return [command for _, command in self.sent if isinstance(command, kind)]

    def answer(self, kind: type[Command], event: Event) -> None:
        """Answer the last command of a kind."""
        number = [number for number, command in self.sent if isinstance(command, kind)][-1]
        self.receive(number, event)
