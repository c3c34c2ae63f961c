"""Sessions of SGLang's that do not stream, edited as its clients edit them: cut, replaced, branched, ended on the way.

What the model is given must be the very tokens that were meant; the logprobs of a prompt tell which they were.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.test_native import LONG, ids_of
from tests.server.test_native_sessions import opened
from tests.server.test_sessions import error
from tests.support.server_process import Server, Stream

CHUNKS = (
    *("Let me tell you something about France.", "The capital of France is"),
    *("The population of the city is", "A brief history about that city is"),
)
AS_IS = {"temperature": 0, "no_stop_trim": True, "skip_special_tokens": False}


@pytest.fixture
def branched(rested: Server) -> Iterator["Talk"]:
    """A session that does not stream, closed in the end."""
    talk = Talk(rested, opened(rested))
    yield talk
    assert rested.post("/close_session", {"session_id": talk.name}).status_code == 200


class Talk:
    """One such session."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name

    def body(self, new: list[int], num_new: int = 3, **edits: Any) -> dict[str, Any]:
        """A request of the session."""
        params = {"id": self.name, "rid": None, "offset": 0, "replace": False, **edits}
        return {"input_ids": new, "session_params": params, "sampling_params": {**AS_IS, "max_new_tokens": num_new}}

    def ask(self, new: list[int], num_new: int = 3, **edits: Any) -> tuple[str, list[int], list[int]]:
        """Its name, the tokens of its whole prompt, and its output."""
        scored = {"return_logprob": True, "logprob_start_len": 0}
        answer = self.server.generate(self.body(new, num_new, **edits) | scored)
        return answer["meta_info"]["id"], prompt_of(answer), answer["output_ids"]

    def refused(self, new: list[int], **edits: Any) -> tuple[int, str]:
        """Status and parameter of its refusal."""
        return error(self.server.post("/generate", self.body(new, **edits)))


def prompt_of(answer: dict[str, Any]) -> list[int]:
    """The tokens of a prompt, as far as they were scored."""
    return [token for _, token, _ in answer["meta_info"]["input_token_logprobs"]]


def test_sglangs_own_walk_with_offset_and_replace(branched: Talk) -> None:
    chunks = [ids_of(branched.server, text) for text in CHUNKS]
    rid, start, rids = None, 0, []
    tokens: list[int] = []
    for number, chunk in enumerate(chunks):
        num_new = 3 if number else 1
        scored = {"return_logprob": True, "logprob_start_len": start - 1}
        body = branched.body(chunk, num_new, rid=rid, offset=-1, replace=True) | scored
        answer = branched.server.generate(body)
        tokens = [*tokens[:-1], *chunk]
        assert answer["meta_info"]["prompt_tokens"] == len(tokens), "the last token was cut, the new ones follow"
        assert start == 0 or prompt_of(answer) == tokens[start - 1 :]
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
        tokens += answer["output_ids"]
        rid = answer["meta_info"]["id"]
        rids.append(rid)
        start += len(chunk) + num_new
    edits = {"rid": rid, "offset": -1, "replace": True}
    too_far = branched.body(chunks[3], **edits) | {"return_logprob": True, "logprob_start_len": start + 100}
    assert error(branched.server.post("/generate", too_far)) == (400, "logprob_start_len")
    _, prompt, _ = branched.ask(chunks[3], rid=rids[0], offset=-1, replace=True)
    assert prompt == [*chunks[0], *chunks[3]]
    assert branched.refused(chunks[3], **edits) == (400, "session_params.rid"), "it was replaced, with all before it"
    assert branched.refused(chunks[3], rid=rids[1]) == (400, "session_params.rid")
    assert branched.ask(chunks[3], rid=rids[0]), "what was gone back to is still there"


def test_an_offset_keeps_so_many_tokens_and_an_output_can_be_dropped(branched: Talk) -> None:
    first, second = (ids_of(branched.server, text) for text in CHUNKS[:2])
    rid, _, output = branched.ask(first, rid="")
    said = [*first, *output]
    for edits, before in (
        ({"offset": 3}, said[:3]),
        ({"offset": -2}, said[:-2]),
        ({"offset": 10_000}, said),
        ({"offset": None}, said),
        ({"drop_previous_output": True}, first),
        ({"drop_previous_output": True, "offset": -1}, first[:-1]),
    ):
        _, prompt, _ = branched.ask([1, *second], rid=rid, **edits)
        assert prompt == [*before, *second], edits


def test_beginning_anew_with_replace_forgets_everything(branched: Talk) -> None:
    first, second = (ids_of(branched.server, text) for text in CHUNKS[:2])
    old, _, _ = branched.ask(first)
    child, _, _ = branched.ask(second, rid=old)
    assert branched.refused([10**9], replace=True)[0] == 400
    assert branched.ask(second, rid=child), "one that is refused replaces nothing"
    new, _, _ = branched.ask(first, replace=True)
    for name in (old, child):
        assert branched.refused(second, rid=name) == (400, "session_params.rid")
    assert branched.ask(second, rid=new)


def test_replacing_a_request_that_runs_ends_it_and_goes_on_from_what_it_has_said(branched: Talk) -> None:
    first, second = (ids_of(branched.server, text) for text in CHUNKS[:2])
    body = branched.body(first) | {"stream": True, "rid": "long", "sampling_params": {**AS_IS, **LONG}}
    running = Stream(branched.server, "/generate", body)
    said: list[int] = []
    while len(said) < 12:
        said = running.next()["output_ids"]
    offset = len(first) + 10
    assert branched.refused(second, rid="long", offset=offset) == (400, "session_params.rid"), "it has not ended"
    _, prompt, _ = branched.ask(second, rid="long", offset=offset, replace=True)
    assert running.rest()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert prompt == [*first, *said[:10], *second]
    _, again, _ = branched.ask(second, rid="long", offset=offset)
    assert again == prompt, "what it had said stays"
