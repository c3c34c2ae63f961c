"""Wanted: what an HTTP request says about the replica it needs, without reading more of it than that takes.

Finds the sessions, stored responses, conversations and labels that a path, headers and a body name, and hashes the
beginning of its prompt. What is malformed names nothing: the replica that gets it refuses it. Called by the ingress.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from roost.router.placement import BLOCK_LEN, PROMPT_BLOCKS_MAX, Key, Wanted, blocks_of, key_of
from roost.server.conversations import LABEL_HEADERS
from roost.server.labels import short_label

SESSION, STORED, LABEL = "session", "stored", "label"  # kinds of keys
_PATH = re.compile(r"/v1/(sessions|responses|conversations)/([^/]+)(?:/.*)?")
_NO_IDS = ("/v1/responses/input_tokens",)
OPENING = ("/v1/sessions", "/open_session")  # what a body names there is to be
_NOTHING = msgspec.Raw()


class Naming(msgspec.Struct):
    """The fields of all bodies that name something, or begin a prompt."""

    id: Any = None
    session_id: Any = None
    session_params: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    tools: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    input_ids: msgspec.Raw = _NOTHING

    @property
    def prompt_text(self) -> bytes:
        """The prompt's beginning, as JSON in the order of a chat template."""
        parts = (self.tools, self.system, self.instructions, self.messages, self.input, self.prompt, self.text)
        most, text = BLOCK_LEN * PROMPT_BLOCKS_MAX, b""
        for part in (*parts, self.input_ids):
            text += bytes(memoryview(part)[: most - len(text)])
        return text


_decoder = msgspec.json.Decoder(Naming)


def wanted_of(path: str, headers: Mapping[str, str], body: bytes, client: str) -> Wanted:
    """What a request of a client wants."""
    keys = []
    if (found := _PATH.fullmatch(path)) and path not in _NO_IDS:
        keys.append(key_of(SESSION if found[1] == "sessions" else STORED, client, found[2]))
    naming = _naming(body)
    if path == OPENING[0]:
        naming.session_id = naming.id
    keys += _keys(naming, client)
    user_id = naming.metadata.get("user_id") if isinstance(naming.metadata, dict) else None
    given = (naming.prompt_cache_key, user_id, *(headers.get(name) for name in LABEL_HEADERS))
    label = next((name for name in given if isinstance(name, str) and name), None)
    labels = () if label is None else (label_key(client, short_label(label)),)
    return Wanted(keys=tuple(keys), labels=labels, blocks=blocks_of(naming.prompt_text))


def named_by_message(message: bytes, client: str) -> Wanted:
    """What a message on a WebSocket names."""
    return Wanted(keys=tuple(_keys(_naming(message), client)))


def label_key(client: str, short: str) -> Key:
    """The key of a label, given in short."""
    return key_of(LABEL, client, short)


def _keys(naming: Naming, client: str) -> list[Key]:
    params = naming.session_params.get("id") if isinstance(naming.session_params, dict) else None
    conversation = naming.conversation.get("id") if isinstance(naming.conversation, dict) else naming.conversation
    named = [(SESSION, naming.session_id), (SESSION, params), (STORED, naming.previous_response_id)]
    named.append((STORED, conversation))
    return [key_of(kind, client, name) for kind, name in named if isinstance(name, str) and name]


def _naming(body: bytes) -> Naming:
    try:
        return _decoder.decode(body) if body else Naming()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Naming()
