"""Drafters: what each declares, and where it is made.

Plain declarations, no torch: the choices of `--spec`, its help, its refusals and what is planned for a drafter follow
from them. A new drafter is one file with a function that makes it, and one more entry in `DRAFTERS`. Read by the
configuration, at start-up, and by `drafters.make`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roost.spec_shape import DraftKv

NO_DRAFTER = "none"  # of --spec: plain decoding
ANY_DRAFTER = "auto"  # of --spec: the one that the head belongs to, or `WITHOUT_HEAD`

# --draft-layer-ids -> how many layers on is the one whose input an id stands for
LAYER_ID_SHIFTS: Mapping[str, int] = {"sglang": 1, "vllm": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """Weights of a drafter, in the folder that --draft names, or within the model's own checkpoint."""

    architectures: tuple[str, ...]  # as their config.json names them; none: they are in the model's own checkpoint
    family: str  # where its `HeadFamily` is: "module:name", imported when a head is read
    aux_hidden: bool = False  # reads hidden states of some of the target's layers; --draft-layer-ids is for these

    @property
    def is_own(self) -> bool:
        """Whether it comes within the model's checkpoint."""
        return not self.architectures


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterKind:
    """What one drafter does, and what it needs."""

    name: str  # of --spec
    make: str  # where the function is that makes it of `Parts`: "module:name", imported when the engine starts
    draft_kv: DraftKv = DraftKv.NONE  # what it keeps per slot of the full book
    trees: bool = False  # may propose trees: --spec-topk above 1
    reads_history: bool = False  # wants every token of a row when the row begins: `RowSetup.tokens` are filled
    looks_up: bool = False  # finds its drafts in texts, and nowhere else: --spec-lookup cannot be off
    joins_lookup: bool = False  # drafts may be looked up beside it, row by row: --spec-lookup
    head: DraftHead | None = None  # None: it has no weights; only one with a folder of its own is named by --draft


NGRAM = DrafterKind(name="ngram", make="roost.drafters.ngram:make", reads_history=True, looks_up=True)
EAGLE = DrafterKind(
    name="eagle",
    make="roost.drafters.eagle:make",
    draft_kv=DraftKv.PAIR,
    trees=True,
    joins_lookup=True,
    head=DraftHead(architectures=("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"), family="roost.models.eagle:EAGLE"),
)
EAGLE3 = DrafterKind(
    name="eagle3",
    make="roost.drafters.eagle:make",
    draft_kv=DraftKv.PAIR,
    trees=True,
    joins_lookup=True,
    head=DraftHead(
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
        family="roost.models.eagle:EAGLE3",
        aux_hidden=True,
    ),
)
MTP = DrafterKind(
    name="mtp",
    make="roost.drafters.eagle:make",
    draft_kv=DraftKv.PAIR,
    trees=True,
    joins_lookup=True,
    head=DraftHead(architectures=(), family="roost.models.qwen3_5:MTP"),
)

DRAFTERS = (NGRAM, EAGLE, EAGLE3, MTP)
WITHOUT_HEAD = NGRAM  # what --spec auto means where there is no head


def find_drafter(name: str) -> DrafterKind:
    """The drafter of that name, which must be one of `DRAFTERS`."""
    return {kind.name: kind for kind in DRAFTERS}[name]


def spec_names() -> tuple[str, ...]:
    """What --spec may be."""
    return (NO_DRAFTER, *names_of(lambda kind: True), ANY_DRAFTER)


def names_of(is_meant: Callable[[DrafterKind], bool]) -> tuple[str, ...]:
    """Names of the drafters that declare something."""
    return tuple(kind.name for kind in DRAFTERS if is_meant(kind))


def has_head(kind: DrafterKind) -> bool:
    """Whether a drafter needs --draft."""
    return kind.head is not None and not kind.head.is_own


def has_trees(kind: DrafterKind) -> bool:
    """Whether --spec-topk may be above 1."""
    return kind.trees


def has_lookup(kind: DrafterKind) -> bool:
    """Whether --spec-lookup may say something."""
    return kind.looks_up or kind.joins_lookup


def has_aux_hidden(kind: DrafterKind) -> bool:
    """Whether --draft-layer-ids may say something about its heads."""
    return kind.head is not None and kind.head.aux_hidden


def head_architectures() -> dict[str, DrafterKind]:
    """Whose heads the config.json of a draft folder may name."""
    return {name: kind for kind in DRAFTERS if kind.head is not None for name in kind.head.architectures}
