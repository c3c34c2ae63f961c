"""Words that the project no longer uses, and classes that may share a name, each with a reason.

Whoever renames something adds the word that is gone; the tests then keep it from coming back. The list of shared names
may only shrink.
"""

# Retired word -> what to write instead. Whole words, also as parts of snake_case names, in any case.
RETIRED: dict[str, str] = {
    "aside": "offload: work on threads beside the event loop",
    "entrance": "listeners: the bound sockets",
    "foreign": "unsupported fields, no-op values, other servers",
    "harmless": "no-op",
    "lobby": "probe slots",
    "stopwatch": "latency timer",
}

# Class name, without leading underscores -> why several modules define it.
SHARED_NAMES: dict[str, str] = {
    "Answers": "to be renamed: the forms of answers of two endpoints, in server/native.py and server/sessions.py",
    "Branches": "to be renamed: of draft trees in spec_shape.py, of SGLang's sessions in server/turns.py",
    "Line": "to be renamed: a row of a plan in sched/planner.py, a client of the engine in library/engine_thread.py",
    "Output": "to be renamed: of the library and of the server, two forms of one thing",
    "Session": "the library's handle, and the session itself in session/table.py",
    "Tree": "to be renamed: the prefix tree in kv/radix.py, a draft tree in layers/attention.py",
    "Turn": "to be renamed: of a session in session/table.py, of a client in server/turns.py, library/session.py",
}
