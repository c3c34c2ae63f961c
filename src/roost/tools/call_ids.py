"""Call ids: names of tool calls, by which a result finds its call.

Called by the machine for each call of an output, and for histories whose template takes ids of one length only.
"""

import hashlib
from collections.abc import Callable

_PREFIX = "call_"
_RANDOM_BYTES = 12
_HEX_LEN = 9  # what Mistral's templates ask for


def new_call_id(random_bytes: Callable[[int], bytes]) -> str:
    """An id that nobody has used; `random_bytes` gives as many as it is asked for, as `os.urandom` does."""
    return _PREFIX + random_bytes(_RANDOM_BYTES).hex()


def short_call_id(id: str) -> str:
    """Nine letters and digits that stand for an id in a prompt: the same for a call and for its result."""
    is_short = len(id) == _HEX_LEN and id.isascii() and id.isalnum()
    return id if is_short else hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:_HEX_LEN]
