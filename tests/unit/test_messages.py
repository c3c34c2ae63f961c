"""Messages: what derives from their fields, and does not travel."""

from array import array

from roost.messages import Finished, PromptLogprobs, SpecStats, TokenLogprob, TokenLogprobs, Usage
from roost.sched.counters import SpecCounters
from roost.server.wire_format import pack, unpack


def test_the_accept_length_counts_the_bonus_of_every_round() -> None:
    assert SpecStats().accept_length == 0.0
    assert SpecStats(rounds=4, drafts_offered=12, drafts_accepted=6).accept_length == 2.5


def test_the_accept_length_is_derived_on_both_sides_of_the_wire() -> None:
    stats = SpecStats(
        rounds=2, drafts_offered=6, drafts_accepted=1, lookup_rounds=1, lookup_offered=3, histogram=(1, 1)
    )
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=3)
    event = Finished(request_id="a", reason="length", usage=usage, max_new_tokens=3, spec=stats)
    data = pack([(7, event)])
    assert unpack(data) == [(7, event)] and b"accept_length" not in data
    assert unpack(data)[0][1].spec.accept_length == 1.5


def test_the_share_that_lookup_has_is_one_of_the_accepted_drafts() -> None:
    assert SpecStats().lookup_share == SpecStats(rounds=1, lookup_rounds=1, lookup_offered=3).lookup_share == 0.0
    assert SpecStats(rounds=4, drafts_accepted=5, lookup_rounds=1, lookup_accepted=2).lookup_share == 0.4


def test_counted_rounds_say_which_were_looked_up_beside_a_head() -> None:
    counters = SpecCounters(accept_max=4)
    counters.count_round(3, 2, 2)
    counters.count_round(3, 4, 3, 1, lookup_offered=2, lookup_accepted=2)
    counters.count_round(3, 1, 1, lookup_offered=3)  # all of them wrong
    assert counters.snapshot() == SpecStats(
        rounds=3,
        drafts_offered=9,
        drafts_accepted=4,
        drafts_forced=1,
        overshoot=1,
        lookup_rounds=2,
        lookup_offered=5,
        lookup_accepted=2,
        histogram=(1, 1, 0, 1),
    )


def _logprobs() -> TokenLogprobs:
    logprobs, ids, tops = array("f", [-0.5, -1.5, -2.5]), array("i", range(6)), array("f", range(6))
    return TokenLogprobs(
        num_top_logprobs=2, logprobs=logprobs.tobytes(), top_ids=ids.tobytes(), top_logprobs=tops.tobytes()
    )


def test_logprobs_are_columns_on_the_wire_and_one_by_one_for_who_reads_them() -> None:
    event = PromptLogprobs(request_id="a", start=1, logprobs=_logprobs())
    ((number, came),) = unpack(pack([(3, event)]))
    assert (number, came) == (3, event)
    assert len(came.logprobs) == 3
    assert list(came.logprobs) == [
        TokenLogprob(logprob=-0.5, top_logprobs=((0, 0.0), (1, 1.0))),
        TokenLogprob(logprob=-1.5, top_logprobs=((2, 2.0), (3, 3.0))),
        TokenLogprob(logprob=-2.5, top_logprobs=((4, 4.0), (5, 5.0))),
    ]


def test_the_first_logprobs_are_those_of_the_first_tokens() -> None:
    assert list(_logprobs().first(2)) == list(_logprobs())[:2] and not len(_logprobs().first(0))
    bare = TokenLogprobs(logprobs=array("f", [-1.0, -2.0]).tobytes())
    assert list(bare.first(1)) == [TokenLogprob(logprob=-1.0)]
