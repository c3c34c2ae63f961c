"""Words that the project no longer uses, and classes that may share a name, each with a reason.

Whoever renames something adds the word that is gone; the tests then keep it from coming back. The list of shared names
may only shrink.
"""

# Retired word -> what to write instead. Whole words, also as parts of snake_case names, in any case.
RETIRED: dict[str, str] = {
    "aside": "offload: work on threads beside the event loop",
    "desk": "server state",
    "entrance": "listeners: the bound sockets",
    "foreign": "unsupported fields, no-op values, other servers",
    "harmless": "no-op",
    "lobby": "probe slots",
    "stopwatch": "latency timer",
    "turning": "rotary: qk, rotate, cos and sin",
}

# Class name, without leading underscores -> why several modules define it.
SHARED_NAMES: dict[str, str] = {
    "Session": "the library's handle, and the session itself in session/table.py",
}
