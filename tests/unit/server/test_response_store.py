"""The store of responses: found by id and client, bounded by number, size and age, and no session outlives its use."""

import pytest

from roost.errors import RequestError
from roost.server.response_store import ResponseStore, Said, StoredConversation, StoredResponse, page_of
from roost.server.session_uses import SessionUses


class Scene:
    """A store with a clock, and the sessions that it has closed."""

    def __init__(self, *, count: int = 4, size: int = 10_000, age_s: float = 60) -> None:
        self.now = 0.0
        self.closed: list[tuple[str, str]] = []
        self.uses = SessionUses(lambda *session: self.closed.append(session))
        self.store = ResponseStore(
            count_max=count,
            bytes_max=size,
            age_s_max=age_s,
            uses=self.uses,
            now=lambda: self.now,
        )

    def put(
        self, id: str, session: str | None = None, *, client: str = "ann", text: str = "", before: Said | None = None
    ) -> Said:
        """Store a response; returns what was said with it."""
        item = {"id": f"msg_{id}", "type": "message", "content": text}
        said = Said(before=before, items=(item,))
        response = {"id": id, "status": "completed"}
        self.store.put(
            StoredResponse(id=id, client=client, response=response, input_items=[], said=said, session_id=session)
        )
        return said

    def has(self, id: str, client: str = "ann") -> bool:
        """Whether a client finds it."""
        try:
            return self.store.response(id, client).id == id
        except RequestError as error:
            assert error.status == 404
            return False


def test_another_clients_response_does_not_exist() -> None:
    scene = Scene()
    scene.put("a")
    assert scene.has("a") and not scene.has("a", "bob") and not scene.has("b")


def test_the_oldest_go_first_by_number_size_and_age() -> None:
    scene = Scene(count=2)
    for id in "abc":
        scene.put(id)
    assert [scene.has(id) for id in "abc"] == [False, True, True]
    scene = Scene(size=1000)
    scene.put("a", text="x" * 600)
    scene.put("b", text="x" * 600)
    assert [scene.has(id) for id in "ab"] == [False, True]
    scene.now = 61
    assert not scene.has("b")


def test_a_session_is_closed_with_the_last_response_that_lies_in_it() -> None:
    scene = Scene()
    scene.put("a", "s")
    scene.put("b", "s")
    scene.put("c", "in use")
    scene.uses.add(("ann", "in use"))  # a turn runs in it
    scene.store.delete(scene.store.response("a", "ann"))
    assert scene.closed == []
    scene.store.delete(scene.store.response("c", "ann"))
    scene.store.delete(scene.store.response("b", "ann"))
    assert scene.closed == [("ann", "s")]


def test_what_is_stored_again_with_its_session_counts_once() -> None:
    scene = Scene()
    scene.put("a")
    scene.put("a", "s")
    scene.put("a", "s")
    scene.store.clear()
    assert scene.closed == [("ann", "s")]


def test_a_session_that_a_conversation_has_left_is_closed() -> None:
    scene = Scene()
    conversation = StoredConversation(id="c", client="ann", created_at=0)
    for session in ("s", "s", "t"):
        conversation.session_id = session
        scene.store.put(conversation)
    assert scene.closed == [("ann", "s")]


def test_whoever_has_most_makes_room() -> None:
    scene = Scene(count=3)
    scene.put("a")
    for id in "xyz":
        scene.put(id, client="bob")
    assert scene.has("a") and [scene.has(id, "bob") for id in "xyz"] == [False, True, True]
    scene = Scene(size=2000)
    scene.put("a", text="x" * 500)
    for id in "xyz":
        scene.put(id, client="bob", text="x" * 800)
    assert scene.has("a") and [scene.has(id, "bob") for id in "xyz"] == [False, False, True]


def test_what_was_said_before_counts_once_for_as_long_as_somebody_holds_it() -> None:
    scene = Scene(count=100, size=2500)
    first = scene.put("a", text="x" * 1000)
    for id in "bcd":
        scene.put(id, before=first)
    assert all(scene.has(id) for id in "abcd")
    scene.store.delete(scene.store.response("a", "ann"))
    scene.put("e", text="x" * 1600)  # the text of the one that is gone is still there
    assert not scene.has("b") and scene.has("e")
    scene.store.clear()
    scene.put("f", text="x" * 2300)
    assert scene.has("f")


def test_what_could_not_be_stored_even_alone_is_refused() -> None:
    scene = Scene(size=100)
    scene.store.check_size([{"id": "x" * 80}], "items")
    with pytest.raises(RequestError, match="items"):
        scene.store.check_size([{"id": "x" * 100}], "items")


def test_a_conversation_is_no_response() -> None:
    scene = Scene()
    scene.store.put(StoredConversation(id="c", client="ann", created_at=0))
    assert scene.store.conversation("c", "ann").shown["object"] == "conversation"
    with pytest.raises(RequestError, match="no response"):
        scene.store.response("c", "ann")
    with pytest.raises(RequestError, match="no conversation"):
        scene.store.conversation("c", "bob")


def test_what_was_said_is_shared_with_what_follows() -> None:
    first = Said(items=({"id": "1"}, {"id": "2"}))
    second = Said(before=first, items=({"id": "3"},))
    assert [item["id"] for item in second.all_items()] == ["1", "2", "3"]


def test_lists_come_in_pages_in_either_order() -> None:
    items = [{"id": str(number)} for number in range(5)]
    page = page_of(items, after=None, limit=2, order="asc")
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("0", "1", True)
    page = page_of(items, after="1", limit=3, order="desc")
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (["0"], False)
    with pytest.raises(RequestError, match="after"):
        page_of(items, after="x", limit=2, order="asc")
