"""Labels: which sessions a client's own name for its conversations has led to.

A label (`prompt_cache_key`, `x-session-id` and the like) may stand for an agent and its helpers, whose conversations
differ, so it has a few sessions. Bounded; the least recently used go first. Called by server.conversations.
"""

from collections import OrderedDict
from hashlib import blake2b

from roost.server.session_uses import OnHeld, SessionUses, tell_nobody

LABELS_MAX = 1024
SESSIONS_PER_LABEL = 4


class Labels:
    """The labels of all clients; each is a use of its sessions."""

    def __init__(self, uses: SessionUses) -> None:
        self._uses = uses
        self._labels: OrderedDict[tuple[str, str], list[str]] = OrderedDict()  # ids, the last used one last
        self.on_use: OnHeld = tell_nobody

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The clients of all labels, and those in short."""
        return list(self._labels)

    def of(self, client: str, label: str) -> list[str]:
        """Ids of a label's sessions."""
        return self._labels.get((client, short_label(label)), []) if label else []

    def use(self, client: str, label: str, session_id: str) -> None:
        """A label's conversation goes on in this session."""
        key = (client, short_label(label))
        ids = self._labels.setdefault(key, [])
        self._labels.move_to_end(key)
        self.on_use(*key)
        self._uses.add((client, session_id))
        if session_id in ids:
            ids.remove(session_id)
            self._uses.drop((client, session_id))
        ids.append(session_id)
        while len(ids) > SESSIONS_PER_LABEL:
            self._uses.drop((client, ids.pop(0)))
        while len(self._labels) > LABELS_MAX:
            (other, _), old = self._labels.popitem(last=False)
            for each in old:
                self._uses.drop((other, each))


def short_label(label: str) -> str:
    """A label of bounded length, whatever a client sends."""
    return blake2b(label.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
