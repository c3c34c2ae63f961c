"""Widths: how many tokens (nodes) each round of a step may verify, by the number of rounds; integers only, no torch.

With a fixed draft length there is one width. With `--spec-steps auto` there is a menu, shorter for larger batches,
since every width of every batch size gets a CUDA graph (`graph_sizes`). Read by scheduler and device side.
"""

from dataclasses import dataclass

from roost.spec_shape import SpecShape

AUTO_STEPS_MAX = 6  # most drafts of a round with --spec-steps auto
# (most rounds, widths); each menu is part of the one before, since a row that was counted may sit the step out
_MENUS = ((8, (1, 2, 3, 4, 5, 7)), (64, (1, 2, 3, 4, 5)))
_MENU_BEYOND = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The widths that rounds of a configuration can have."""

    shape: SpecShape
    is_auto: bool  # whether the width is chosen for each step
    limit: int | None  # a step of more rounds than this carries no drafts; None: no limit

    def of(self, num_rounds: int) -> tuple[int, ...]:
        """Widths to choose from in a step of so many rounds, narrowest first."""
        if self.limit is not None and num_rounds > self.limit:
            return (1,)
        if not self.is_auto:
            return (self.shape.tokens,)
        return next((menu for most, menu in _MENUS if num_rounds <= most), _MENU_BEYOND)
