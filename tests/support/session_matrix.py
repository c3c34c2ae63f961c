"""The matrix of sessions: who drafts, over which layers and pages, under which load; which of it always runs.

A cell is one engine over a tiny checkpoint. A case is a cell with one scene of `session_scenes`. Used by the
parity test that plays them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product

from bench.heads import TargetHead
from roost.config.options import EngineConfig
from roost.models.model import Head
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from tests.support.forced_drafts import model_of
from tests.support.random_heads import make_head
from tests.support.tiny_models import configure

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=3, topk=4, tokens=12, draft_kv=DraftKv.PAIR)
WIDE = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)
# drafter -> the shape of its rounds, and the depth
DRAFTERS: dict[str, tuple[SpecShape, int]] = {
    "plain": (PLAIN, 1),
    "chain0": (CHAIN, 0),
    "chain1": (CHAIN, 1),
    "tree1": (TREE, 1),
    "ngram": (SpecShape(steps=3, topk=1, tokens=4, reads_history=True), 1),
    "joint1": (replace(CHAIN, reads_history=True, lookup_steps=3), 1),
    "joint tree1": (replace(TREE, reads_history=True, lookup_steps=3), 1),
}
LAYERS = {"full": "llama", "window": "mistral", "mixed": "gemma3-untied"}
# for named cells alone: what experts keep of a sequence is as in full layers, what convolutions keep as in both
OTHERS = {
    "experts": "qwen3-moe",
    "convolutions": "lfm2-biased",
    "recurrent": "qwen3.5",
    "shared": "gemma4",
    "sinks": "gpt-oss",
}
PAGE_SIZES = (1, 16, 256)
LOADS = ("mixed", "whole", "preemptions")  # chunks of 128 beside rounds; chunks of 4096; a preemption every 3 steps
PREEMPT_TICKS = 3
MAX_RUNNING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to run an engine."""

    drafter: str = "plain"
    layers: str = "full"
    page_size: int = 16
    load: str = "whole"
    chunk: int = 4096
    spec: SpecShape | None = None  # another shape than the drafter's
    overlap: bool = True  # False: depth 0, whatever the drafter's depth
    kv_cache_dtype: str = "auto"

    @property
    def factors(self) -> tuple[object, ...]:
        """Its value of each factor."""
        return self.drafter, self.layers, self.page_size, self.load

    @property
    def name(self) -> str:
        """Its name among tests."""
        return "-".join(map(str, self.factors))

    @property
    def shape(self) -> SpecShape:
        """The shape of its rounds."""
        return self.spec or DRAFTERS[self.drafter][0]

    @property
    def depth(self) -> int:
        """Results that may be in flight."""
        return DRAFTERS[self.drafter][1] if self.overlap else 0

    @property
    def head_name(self) -> str | None:
        """A real head on pages of 16; else the target as its own drafter, so that rounds overshoot."""
        if not self.shape.pair:
            return None
        return "eagle3" if self.page_size == 16 else "target"

    @property
    def kind(self) -> str:
        """The checkpoint; over full layers, one of which the target as its own drafter misses nothing."""
        is_sure = self.layers == "full" and (self.head_name == "target" or self.drafter == "ngram")
        return "forgetful" if is_sure else (LAYERS | OTHERS)[self.layers]

    @property
    def context(self) -> int:
        """Two large pages, or many small ones."""
        return max(256, 2 * self.page_size)

    @property
    def head(self) -> Head | None:
        """Who drafts with KV of its own."""
        return None if self.head_name is None else _head(self.head_name, self.kind)

    def config(
        self, max_running: int = MAX_RUNNING, context: int | None = None, num_fit: int | None = None
    ) -> EngineConfig:
        """Room for all that run at once (or for `num_fit`), and no more: every page is audited in every tick."""
        context = context or self.context
        reserve = self.shape.alloc_len_per_decode
        pages = (num_fit or max_running) * (-(-(context + 2 * reserve) // self.page_size) + 2) + 1
        return configure(
            depth=self.depth,
            page_size=self.page_size,
            chunk=128 if self.load == "mixed" else self.chunk,
            pool_tokens=pages * self.page_size,
            window_pool_tokens=pages * self.page_size,
            max_running=max_running,
            context=context,
            spec=self.shape,
            kv_cache_dtype=self.kv_cache_dtype,
        )


@cache
def _head(name: str, kind: str) -> Head:
    model = model_of(kind)
    return TargetHead(model) if name == "target" else make_head(name, model)


CELLS = [
    Cell(drafter=drafter, layers=layers, page_size=page_size, load=load)
    for drafter, layers, page_size, load in product(DRAFTERS, LAYERS, PAGE_SIZES, LOADS)
]

# What has broken engines of this kind: never left to a draw.
NAMED: dict[str, Cell] = {
    "plain": Cell(),
    "plain, depth 0": Cell(overlap=False),
    "preempt x mixed chunk 128": Cell(load="preemptions", chunk=128),
    "preempt x page 256": Cell(load="preemptions", page_size=256),
    "EAGLE depth 0": Cell(drafter="chain0", page_size=1),
    "EAGLE depth 1": Cell(drafter="chain1", page_size=1),
    "EAGLE depth 0, preempt x page 256": Cell(drafter="chain0", page_size=256, load="preemptions"),
    "EAGLE depth 1, preempt x page 256": Cell(drafter="chain1", page_size=256, load="preemptions"),
    "lookup beside EAGLE, page 1": Cell(drafter="joint1", page_size=1),
    "lookup beside EAGLE, preempt x page 256": Cell(drafter="joint1", page_size=256, load="preemptions"),
    "lookup in trees beside EAGLE, both layers": Cell(drafter="joint tree1", layers="mixed", load="mixed"),
    "experts, preempt": Cell(layers="experts", load="preemptions"),
    "EAGLE depth 1, experts": Cell(drafter="chain1", layers="experts", load="mixed"),
    "sinks, preempt x mixed": Cell(layers="sinks", load="preemptions", chunk=128),
    "EAGLE trees, sinks": Cell(drafter="tree1", layers="sinks", load="mixed"),
    "convolutions": Cell(layers="convolutions", page_size=1),
    "convolutions, preempt x page 256": Cell(layers="convolutions", page_size=256, load="preemptions"),
    "EAGLE depth 1, convolutions": Cell(drafter="chain1", layers="convolutions", load="mixed"),
    "EAGLE trees, convolutions": Cell(drafter="tree1", layers="convolutions", load="preemptions"),
    "recurrent": Cell(layers="recurrent", page_size=1),
    "recurrent, depth 0": Cell(layers="recurrent", overlap=False),
    "recurrent, preempt x page 256": Cell(layers="recurrent", page_size=256, load="preemptions"),
    "EAGLE depth 1, recurrent": Cell(drafter="chain1", layers="recurrent", load="mixed"),
    "EAGLE depth 0, recurrent": Cell(drafter="chain0", layers="recurrent", load="preemptions"),
    "EAGLE trees, recurrent": Cell(drafter="tree1", layers="recurrent", load="preemptions"),
    "lookup, recurrent": Cell(drafter="ngram", layers="recurrent", load="mixed"),
    "shared KV, preempt": Cell(layers="shared", page_size=1, load="preemptions"),
    "EAGLE depth 1, shared KV": Cell(drafter="chain1", layers="shared", load="mixed"),
    "window": Cell(layers="window"),
    "window, preempt x page 256": Cell(layers="window", page_size=256, load="preemptions"),
    "window, preempt x mixed": Cell(layers="window", load="preemptions", chunk=128),
}
QUANTISED = {  # sessions whose KV is not kept as it is computed, with the scenes that each plays
    "plain": (Cell(kv_cache_dtype="int8", load="mixed"), ("turns", "rewinds", "forks")),
    "preempt x page 1": (Cell(kv_cache_dtype="int8", page_size=1, load="preemptions"), ("together", "aborts")),
    "chain x window": (Cell(kv_cache_dtype="int8", drafter="chain1", layers="window"), ("turns", "logprobs")),
    "tree x both layers": (Cell(kv_cache_dtype="int8", drafter="tree1", layers="mixed"), ("stop_strings", "rewinds")),
    "fp16 x mixed": (Cell(kv_cache_dtype="fp16", load="mixed"), ("turns", "rewinds", "forks")),
    "fp16 x preempt x page 1": (Cell(kv_cache_dtype="fp16", page_size=1, load="preemptions"), ("together", "aborts")),
    "fp8 x tree x page 256": (Cell(kv_cache_dtype="fp8", drafter="tree1", page_size=256), ("turns", "aborts")),
}
LARGE_PAGES = {  # context 512, page 256
    "full": Cell(page_size=256),
    "window": Cell(layers="window", page_size=256),
}
WIDE_PAGES = Cell(drafter="tree1", page_size=512, spec=WIDE)

Case = tuple[Cell, str]


def drawn(scenes: Iterable[str], num_together: int = 2) -> list[Case]:
    """Cases in which any values of two factors, scenes too, meet somewhere: the next is one that adds most."""
    found: list[Case] = []
    open_cases = {
        (cell, scene): set(combinations(enumerate((*cell.factors, scene)), num_together))
        for cell, scene in product(CELLS, scenes)
        if "joint" not in cell.drafter  # of these the named ones always run
    }
    while True:
        best = max(open_cases, key=lambda case: len(open_cases[case]))  # the first of several
        if not (met := open_cases.pop(best)):
            return found
        found.append(best)
        for missing in open_cases.values():
            missing.difference_update(met)
