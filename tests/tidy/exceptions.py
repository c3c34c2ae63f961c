"""What may break a size limit, for now. The list may only shrink: lower LENGTH_MAX with every entry removed."""

EXCEPTIONS: frozenset[str] = frozenset()
LENGTH_MAX = 0
