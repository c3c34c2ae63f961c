"""Witness executor: a mock device whose output shows every wrong KV slot.

Target slots hold layer values, draft slots hold (token, next token, position). All are reached through the block tables
that the plans' deltas built. Touching a position that the plan does not name raises, as does a state of a recurrent
layer that is not that of its position; so does a row that samples before it was set up, or whose penalties or n-grams
would see other tokens than its own. Log-probabilities depend on the slots read and on the token. Steps run as late as
stream order allows, or at once, as the seed says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from roost.config.resolved import Resolved
from roost.errors import StepFailure
from roost.grammar.matcher import num_words
from roost.grammar.rows import GrammarRows
from roost.kv.pages import NULL_PAGE, PageId
from roost.spec_shape import MATCH_MAX, DraftKv
from roost.step import (
    SAMPLED,
    Ints,
    LogprobColumns,
    LookupColumns,
    RowSetup,
    StepId,
    StepPlan,
    StepResult,
    Ticket,
)
from tests.sim.automaton import Automaton, choose_masked
from tests.sim.drafting import DraftedRound, Drafting, look_up
from tests.sim.model import Model, Sequence, mix, states_of, visible

Slots = NDArray[np.int64]
States = NDArray[np.uint64]  # [num_pages, 2]: position, state
Scored = list[tuple[int, int]]  # (state, token after it)
Values = tuple[int, int, int]  # of one token: layer 1, layer 2, the state after it


class Touched(AssertionError):
    """The device was told to touch a position that the plan does not name."""


def _no_states(resolved: Resolved) -> States:
    """States that nobody has written, but for the null page, which is that of no tokens."""
    states = np.full((1 if resolved.states is None else resolved.states.num_pages, 2), 0xDEAD, dtype=np.uint64)
    states[NULL_PAGE] = 0
    return states


def drafts_of(plan: StepPlan) -> list[int]:
    """Per row, how many drafts a head makes for its round: none for a chunk and for a round of one node."""
    rows = zip(plan.is_prefill.tolist(), plan.query_lens.tolist(), strict=True)
    return [0 if is_prefill else plan.shape.head_steps_of(width) for is_prefill, width in rows]


def states_named(plan: StepPlan, index: int) -> list[PageId]:
    """Pages of states that a row of a step reads or writes; none if the model has no recurrent layers."""
    if plan.states is None:
        return []
    return [PageId(page) for page in (int(plan.states.sources[index]), *plan.states.kept_in[index].tolist())]


class Row:
    """One row of one step: positions to slots, checked."""

    def __init__(self, witness: "Witness", plan: StepPlan, index: int) -> None:
        self._witness, self._plan, self._index = witness, plan, index
        self.row = int(plan.rows[index])

    def slots(self, book: int, first: int, last: int) -> Slots:
        """Slots of positions [first, last) in a book."""
        held_from, held_to = int(self._plan.firsts[book, self._index]), int(self._plan.ends[book, self._index])
        if first < last and not held_from <= first < last <= held_to:
            raise Touched(
                f"step {self._plan.step} row {self.row} book {book}: "
                f"[{first}, {last}) is not in [{held_from}, {held_to})"
            )
        size = self._witness.page_size
        positions = np.arange(first, last)
        pages = self._witness.tables[book][self.row, positions // size]
        if (pages == 0).any():
            raise Touched(f"step {self._plan.step} row {self.row} book {book}: [{first}, {last}) meets the null page")
        return pages * size + positions % size

    def has_no_page(self, book: int, position: int) -> bool:
        """Whether a position lies on the null page."""
        return bool(self._witness.tables[book][self.row, position // self._witness.page_size] == NULL_PAGE)

    def slot(self, book: int, position: int) -> int:
        """The slot of one position."""
        return int(self.slots(book, position, position + 1)[0])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row of a step did."""

    accepted: Scored
    prompt: Scored  # the prompt's own tokens that were to be scored
    num_forced: int = 0  # accepted drafts that its grammar left no choice about
    drafted: DraftedRound | None = None  # of a round
    found: list[int] = field(default_factory=list)  # what was looked up for it


@dataclass(frozen=True, slots=True)
class Said:
    """What the target makes of a path of drafts."""

    values: list[Values]  # of the root and the drafts
    tokens: list[int]  # accepted, and the bonus


