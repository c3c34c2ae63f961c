"""Request batch: the requests of one call, sent to the engine as its queue drains.

Owns which of them are unsent, unstarted or running. A full queue is waited for and never reported; half of it is left
to others, so that a long list shuts nobody out. For one thread at a time. Called by the library.
"""

from collections.abc import Generator, Sequence
from heapq import heappop, heappush
from queue import Empty

from roost.front.answer import refusal
from roost.library.engine_thread import EngineThread, Events
from roost.messages import Begun, Event, Finished, PromptLogprobs, Refused, Submit, Tokens

_FULL = 429
_RETRY_S = 0.02  # where only others' requests are in the way, whose ends are not reported here

RequestEvent = Begun | Tokens | PromptLogprobs | Finished | Refused


class RequestBatch:
    """Requests that need not fit the queue together."""

    def __init__(self, engine: EngineThread, submits: Sequence[Submit], max_queued: int) -> None:
        self._engine = engine
        self._submits = submits
        self._places = {submit.request_id: place for place, submit in enumerate(submits)}
        self._unsent = list(range(len(submits)))  # a heap: the first of them goes next
        self._unstarted: set[int] = set()  # sent, without an event so far
        self._started: set[int] = set()  # and not ended
        self._share = max(1, max_queued // 2)  # of the queue
        # less while others fill the queue: as many as fitted, then one more each time
        self._unstarted_max = self._share
        self._is_full = False  # the queue, when it was last tried

    def events(self) -> Generator[RequestEvent, None, None]:
        """All events of the requests; leaving before the last ends what has not ended."""
        events = Events()
        try:
            while self._unsent or self._unstarted or self._started:
                while self._unsent and not self._is_full and len(self._unstarted) < self._unstarted_max:
                    place = heappop(self._unsent)
                    self._unstarted.add(place)
                    self._engine.send(self._submits[place], events.put)
                try:
                    is_any_sent = self._unstarted or self._started
                    event = self._take(events.get(timeout=None if is_any_sent else _RETRY_S))
                except Empty:
                    self._is_full = False
                    continue
                if event is not None:
                    yield event
        except BaseException:
            for place in self._unstarted | self._started:
                self._engine.abort(self._submits[place].request_id)
            raise

    def _take(self, event: Event) -> RequestEvent | None:
        """Note what an event says about the queue; None if that is all it says."""
        assert isinstance(event, RequestEvent), event
        if event.request_id not in self._places:  # the engine has ended
            assert isinstance(event, Refused), event
            raise refusal(event)
        place = self._places[event.request_id]
        is_first = place in self._unstarted
        self._unstarted.discard(place)
        self._is_full = isinstance(event, Refused) and event.status == _FULL
        if self._is_full:
            self._unstarted_max = max(1, len(self._unstarted))
            heappush(self._unsent, place)
            return None
        self._unstarted_max = min(self._share, self._unstarted_max + is_first)
        if isinstance(event, Finished | Refused):
            self._started.discard(place)
        else:
            self._started.add(place)
        return event
