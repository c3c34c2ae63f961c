"""Planted bugs in what clients of other servers rely on."""

from tests.planted.bug import Bug

_REPLACED = (
    "tests/unit/server/test_turns.py::test_a_request_that_replaces_forgets_all_that_went_on_from_where_it_goes_on"
)

FOREIGN_BUGS = (
    Bug(
        "foreign_value_counts",
        "roost.server.compat",
        "        if value is not None and value not in NO_OP_VALUES.get(name, ()):",
        "        if value is not None and name not in NO_OP_VALUES:",
        "an option that is not done here is ignored, whatever it asks for, if some value of it asks for nothing",
        "tests/unit/server/test_compat.py"
        "::test_a_foreign_field_that_asks_for_nothing_is_accepted_and_any_other_refused[ChatBody]",
    ),
    Bug(
        "replaced_is_forgotten",
        "roost.server.turns",
        "            self._branches.drop_after(self.parent, self.number)",
        "            self._branches.drop_after(self.number, self.number)",
        "requests that another replaced can still be gone on from",
        _REPLACED,
    ),
    Bug(
        "refused_replaces_nothing",
        "roost.server.turns",
        "        if self._replaces and not isinstance(event, Refused):",
        "        if self._replaces:",
        "a request that is refused takes others of its session with it",
        _REPLACED,
    ),
)
