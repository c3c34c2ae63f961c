"""Planted bugs in draft branches on the device: where they lie behind the text, and what they read."""

from tests.planted.bug import Bug

_BRANCHES = "tests/unit/drafters/test_branches.py::"
_DENSE = "tests/parity/test_drafting.py::test_draft_logits_of_every_branch_and_step_equal_dense_ones"
_EAGLE = "roost.drafters.eagle"
_ATTENTION = "roost.layers.attention"
_POSITIONS = (
    "    positions = torch.where(branch < 0, at, torch.where(branch < topk, base + branch * stride + within, last))"
)

BRANCH_BUGS = (
    Bug(
        "branches_share_the_text",
        _EAGLE,
        "            branch_bases=start_positions,",
        "            branch_bases=start_positions - 1,",
        "a branch reads the text's last draft slot where its own begin",
        test=_DENSE + "[eagle-tree-4-9]",
    ),
    Bug(
        "branches_share_the_text_on_the_device",
        _EAGLE,
        "            branch_bases=_each(self._base, topk),",
        "            branch_bases=_each(self._base + 1, topk),",
        "the first draft of every branch is read where the first branch has its own",
        test=_BRANCHES + "test_what_a_branch_reads_is_the_text_and_what_it_wrote",
    ),
    Bug(
        "branch_reads_its_own",
        _ATTENTION,
        _POSITIONS,
        _POSITIONS.replace("within", "within + 1"),
        "a branch reads from its second slot on, and the first of its neighbour",
        test=_DENSE + "[eagle-tree-4-9]",
    ),
    Bug(
        "branch_pages_by_key",
        "roost.kernels.attention",
        "    if PAGE_SIZE % BLOCK_N == 0 and not BRANCHED:",
        "    if PAGE_SIZE % BLOCK_N == 0:",
        "keys of a branch are read from the page that the text before them is on",
        test="tests/kernels/test_attention.py::test_a_branch_reads_the_prefix_and_its_own_slots",
    ),
    Bug(
        "branches_by_their_length",
        _EAGLE,
        "        self._shifts = torch.arange(shape.topk, device=rounds.rows.device) * shape.branch_len  # [K]",
        "        self._shifts = torch.arange(shape.topk, device=rounds.rows.device) * shape.topk",
        "7: branches lie as far apart as there are branches, not steps",
        test=_BRANCHES + "test_branches_lie_where_the_shape_says",
    ),
)
