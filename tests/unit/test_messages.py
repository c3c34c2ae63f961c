"""Messages: what derives from their fields, and does not travel."""

from roost.messages import Finished, SpecStats, Usage
from roost.server.wire import pack, unpack


def test_the_accept_length_counts_the_bonus_of_every_round() -> None:
    assert SpecStats().accept_length == 0.0
    assert SpecStats(rounds=4, drafts_offered=12, drafts_accepted=6).accept_length == 2.5


def test_the_accept_length_is_derived_on_both_sides_of_the_wire() -> None:
    stats = SpecStats(rounds=2, drafts_offered=6, drafts_accepted=1, histogram=(1, 1))
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=3)
    event = Finished(request_id="a", reason="length", usage=usage, max_new_tokens=3, spec=stats)
    data = pack([(7, event)])
    assert unpack(data) == [(7, event)] and b"accept_length" not in data
    assert unpack(data)[0][1].spec.accept_length == 1.5
