"""Turn notes: what a turn's sender has the journal keep, so that whoever comes later can go on with chat messages.

The engine has a session's tokens; a note has the messages that they were rendered from. From the notes of all turns the
transcript is made again. Called by the server, which sends the notes with turns and asks for the history of sessions
that it has not seen.
"""

import json
from collections.abc import Sequence
from typing import Any

from roost.front.session import ClientSession
from roost.messages import PastTurn, SessionHistory
from roost.text.continuation import Transcript
from roost.text.language import EscapedMessage, Language


def note_of(
    start: int, messages: Sequence[EscapedMessage] | None, tools: Sequence[dict[str, Any]], *, generates: bool
) -> str:
    """The note of a turn after so many tokens; `messages`: None for plain input."""
    said = {"start": start, "messages": messages, "tools": tools, "generates": generates}
    return json.dumps(said, separators=(",", ":"))


def session_of(session_id: str, history: SessionHistory, language: Language) -> ClientSession:
    """A session as its client would know it, had it sent all its turns."""
    transcript = Transcript()
    for turn in history.turns:
        transcript = _after(transcript, turn, language)
    transcript = transcript.cut(history.length, transcript.num_turns)
    return ClientSession(session_id, transcript, [turn.usage for turn in history.turns])


def _after(transcript: Transcript, turn: PastTurn, language: Language) -> Transcript:
    said = json.loads(turn.note) if turn.note else {}
    output = [turn.last_token] if turn.usage.completion_tokens else []
    # one that begins elsewhere than the last one ended follows a cut inside of a turn
    return transcript.cut(said.get("start", transcript.length), transcript.num_turns).add(
        language,
        length=turn.end_len,
        messages=said.get("messages"),
        output=output if said.get("generates", True) else None,
        tools=said.get("tools", ()),
    )
