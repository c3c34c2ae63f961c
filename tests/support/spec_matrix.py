"""The matrix of speculation: who drafts, how deep, on which pages and layers, under which load; and a drawn part of it.

A cell is one engine over a tiny checkpoint, with its work. Used by the parity test that runs them.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product

from bench.heads import TargetHead
from roost.config.options import EngineConfig
from roost.messages import Abort, FlushCache, Flushed, GetStats, Stats
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.step import StepPlan, Ticket
from tests.support import tiny_models
from tests.support.mtp_heads import make_mtp
from tests.support.random_heads import make_head
from tests.support.slow_reference import next_tokens
from tests.support.spec_configs import AUTO_JOINT
from tests.support.tiny_models import Served, configure, greedy, prompts, tiny
from tests.support.workload import Work

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=3, topk=4, tokens=12, draft_kv=DraftKv.PAIR)
JOINT = replace(CHAIN, reads_history=True, lookup_steps=3)
JOINT_TREE = replace(TREE, reads_history=True, lookup_steps=3)
# drafter -> its head, and the shape of its rounds; the target as its own drafter is often right, a random head seldom
DRAFTERS: dict[str, tuple[str | None, SpecShape]] = {
    "plain": (None, PLAIN),
    "ngram": (None, SpecShape(steps=3, topk=1, tokens=4, reads_history=True)),
    **{f"{head}-chain": (head, CHAIN) for head in ("eagle", "eagle3", "target")},
    **{f"{head}-tree": (head, TREE) for head in ("eagle", "eagle3", "target")},
    **{f"{head}-joint": (head, JOINT) for head in ("eagle3", "target")},  # drafts are looked up beside the head
    "target-joint-tree": ("target", JOINT_TREE),
    "target-joint-auto": ("target", AUTO_JOINT),
}
# of models whose checkpoints have a head
OWN_HEADS = {"mtp-chain": ("mtp", CHAIN), "mtp-tree": ("mtp", TREE), "mtp-joint": ("mtp", JOINT)}
DEPTHS = (0, 1)
PAGE_SIZES = (1, 4, 64, 256)
KINDS = ("llama", "mistral", "gemma3-untied")  # full layers, windows alone, both
LOADS = ("side by side", "mixed", "preemptions", "aborts")
PREEMPT_TICKS = 3
ABORT_TICKS = {"r0": 2, "r4": 3, "r1": 8, "r2": 10}  # in prefill, in the queue, in rounds
MAX_RUNNING = 4
CONTEXT = 128
CHUNK = 20  # small enough for several chunks a prompt, and room for one beside rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to run an engine."""

    drafter: str
    depth: int
    page_size: int
    kind: str
    load: str
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        """Its name among tests."""
        form = () if self.kv_cache_dtype == "auto" else (self.kv_cache_dtype,)
        return "-".join(map(str, self.factors + form)).replace(" ", "_")

    @property
    def factors(self) -> tuple[object, ...]:
        """Its value of each factor."""
        return self.drafter, self.depth, self.page_size, self.kind, self.load

    @property
    def shape(self) -> SpecShape:
        """The shape of its rounds."""
        return {**DRAFTERS, **OWN_HEADS}[self.drafter][1]

    @property
    def config(self) -> EngineConfig:
        """Room for all that run at once, and not much more: every page is audited in every tick."""
        reserve = self.shape.alloc_len_per_decode
        pages = MAX_RUNNING * (-(-(CONTEXT + 2 * reserve) // self.page_size) + 2) + 1
        return configure(
            depth=self.depth,
            page_size=self.page_size,
            chunk=CHUNK if self.load in ("mixed", "aborts") else 512,
            pool_tokens=pages * self.page_size,
            window_pool_tokens=pages * self.page_size,
            max_running=MAX_RUNNING,
            context=CONTEXT,
            spec=self.shape,
            auto=self.shape == AUTO_JOINT,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def expected(self, prompt: tuple[int, ...], num_new: int) -> tuple[int, ...]:
        """What transformers says, or where KV is quantised one prefill after the other."""
        if self.kv_cache_dtype == "auto":
            return greedy(self.kind, prompt, num_new)
        return next_tokens(self.kind, prompt, num_new, self.kv_cache_dtype)


CELLS = [
    Cell(drafter=drafter, depth=depth, page_size=page_size, kind=kind, load=load)
    for drafter, depth, page_size, kind, load in product(DRAFTERS, DEPTHS, PAGE_SIZES, KINDS, LOADS)
]
# mixtures of experts, attention sinks, short convolutions, recurrent layers, shared KV
OTHERS = [
    Cell(drafter=drafter, depth=depth, page_size=page_size, kind=kind, load=load)
    for drafter, depth, page_size, kind, load in (
        ("plain", 1, 4, "qwen3-moe", "preemptions"),
        ("ngram", 1, 1, "qwen3-moe", "mixed"),
        ("target-chain", 0, 64, "qwen3-moe", "aborts"),
        ("target-chain", 1, 4, "qwen3-moe", "mixed"),
        ("eagle3-tree", 1, 64, "qwen3-moe", "preemptions"),
        ("target-joint-auto", 1, 4, "qwen3-moe", "side by side"),
        ("plain", 0, 1, "gpt-oss", "mixed"),
        ("plain", 1, 64, "gpt-oss", "preemptions"),
        ("ngram", 1, 4, "gpt-oss", "aborts"),
        ("eagle-chain", 0, 256, "gpt-oss", "side by side"),
        ("eagle3-chain", 1, 1, "gpt-oss", "preemptions"),
        ("target-chain", 1, 4, "gpt-oss", "mixed"),
        ("eagle-tree", 0, 4, "gpt-oss", "mixed"),
        ("eagle3-tree", 1, 64, "gpt-oss", "preemptions"),
        ("target-tree", 1, 1, "gpt-oss", "aborts"),
        ("eagle3-joint", 1, 4, "gpt-oss", "mixed"),
        ("plain", 0, 1, "lfm2", "mixed"),
        ("plain", 1, 4, "lfm2-biased", "preemptions"),
        ("ngram", 1, 64, "lfm2", "aborts"),
        ("eagle3-chain", 0, 4, "lfm2-biased", "mixed"),
        ("eagle-chain", 1, 1, "lfm2", "preemptions"),
        ("eagle-chain", 1, 256, "lfm2-biased", "side by side"),
        ("eagle-tree", 0, 1, "lfm2-biased", "preemptions"),
        ("eagle3-tree", 1, 4, "lfm2-biased", "mixed"),
        ("eagle3-tree", 1, 64, "lfm2", "aborts"),
        ("eagle3-joint", 1, 4, "lfm2-biased", "mixed"),
        ("plain", 0, 1, "qwen3.5", "mixed"),
        ("plain", 1, 4, "qwen3.5-moe", "preemptions"),
        ("plain", 1, 256, "qwen3.5", "aborts"),
        ("ngram", 1, 64, "qwen3.5", "aborts"),
        ("ngram", 0, 4, "qwen3.5-moe", "preemptions"),
        ("eagle-chain", 0, 4, "qwen3.5", "mixed"),
        ("eagle3-chain", 1, 1, "qwen3.5-moe", "preemptions"),
        ("eagle3-chain", 1, 64, "qwen3.5", "aborts"),
        ("eagle-chain", 1, 256, "qwen3.5", "side by side"),
        ("eagle-tree", 0, 1, "qwen3.5", "preemptions"),
        ("eagle3-tree", 1, 4, "qwen3.5-moe", "mixed"),
        ("eagle3-tree", 1, 64, "qwen3.5", "aborts"),
        ("eagle3-joint", 1, 4, "qwen3.5", "mixed"),
        ("mtp-chain", 0, 1, "qwen3.5", "mixed"),
        ("mtp-chain", 1, 64, "qwen3.5-moe", "aborts"),
        ("mtp-chain", 1, 4, "qwen3.5", "preemptions"),
        ("mtp-tree", 0, 4, "qwen3.5", "preemptions"),
        ("mtp-tree", 1, 1, "qwen3.5-moe", "mixed"),
        ("mtp-joint", 1, 4, "qwen3.5", "mixed"),
        ("plain", 0, 1, "gemma4", "mixed"),
        ("plain", 1, 4, "gemma4-moe", "preemptions"),
        ("plain", 1, 256, "gemma4", "aborts"),
        ("ngram", 1, 64, "gemma4", "aborts"),
        ("ngram", 0, 4, "gemma4", "preemptions"),
        ("eagle-chain", 0, 4, "gemma4", "mixed"),
        ("eagle-chain", 1, 1, "gemma4", "preemptions"),
        ("eagle3-tree", 1, 4, "gemma4", "mixed"),
        ("eagle3-tree", 0, 64, "gemma4", "aborts"),
        ("eagle3-chain", 1, 4, "gemma4", "preemptions"),
    )
]
QUANTISED = [
    Cell(drafter=drafter, depth=depth, page_size=page_size, kind=kind, load=load, kv_cache_dtype=kv_cache_dtype)
    for drafter, depth, page_size, kind, load, kv_cache_dtype in (
        ("plain", 1, 1, "gemma3-untied", "mixed", "int8"),
        ("plain", 0, 64, "llama", "preemptions", "int8"),
        ("ngram", 1, 4, "mistral", "side by side", "int8"),
        ("target-chain", 1, 4, "llama", "aborts", "int8"),
        ("eagle3-chain", 1, 64, "mistral", "mixed", "int8"),
        ("target-tree", 0, 4, "gemma3-untied", "mixed", "int8"),
        ("target-tree", 1, 1, "llama", "preemptions", "int8"),
        ("plain", 1, 4, "gemma3-untied", "preemptions", "fp16"),
        ("target-tree", 1, 4, "llama", "mixed", "fp16"),
        ("eagle-tree", 1, 4, "mistral", "side by side", "fp8"),
        ("target-tree", 1, 64, "llama", "mixed", "fp8"),
        ("eagle3-tree", 1, 4, "lfm2-biased", "mixed", "int8"),
        ("eagle3-tree", 1, 4, "gpt-oss", "mixed", "int8"),
        ("eagle3-chain", 1, 4, "qwen3.5", "mixed", "int8"),
        ("eagle3-tree", 1, 4, "gemma4", "mixed", "int8"),
    )
]


def drawn(num_together: int, *, joined: bool) -> list[Cell]:
    """Cells in which any values of any so many factors meet somewhere: the next is always one that adds most.

    Of all drafters beside which drafts are looked up, or of all others.
    """
    found: list[Cell] = []
    cells = [cell for cell in CELLS if ("joint" in cell.drafter) == joined]
    open_cells = {cell: set(combinations(enumerate(cell.factors), num_together)) for cell in cells}
    while True:
        best = max(open_cells, key=lambda cell: len(open_cells[cell]))  # the first of several
        if not (met := open_cells.pop(best)):
            return found
        found.append(best)
        for missing in open_cells.values():
            missing.difference_update(met)


def model_of(kind: str) -> Decoder:
    """The checkpoint of a kind, with the operations of the backend."""
    return _model_of(kind, tiny_models.BACKEND.ops)


@cache
def _model_of(kind: str, ops: str) -> Decoder:
    return tiny(kind).model()


@cache
def head_of(name: str, kind: str) -> Head:
    """A head for the checkpoint of a kind."""
    model = model_of(kind)
    if name == "mtp":
        return make_mtp(kind, model)
    return TargetHead(model) if name == "target" else make_head(name, model)


def work() -> Work:
    """Requests of different lengths, some with a prompt that repeats itself, two that share most of theirs."""
    one, two, three, four = prompts(33, 5, 18, 41, seed=3)
    return [(one, 14), (two * 4, 21), (three, 24), (one[:30] + two, 12), (two, 1), (four, 17)]


class Matrix(Served):
    """A cell's engine, which remembers what it launched."""

    def __init__(self, cell: Cell) -> None:
        head, _ = {**DRAFTERS, **OWN_HEADS}[cell.drafter]
        super().__init__(model_of(cell.kind), cell.config, head=head and head_of(head, cell.kind))
        self.cell = cell
        self.plans: list[StepPlan] = []
        launch = self.executor.launch

        def launch_noted(plan: StepPlan) -> Ticket:
            self.plans.append(plan)
            return launch(plan)

        self.executor.launch = launch_noted  # type: ignore[method-assign]

    def serve(self, requests: Work) -> None:
        """Run some requests under the cell's load."""
        for number, (prompt, num_new) in enumerate(requests):
            self.submit(f"r{number}", prompt, num_new)
        if self.cell.load == "aborts":
            for tick in range(1, max(ABORT_TICKS.values()) + 1):
                self.engine.tick()
                for name in (name for name, when in ABORT_TICKS.items() if when == tick):
                    self.post(Abort(request_id=name))
        self.run(PREEMPT_TICKS if self.cell.load == "preemptions" else 0)

    def stats(self) -> Stats:
        """How things stand, now that nothing runs."""
        self.post(GetStats())
        self.run()
        stats = self.events[-1]
        assert isinstance(stats, Stats), stats
        return stats

    def flush(self) -> None:
        """Forget what is cached."""
        self.post(FlushCache())
        self.run()
        assert isinstance(self.events[-1], Flushed), self.events[-1]
