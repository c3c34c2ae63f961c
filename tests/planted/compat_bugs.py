"""Planted bugs in what clients of other servers rely on."""

from tests.planted.bug import Bug

_REPLACED = (
    "tests/unit/server/test_request_history.py::"
    "test_a_request_that_replaces_forgets_all_that_continued_the_same_request"
)

FOREIGN_BUGS = (
    Bug(
        "unsupported_value_counts",
        "roost.server.compat",
        "        if value is not None and value not in NO_OP_VALUES.get(name, ()):",
        "        if value is not None and name not in NO_OP_VALUES:",
        "an option that is not done here is ignored, whatever it asks for, if some value of it asks for nothing",
        "tests/unit/server/test_compat.py"
        "::test_a_foreign_field_that_asks_for_nothing_is_accepted_and_any_other_refused[ChatBody]",
    ),
    Bug(
        "replaced_is_forgotten",
        "roost.server.request_history",
        "            self._history.drop_after(self.parent, self.number)",
        "            self._history.drop_after(self.number, self.number)",
        "requests that another replaced can still be continued",
        _REPLACED,
    ),
    Bug(
        "refused_replaces_nothing",
        "roost.server.request_history",
        "        if self._replaces and not isinstance(event, Refused):",
        "        if self._replaces:",
        "a request that is refused takes others of its session with it",
        _REPLACED,
    ),
)
