"""Widths: how many tokens (nodes) each round of a step may verify, by the number of rounds; integers only, no torch.

With a fixed draft length there is one width. With `--spec-steps auto` there is a menu, shorter for larger batches,
since every width of every batch size gets a CUDA graph (`graph_sizes`); where drafts may be looked up, wide ones too,
for the rows of a step that repeat a text. Read by scheduler and device side.
"""

from dataclasses import dataclass

from roost.spec_shape import SpecShape

AUTO_STEPS_MAX = 6  # most drafts of a round with --spec-steps auto
LOOKUP_STEPS_MAX = 16  # the same where they are looked up: a text that is repeated goes on for long
# (most rounds, widths); each menu is part of the one before, since a row that was counted may sit the step out
_MENUS = ((8, (1, 2, 3, 4, 5, 7)), (64, (1, 2, 3, 4, 5)))
_MENU_BEYOND = (1, 2, 3)
_WIDE_MENUS = ((8, (9, LOOKUP_STEPS_MAX + 1)), (32, (9,)))  # for looked-up drafts alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The widths that rounds of a configuration can have."""

    shape: SpecShape
    is_auto: bool  # whether the width is chosen for each step
    limit: int | None  # a step of more rounds than this carries no drafts; None: no limit
    narrows: bool = False  # whether a round verifies no more than was drafted for it, where its drafts are looked up

    def of(self, num_rounds: int) -> tuple[int, ...]:
        """Widths to choose from in a step of so many rounds, narrowest first."""
        if self.limit is not None and num_rounds > self.limit:
            return (1,)
        if not self.is_auto:
            return (self.shape.tokens,)
        return next((menu for most, menu in _MENUS if num_rounds <= most), _MENU_BEYOND)

    def wide_of(self, num_rounds: int) -> tuple[int, ...]:
        """Wider ones for those of so many rounds whose drafts are looked up, narrowest first; none where not."""
        is_limited = self.limit is not None and num_rounds > self.limit
        if is_limited or not self.is_auto or not self.shape.lookup_steps:
            return ()
        return next((menu for most, menu in _WIDE_MENUS if num_rounds <= most), ())

    def widest_of(self, num_rounds: int) -> int:
        """Most nodes that a round can verify in a step of so many."""
        return max(self.of(num_rounds) + self.wide_of(num_rounds))

    def num_nodes_max(self, rounds_max: int) -> int:
        """Most nodes that the rounds of a step can verify, of up to `rounds_max` rounds."""
        ends = [most for menus in (_MENUS, _WIDE_MENUS) for most, _ in menus]
        numbers = {rounds_max, *(each for each in (*ends, self.limit or 0) if 0 < each < rounds_max)}
        return max(number * self.widest_of(number) for number in numbers)