class Witness:
    """The device. `decide(what)` asks the seed: 'early' to run a step at launch, 'fail' to break it.

    Steps that are too large for it break, too.
    """

    def __init__(
        self,
        resolved: Resolved,
        model: Model,
        layer_books: tuple[int, int],
        decide: Callable[[str], bool],
        is_too_large: Callable[[StepPlan], bool] = lambda plan: False,
    ) -> None:
        self.page_size = resolved.page_size
        self.tables = [
            np.zeros((resolved.num_rows, resolved.row_width // resolved.page_size), dtype=np.int64)
            for _ in resolved.books
        ]
        sizes = [book.num_pages * resolved.page_size for book in resolved.books]
        self._model, self._drafting = model, Drafting(resolved)
        self._books = layer_books  # the book of each of the target's two layers
        self._windows = (model.window_1, model.window_2)
        self._values = [np.zeros(sizes[book], dtype=np.uint64) for book in layer_books]
        self._states = _no_states(resolved)
        self._draft = np.full((sizes[0], 3), -1, dtype=np.int64)  # (token, next token, position), in the full book
        self._length = np.zeros(resolved.num_rows, dtype=np.int64)  # relay: device length
        self._root = np.zeros(resolved.num_rows, dtype=np.int64)  # relay: last sampled token
        self._setups: list[RowSetup | None] = [None] * resolved.num_rows
        self._counted: list[list[int]] = [[] for _ in range(resolved.num_rows)]  # what penalties and n-grams see
        self._grammars = GrammarRows(Automaton)
        self._pending: list[StepPlan] = []
        self._results: dict[StepId, StepResult] = {}
        self._decide = decide
        self._is_too_large = is_too_large
        self._broken = False
        self.doomed: set[StepId] = set()  # steps that break, whatever the seed says

    # --- the executor's protocol -------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Ticket:
        """Queue a step; the seed may have it run at once."""
        self._pending.append(plan)
        if self._decide("early"):
            self._run_until(plan.step)
        return Ticket(step=plan.step)

    def collect(self, ticket: Ticket) -> StepResult:
        """Run everything up to a step and return its result."""
        self._run_until(ticket.step)
        result = self._results.pop(ticket.step, None)
        if result is None:
            if not self._pending:
                self._broken = False  # the last of the broken steps has been collected: the device works again
            raise StepFailure(f"step {ticket.step} broke")
        return result

    def _run_until(self, step: StepId) -> None:
        while self._pending and self._pending[0].step <= step:
            plan = self._pending.pop(0)
            self._broken = self._broken or plan.step in self.doomed or self._decide("fail") or self._is_too_large(plan)
            self._apply_deltas(plan)
            for setup in plan.setups:
                self._setups[setup.row] = None if self._broken else setup
                self._counted[setup.row] = setup.tokens.tolist()
                self._grammars.begin(setup)
            if self._broken:
                self._scribble(plan)
            else:
                self._results[plan.step] = self._run(plan)

    # --- one step ----------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> StepResult:
        count = len(plan.rows)
        accept_lens = np.zeros(count, dtype=np.int32)
        tokens = np.full((count, plan.shape.accept_max), -1, dtype=np.int32)
        outcomes = []
        for i in range(count):
            row = Row(self, plan, i)
            outcome = self._prefill(plan, i, row) if plan.is_prefill[i] else self._round(plan, i, row)
            accepted = [token for _, token in outcome.accepted]
            accept_lens[i] = len(accepted)
            tokens[i, : len(accepted)] = accepted
            self._counted[row.row].extend(accepted)
            outcomes.append(outcome)
        sampling = accept_lens > 0
        self._follow(plan.rows[sampling].tolist(), [each.accepted for each in outcomes if each.accepted])
        wants_logprobs = bool((plan.num_top_logprobs[sampling] >= 0).any())
        return StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=accept_lens,
            tokens=tokens,
            lengths=self._length[plan.rows].astype(np.int32),
            # as on a real device: if one row wants logprobs, every row that samples has some
            logprobs=self._logprobs([each.accepted for each in outcomes], plan.num_top_logprobs[sampling])
            if wants_logprobs
            else None,
            prompt_logprobs=self._logprobs([each.prompt for each in outcomes], plan.num_top_logprobs.clip(min=0))
            if (plan.prompt_logprob_starts >= 0).any()
            else None,
            num_forced=np.array([each.num_forced for each in outcomes], dtype=np.int32),
            lookups=self._lookups(plan, outcomes),
        )

    def _lookups(self, plan: StepPlan, outcomes: list[Outcome]) -> LookupColumns | None:
        """What was looked up for the rounds of a step; of a row that looked up nothing, what is best not believed."""
        count, depth = len(outcomes), plan.shape.depth_max
        is_looked_up = [self._drafting.looks_up_for(plan, i) for i in range(count)]
        if not any(is_looked_up):
            return None
        drafted = [each.drafted if own else None for each, own in zip(outcomes, is_looked_up, strict=True)]
        num_nodes = [each.drafted.num_nodes if each.drafted else 0 for each in outcomes]
        return LookupColumns(
            match_lens=np.array([each.match_len if each else MATCH_MAX for each in drafted], dtype=np.int32),
            is_used=np.array([each is None or each.is_used for each in drafted], dtype=np.bool_),
            num_nodes=np.where(plan.is_prefill, plan.query_lens, num_nodes).astype(np.int32),
            drafts=np.array([each.found or [0] * depth for each in outcomes], dtype=np.int32).reshape(count, depth),
        )

    def _follow(self, rows: list[int], accepted: list[Scored]) -> None:
        """Have the matchers of a step's rows go on, when somebody next looks at them."""
        places = self._grammars.places(rows)
        tokens = [[token for _, token in accepted[place]] for place in places]
        self._grammars.follow([rows[place] for place in places], lambda: tokens)

    def _draws(self, row: int, tokens: list[int], states: list[int]) -> list[int]:
        """The target's token after each node of a chain."""
        wanted = [self._model.next_token(state) for state in states]
        if not self._grammars.places([row]):
            return wanted
        masks = np.full((len(tokens), num_words(self._model.vocab)), -1, dtype=np.int32)
        self._grammars.fill(row, tokens, [max(0, node - 1) for node in range(len(tokens))], masks)
        return [choose_masked(token, mask, self._model.vocab) for token, mask in zip(wanted, masks, strict=True)]

    def _logprobs(self, rows: list[Scored], tops: Ints) -> LogprobColumns:
        top, flat = int(tops.max()), [entry for row in rows for entry in row]
        columns = [self._model.top(state, top) for state, _ in flat]
        return LogprobColumns(
            offsets=np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32),
            logprobs=np.array([self._model.logprob(state, token) for state, token in flat], dtype=np.float32),
            top_ids=np.array([[token for token, _ in column] for column in columns], np.int32).reshape(len(flat), top),
            top_logprobs=np.array([[value for _, value in column] for column in columns], np.float32).reshape(
                len(flat), top
            ),
        )

    def _check_setup(self, plan: StepPlan, row: int, state: int) -> None:
        """A row that samples has been set up and, if it counts tokens, has counted all before this one."""
        setup = self._setups[row]
        if setup is None:
            raise Touched(f"step {plan.step} row {row} samples, but was not set up")
        if setup.sampling.penalises or plan.shape.reads_history:
            counted = np.array(self._counted[row], dtype=np.int64)
            if len(counted) == 0 or int(states_of(self._model, counted)[-1]) != state:
                raise Touched(f"step {plan.step} row {row} counts or looks up tokens that are not its own: {counted}")

    def _apply_deltas(self, plan: StepPlan) -> None:
        for table, delta in zip(self.tables, plan.deltas, strict=True):
            for i, row in enumerate(delta.rows):
                pages = delta.pages[delta.offsets[i] : delta.offsets[i + 1]]
                table[row, delta.firsts[i] : delta.firsts[i] + len(pages)] = pages

    def _scribble(self, plan: StepPlan) -> None:
        """A broken step leaves garbage wherever it may have been writing."""
        for i in range(len(plan.rows)):
            first = max(0, int(plan.start_positions[i])) if plan.is_prefill[i] else int(self._length[plan.rows[i]])
            count = int(plan.query_lens[i])
            row = Row(self, plan, i)
            for layer, book in enumerate(self._books):
                last = min(first + count, int(plan.ends[book, i]))
                if first >= int(plan.firsts[book, i]):
                    is_read_again = layer == 1 and plan.states is not None
                    held = [at for at in range(first, last) if not (is_read_again and row.has_no_page(book, at))]
                    self._values[layer][[row.slot(book, at) for at in held]] = 0xDEAD
            if plan.is_prefill[i]:
                self._length[plan.rows[i]] = first + count
            if plan.states is not None:
                self._states[[page for page in plan.states.kept_in[i] if page != NULL_PAGE]] = 0xDEAD

    def _sequence(self, plan: StepPlan, i: int, row: Row, length: int) -> Sequence:
        """What the target sees before position `length`, read from its slots and a recurrent layer's state."""
        firsts, state = [visible(window, length) for window in self._windows], 0
        if plan.states is not None:
            source, firsts[1] = int(plan.states.sources[i]), int(plan.states.starts[i])
            position, state = self._states[source].tolist()
            if position != firsts[1] or not firsts[1] <= length:
                raise Touched(f"step {plan.step} row {row.row}: state {source} is of {position}, not {firsts[1]}")
        values = [
            self._values[layer][row.slots(book, first, length)]
            for layer, (book, first) in enumerate(zip(self._books, firsts, strict=True))
        ]
        return Sequence(self._model, firsts[0], values[0], values[1], state)

    def _keep_states(self, plan: StepPlan, i: int, sequence: Sequence, last: int) -> None:
        """Keep states at the positions that a plan names, past the one that the row starts from."""
        if plan.states is None:
            return
        for position, page in zip(plan.states.kept_at[i].tolist(), plan.states.kept_in[i].tolist(), strict=True):
            if position == -1:
                continue
            if page == NULL_PAGE or not plan.states.starts[i] < position <= last:
                raise Touched(f"step {plan.step}: state {page} at {position}, allowed are positions up to {last}")
            self._states[page] = (position, sequence.state_at(position))

    def _write(self, row: Row, position: int, one: int, two: int, *, may_skip: bool = False) -> None:
        """Write the values of one token; a recurrent layer's may go nowhere if a state is kept behind them."""
        for layer, value in enumerate((one, two)):
            if may_skip and layer == 1 and row.has_no_page(self._books[layer], position):
                continue
            self._values[layer][row.slot(self._books[layer], position)] = value

    def _prefill(self, plan: StepPlan, i: int, row: Row) -> Outcome:
        start, tokens = (
            int(plan.start_positions[i]),
            plan.tokens[plan.token_offsets[i] : plan.token_offsets[i + 1]].tolist(),
        )
        sequence = self._sequence(plan, i, row, start)
        state, states = 0, []
        for offset, token in enumerate(tokens):
            one, two, state = sequence.push(token)
            states.append(state)
            self._write(row, start + offset, one, two, may_skip=plan.states is not None)
        self._keep_states(plan, i, sequence, len(sequence))
        self._length[row.row] = start + len(tokens)
        sampled = self._draws(row.row, tokens[-1:], [state])[0] if plan.is_final[i] else -1
        after = sampled if plan.next_tokens[i] == SAMPLED else int(plan.next_tokens[i])
        self._draft_extend(plan, row, start, [*tokens, after])
        prompt: Scored = []
        if plan.prompt_logprob_starts[i] >= 0:
            scored = range(int(plan.prompt_logprob_starts[i]) - start, int(plan.prompt_logprob_ends[i]) - start)
            if not 0 <= scored.start < scored.stop <= len(tokens):
                raise Touched(f"step {plan.step} row {row.row}: {scored} of a chunk of {len(tokens)} is to be scored")
            prompt = [(states[at], [*tokens, int(plan.next_tokens[i])][at + 1]) for at in scored]
        if not plan.is_final[i]:
            return Outcome([], prompt)
        self._check_setup(plan, row.row, state)
        self._root[row.row] = sampled
        return Outcome([(state, sampled)], prompt)

    def _draft_extend(self, plan: StepPlan, row: Row, start: int, tokens: list[int]) -> None:
        """Draft slots for tokens[:-1] at [start, …): each stands for the token after it."""
        if plan.shape.draft_kv is DraftKv.NONE:
            return
        slots = row.slots(0, start, start + len(tokens) - 1)
        self._draft[slots] = np.stack([tokens[:-1], tokens[1:], np.arange(start, start + len(tokens) - 1)], axis=1)

    # --- a round -----------------------------------------------------------------------------------------------

    def _round(self, plan: StepPlan, i: int, row: Row) -> Outcome:
        """Draft, verify, accept, draft-extend for one row; the bonus is the last accepted token."""
        length, root = int(self._length[row.row]), int(self._root[row.row])
        sequence = self._sequence(plan, i, row, length)
        self._keep_states(plan, i, sequence, length)
        root_values = sequence.push(root)
        state = root_values[2]
        self._check_setup(plan, row.row, state)
        has_grammar = plan.query_lens[i] > 1 and bool(self._grammars.places([row.row]))
        num_drafts = plan.shape.accept_max_of(int(plan.query_lens[i])) - 1
        way = self._grammars.only_way(row.row, num_drafts) if has_grammar else []
        drafted = self._drafting.of(plan, i, self._model.match_len(state), len(way))
        found = look_up(sequence, state, plan.shape.depth_max) if self._drafting.looks_up_for(plan, i) else []
        paths = drafted.paths(self._draft_path(plan, row, sequence, root, state, drafted.num_head), found)
        forced: list[int] = []
        if has_grammar and not drafted.is_tree and paths[0]:
            forced = self._grammars.force(row.row, paths[0])
        elif has_grammar and drafted.is_tree and way:
            paths, forced = [way], list(range(len(way)))  # the rest of the tree hangs on its root
        said = [self._said(row.row, sequence, root, root_values, path) for path in paths]
        best = max(said, key=lambda each: len(each.tokens))
        path, accepted, bonus = paths[said.index(best)], best.tokens[:-1], best.tokens[-1]
        nodes = self._node_order(drafted.num_nodes, state, len(path))
        self._verify(row, length, drafted.num_nodes, dict(zip(nodes, best.values, strict=True)))
        self._move_accepted(row, length, nodes[: len(accepted) + 1])
        self._draft_extend(plan, row, length, [root, *accepted, bonus])
        self._length[row.row] = length + len(accepted) + 1
        self._root[row.row] = bonus
        return Outcome(
            [(value[2], token) for value, token in zip(best.values, best.tokens, strict=False)],
            [],
            sum(place < len(accepted) for place in forced),
            drafted,
            found,
        )

    def _said(self, row: int, sequence: Sequence, root: int, root_values: Values, path: list[int]) -> Said:
        """What the target makes of a path of drafts."""
        length = len(sequence)
        values = [root_values, *(sequence.push(token) for token in path)]
        sequence.cut(length)
        draws = self._draws(row, [root, *path], [state for _, _, state in values])
        accepted = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, draws, strict=False))]
        return Said(values, [*accepted, draws[len(accepted)]])

    def _draft_path(
        self, plan: StepPlan, row: Row, sequence: Sequence, root: int, state: int, num_drafts: int
    ) -> list[int]:
        """The drafter's best path: right at each node if the seed says so and every draft slot it reads is right."""
        shape, whole_len = plan.shape, len(sequence)
        length = whole_len - 1
        branch = mix(state, 7) % shape.topk
        has_kv = shape.draft_kv is not DraftKv.NONE
        path: list[int] = []
        for depth in range(1, num_drafts + 1):
            if has_kv and depth >= 2:
                before, now = (root, *path)[-2:]
                self._write_branches(plan, row, length, depth - 2, branch, (before, now))
            right = self._model.draft_knows(state)
            if has_kv:
                right = right and self._draft_agrees(plan, row, length, branch, depth, state)
            path.append(self._model.next_token(state) if right else self._model.wrong_token(state, depth))
            state = sequence.push(path[-1])[2]
        sequence.cut(whole_len)
        return path

    def _write_branches(
        self, plan: StepPlan, row: Row, length: int, step: int, true_branch: int, pair: tuple[int, int]
    ) -> None:
        """A draft step of all branches: the others' slots must belong to this row, and to no branch but their own."""
        for branch in range(plan.shape.topk):
            slot = row.slot(0, plan.shape.branch_position(length, branch, step))
            self._draft[slot] = (*(pair if branch == true_branch else (-7, -7)), length + step)

    def _draft_agrees(self, plan: StepPlan, row: Row, length: int, branch: int, depth: int, state: int) -> bool:
        """Whether the draft slots read at this depth agree with the target's tokens."""
        first = plan.shape.branch_position(length, branch, 0)
        slots = np.concatenate([row.slots(0, 0, length), row.slots(0, first, first + depth - 1)])
        tokens, nexts, positions = self._draft[slots].T
        if (positions != np.arange(length + depth - 1)).any() or (nexts[:-1] != tokens[1:]).any():
            return False
        return int(states_of(self._model, np.append(tokens, nexts[-1]))[-1]) == state

    def _node_order(self, width: int, state: int, path_len: int) -> list[int]:
        """Node numbers of the root and the path among the round's nodes: parents first, others in between."""
        chosen = [0]
        spare = width - 1 - path_len
        for depth in range(path_len):
            skip = mix(state, 11 + depth) % (spare + 1)
            spare -= skip
            chosen.append(chosen[-1] + 1 + skip)
        return chosen

    def _verify(self, row: Row, length: int, width: int, on_path: dict[int, Values]) -> None:
        """Write target values of all nodes where verification writes them."""
        for node in range(width):
            one, two, _ = on_path.get(node, (0xBAD, 0xBAD, 0))
            self._write(row, length + node, one, two)

    def _move_accepted(self, row: Row, length: int, nodes: list[int]) -> None:
        """Bring the accepted path to the front."""
        for layer, book in enumerate(self._books):
            values = [self._values[layer][row.slot(book, length + node)] for node in nodes]
            for offset, value in enumerate(values):
                self._values[layer][row.slot(book, length + offset)] = value
