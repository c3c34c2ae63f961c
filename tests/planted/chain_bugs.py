"""Planted bugs of rounds that are chains, whose index arithmetic on a CPU is in `layers.host_rounds`."""

from tests.planted.bug import Bug

_ROUNDS = "roost.layers.host_rounds"
_LENGTHS = "tests/parity/test_spec_lengths.py::"
_COUNTS = _LENGTHS + "test_09_lengths_are_taken_from_the_device_exactly_when_a_step_speculates"
_REWINDS = _LENGTHS + "test_14_rounds_that_stop_at_any_offset_in_a_page_rewind_the_draft[chain]"

CHAIN_BUGS = (
    Bug(
        "chain_of_a_reduced_vocabulary",
        "roost.drafters.eagle",
        "        return self._head.token_ids(self._ops.argmax(logits)) if is_plain else logits",
        "        return self._ops.argmax(logits) if is_plain else logits",
        "30: a head's own ids are taken for the target's",
        test="tests/parity/test_drafting.py::test_draft_logits_of_every_branch_and_step_equal_dense_ones[eagle3-chain-4-9]",
    ),
    Bug(
        "chain_extends_by_what_was_drawn",
        "roost.forward.passes",
        "                    tokens=settled.pair_tokens,",
        "                    tokens=settled.pair_tokens * 0,",
        "the drafter takes over no token of what was drawn",
        test=_REWINDS,
    ),
    Bug(
        "chain_extends_by_successors",
        "roost.forward.passes",
        "                    tokens=settled.pair_tokens,",
        "                    tokens=inputs.tokens.flatten(),",
        "each position of a chain is taken over with its own token, not with the one after it",
        test="tests/parity/test_drafting.py::test_the_target_as_its_own_drafter_is_right_in_every_round",
    ),
    Bug(
        "chain_goes_on_from_its_root",
        _ROUNDS,
        "        last_pairs.append(number * width + num_kept - 1)",
        "        last_pairs.append(number * width)",
        "the next drafts go on from the root of the last round",
        test=_REWINDS,
    ),
    Bug(
        "chain_has_its_bonus_as_root",
        _ROUNDS,
        "        lengths[row], last_tokens[row] = end, found[num_kept - 1]",
        "        lengths[row], last_tokens[row] = end, found[0]",
        "1: the next round starts from the round's first token, not from its bonus",
        test=_COUNTS,
    ),
    Bug(
        "chain_advances_by_what_it_accepts",
        _ROUNDS,
        "        lengths[row], last_tokens[row] = end, found[num_kept - 1]",
        "        lengths[row], last_tokens[row] = start + 1, found[num_kept - 1]",
        "9: the row's length on the device grows by one, whatever was accepted",
        test=_COUNTS,
    ),
    Bug(
        "chain_tells_what_it_accepts",
        _ROUNDS,
        "        result += [num_kept, end, *kept, *[NOTHING] * num_void]",
        "        result += [1, end, *found]",
        "9: the host is told of fewer tokens than the device has moved on by",
        test=_COUNTS,
    ),
    Bug(
        "chain_of_padding_starts_anew",
        "roost.layers.rounds",
        "    ends = (inputs.starts + lens).masked_fill(rows == padding_row, 0)",
        "    ends = inputs.starts + lens",
        "the row that pads graphs of rounds gets longer with every replay, until it is longer than a row",
        test="tests/parity/test_graphs.py::test_padding_starts_anew_in_every_replay[plain]",
    ),
)
