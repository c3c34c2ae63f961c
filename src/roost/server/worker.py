"""Worker: the engine's process. Reads its settings from standard input, loads the model, and runs the loop.

Commands come in on one socket, read by a thread; events go out on another, written by a thread that sends together all
that have accumulated. When standard input ends, the server is gone, and this process ends. Started by
`server.engine_process`.
"""

import logging
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from roost.config.options import EngineConfig
from roost.errors import ConfigError, RankError, RoostError
from roost.messages import Event, Reply
from roost.obs.log_events import last_events, logged_trace
from roost.sched.engine import Engine
from roost.server.logs import ENGINE, NOTICES, LogConfig, set_up
from roost.server.wire_format import Started, pack, unpack_command
from roost.startup import Running, start

_BATCH_MAX = 512  # events in one message

Outbox = SimpleQueue[tuple[int, Event | Started]]

_log, _notices = logging.getLogger(ENGINE), logging.getLogger(NOTICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the server tells its engine."""

    folder: str
    first: int  # exchange that is this engine's: what was sent to one before it is nobody's
    config: EngineConfig
    log: LogConfig


def main() -> int:
    """Run the engine until the server goes away."""
    threading.excepthook = _die_with_thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches both; the server decides
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    set_up(settings.log)
    trace = logged_trace()
    threading.Thread(target=_die_with_server, args=(Path(settings.folder),), daemon=True).start()
    try:
        running = start(settings.config, trace=trace, on_lost=_die_with_rank, folder=Path(settings.folder))
    except ConfigError as error:
        _notices.error("%s", error)
        return 2
    except RankError as error:
        _log.critical("the ranks of the engine did not start: %s", error)
        return 1
    context, folder = zmq.Context(), Path(settings.folder)
    outbox: Outbox = SimpleQueue()
    threading.Thread(target=_write, args=(context, folder, outbox), daemon=True).start()
    threading.Thread(target=_read, args=(context, settings, running.engine, outbox), daemon=True).start()
    outbox.put((0, _started(running)))
    try:
        running.engine.run()
    except Exception:  # noqa: BLE001 (a bug, or the device is lost: nothing can go on)
        _log.critical("the engine failed", exc_info=True, extra={"fields": {"last_events": last_events(trace)}})
        return 1
    return 0


def _started(running: Running) -> Started:
    return Started(
        model_name=running.name,
        language=running.language.to_json(),
        vocab_size=running.resolved.vocab_size,
        context=running.resolved.context,
        settings=running.settings,
        load_s=running.load_s,
    )


def _die_with_thread(args: threading.ExceptHookArgs) -> None:
    """End at once when a thread dies, so that the server refuses what waits instead of never answering."""
    error = args.exc_value or args.exc_type()
    _log.critical("a thread of the engine failed", exc_info=(args.exc_type, error, args.exc_traceback))
    os._exit(1)


def _die_with_rank(lost: RoostError) -> None:
    """End at once when a rank is lost, whatever waits for it: the others have been ended."""
    _log.critical("a rank of the engine was lost: %s", lost)
    os._exit(1)


def _die_with_server(folder: Path) -> None:
    """Wait for the end of standard input, then end at once: nobody is left to hear anything, or to tidy up."""
    while os.read(sys.stdin.fileno(), 4096):  # not through the buffer, whose lock an interpreter wants as it ends
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _read(context: "zmq.Context[Any]", settings: Settings, engine: Engine, outbox: Outbox) -> None:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.connect(f"ipc://{Path(settings.folder) / 'commands'}")
    while True:
        number, command, read_by = unpack_command(socket.recv())
        if 0 < number < settings.first:
            continue
        engine.post(command, _reply(number, outbox), read_by)


def _reply(number: int, outbox: Outbox) -> Reply:
    return lambda event: outbox.put((number, event))


def _write(context: "zmq.Context[Any]", folder: Path, outbox: Outbox) -> None:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(f"ipc://{folder / 'events'}")
    while True:
        batch = [outbox.get()]
        try:
            while len(batch) < _BATCH_MAX:
                batch.append(outbox.get_nowait())
        except Empty:
            pass
        socket.send(pack(batch))


if __name__ == "__main__":
    sys.exit(main())
