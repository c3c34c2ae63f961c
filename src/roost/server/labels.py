"""Labels: which sessions a client's own name for its conversations has led to.

A label (`prompt_cache_key`, `x-session-id` and the like) may stand for an agent and its helpers, whose conversations
differ, so it has a few sessions. Bounded; the least recently used go first. Called by server.conversations.
"""

from collections import OrderedDict
from hashlib import blake2b

LABELS_MAX = 1024
SESSIONS_PER_LABEL = 4


class Labels:
    """The labels of all clients."""

    def __init__(self) -> None:
        self._labels: OrderedDict[tuple[str, str], list[str]] = OrderedDict()  # ids, the last used one last

    def of(self, client: str, label: str) -> list[str]:
        """Ids of a label's sessions."""
        return self._labels.get((client, _short(label)), []) if label else []

    def use(self, client: str, label: str, session_id: str) -> list[tuple[str, str]]:
        """A label's conversation goes on in this session; returns clients and ids of those that are to be closed."""
        key = (client, _short(label))
        ids = self._labels.setdefault(key, [])
        self._labels.move_to_end(key)
        if session_id in ids:
            ids.remove(session_id)
        ids.append(session_id)
        dropped = [(client, each) for each in ids[:-SESSIONS_PER_LABEL]]
        del ids[:-SESSIONS_PER_LABEL]
        while len(self._labels) > LABELS_MAX:
            (other, _), old = self._labels.popitem(last=False)
            dropped += [(other, each) for each in old]
        return dropped


def _short(label: str) -> str:
    """A label of bounded length, whatever a client sends."""
    return blake2b(label.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
