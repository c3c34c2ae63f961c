"""Planted bugs of grammars: matchers that are not where their outputs are, masks of other nodes."""

from tests.planted.bug import Bug

_ROWS, _COMPILER, _CONSTRAINT = "roost.grammar.rows", "roost.grammar.compiler", "roost.runner.constraint"
_PARITY = "tests/parity/test_grammar.py::"
_REFERENCE = _PARITY + "test_outputs_are_the_references_with_any_drafts_and_preemptions"

GRAMMAR_BUGS = (
    Bug(
        "grammar_begins_anew",
        _ROWS,
        "        self._rows.pop(setup.row, None)",
        "        None",
        "a row keeps the grammar of whoever was there before",
    ),
    Bug(
        "grammar_sees_the_output",
        _ROWS,
        "            row.go_on(setup.tokens[setup.prompt_len :].tolist())",
        "            row.go_on([])",
        "a request that was preempted begins its grammar again in the middle of its output",
    ),
    Bug(
        "grammar_sees_the_output_alone",
        _ROWS,
        "            row.go_on(setup.tokens[setup.prompt_len :].tolist())",
        "            row.go_on(setup.tokens.tolist())",
        "a prompt has to match, too",
    ),
    Bug(
        "grammar_catches_up",
        _ROWS,
        "        self.catch_up()  # masks would be a step late",
        "        pass",
        "masks are one step late",
    ),
    Bug(
        "grammar_follows_its_own_row",
        _ROWS,
        "        self._last_step = _Step([self._rows[row] for row in rows], accepted)",
        "        self._last_step = _Step([self._rows[row] for row in sorted(rows)], accepted)",
        "matchers go on by other rows' tokens",
    ),
    Bug(
        "grammar_drafts_are_taken_back",
        _ROWS,
        "        matcher.rollback(num_consumed)",
        "        matcher.rollback(num_consumed // 2)",
        "drafts that were looked at count as output",
    ),
    Bug(
        "grammar_forced_drafts_fit",
        _ROWS,
        "        return self._matcher(row).forced()[:num_tokens]",
        "        return self._matcher(row).forced()",
        "forced drafts go on past the end of a round",
    ),
    Bug(
        "grammar_forces_what_it_must",
        _ROWS,
        "            forced = forced or matcher.forced()",
        "            forced = forced or (matcher.forced() if place else [])",
        "the first draft is not forced",
    ),
    Bug(
        "grammar_mask_of_its_node",
        _ROWS,
        "            mask: Mask = masks[node]",
        "            mask: Mask = masks[parents[node]]",
        "a node has the mask of another",
    ),
    Bug(
        "grammar_siblings_begin_alike",
        _ROWS,
        "                    matcher.rollback(1)",
        "                    matcher.rollback(0)",
        "a node's mask depends on its siblings, and the next step on rejected drafts",
    ),
    # --- on a device ---
    Bug(
        "grammar_accepted_tokens_alone",
        _CONSTRAINT,
        "            return [row[2 : 2 + row[0]].tolist() for row in result[self._at]]",
        "            return [row[2:].tolist() for row in result[self._at]]",
        "a matcher goes on by what was not accepted",
        test=_REFERENCE,
    ),
    Bug(
        "grammar_masks_its_nodes",
        _CONSTRAINT,
        "            nodes += range(self._first_nodes[i], self._first_nodes[i] + number)",
        "            nodes += range(first, first + number)",
        "masks are applied to other rows",
        test=_REFERENCE,
    ),
    Bug(
        "grammar_errors_are_its_own",
        _CONSTRAINT,
        "                self.errors[int(self._at[i])] = GRAMMAR_FAULT + error",
        "                self.errors[i] = GRAMMAR_FAULT + error",
        "another request ends with the error of a grammar",
        test=_PARITY + "test_a_grammar_that_cannot_go_on_ends_its_own_request_alone",
    ),
    Bug(
        "grammar_leaves_logprobs",
        "roost.runner.runner",
        "            logits = logits.clone() if plan.num_top_logprobs.max() >= 0 else logits",
        "            logits = logits",
        "log-probabilities are of masked logits",
        test=_PARITY + "test_logprobs_are_the_models_own_whatever_a_grammar_forbids",
    ),
    Bug(
        "grammar_trees_keep_their_chain",
        "roost.drafters.tree",
        "    parents[number, end:] = 0",
        "    parents[number, end:] = 1",
        "what was drafted hangs on a forced token, and may be accepted there",
        test="tests/unit/drafters/test_tree.py::test_a_forced_chain_comes_first_and_the_rest_hangs_on_the_root",
    ),
)
