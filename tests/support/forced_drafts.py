"""Drafts whose accept counts a test chooses, and what is asked of an engine afterwards.

`Told` knows the output and says where its drafts go wrong; `Stumbles` is the target as its own drafter, wrong at some
positions; `Knowing` is a real head that knows the text, with the right token second best at some positions. Used by
the tests of the failure modes, where the exact accept count is the situation.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.heads import TargetHead
from roost.config.options import EngineConfig
from roost.drafters.protocol import Pairs
from roost.drafters.tree import Trees, chains
from roost.layers.attention import Attend
from roost.layers.segments import Segments
from roost.messages import CloseSession, Event, FlushCache
from roost.models.decoder import Decoder
from roost.models.model import PairHead
from roost.sched.request import Request
from roost.spec_shape import DraftKv, SpecShape
from roost.step import RowSetup
from tests.sim.script import accounts
from tests.support.stand_in_heads import NULL, forgetful
from tests.support.tiny_models import DEVICE, VOCAB, Served, Tiny, configure, prompts, tiny

Prompt = tuple[int, ...]

NGRAM = SpecShape(steps=3, topk=1, tokens=4, reads_history=True)
CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=4, topk=3, tokens=9, draft_kv=DraftKv.PAIR)
POSITIONS_MAX = 4096  # of any row of these tests


@cache
def checkpoint(kind: str) -> Tiny:
    """A tiny checkpoint by its kind, or the forgetful one."""
    return forgetful() if kind == "forgetful" else tiny(kind)


@cache
def model_of(kind: str) -> Decoder:
    """Roost's model of it."""
    return checkpoint(kind).model()


@cache
def plainly(kind: str, prompt: Prompt, num_new: int, kv_cache_dtype: str = "auto") -> Prompt:
    """What the engine returns without speculation; the tests of serving hold that against transformers."""
    sizes = {"context": 2048, "pool_tokens": 4096, "depth": 0, "max_running": 1}
    served = Served(model_of(kind), configure(**sizes, kv_cache_dtype=kv_cache_dtype))
    served.submit("r", prompt, num_new)
    served.run()
    return served.output("r")


def null_prompts(*lengths: int, seed: int = 0) -> list[Prompt]:
    """Prompts for the forgetful checkpoint: a drafter that never sees the first token misses nothing."""
    return [(NULL, *prompt[1:]) for prompt in prompts(*lengths, seed=seed)]


class Told:
    """A drafter that is told the texts, and how many tokens each round of a row shall add; then all it can."""

    def __init__(self, shape: SpecShape, texts: Sequence[Prompt], accept_lens: Sequence[int]) -> None:
        self._shape, self._texts, self._accept_lens = shape, texts, accept_lens
        self._num_rounds: dict[int, int] = {}  # by row
        self._text: dict[int, Prompt] = {}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Nothing."""
        return ()

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Count a row's rounds from its start; its text is the one that begins like it."""
        for setup in setups:
            begun = tuple(setup.tokens.tolist())
            self._num_rounds[setup.row] = 0
            self._text[setup.row] = next((text for text in self._texts if text[: len(begun)] == begun), begun)

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """The text that follows, up to where it shall be wrong."""
        places = zip(rounds.rows.tolist(), rounds.start_positions.tolist(), strict=True)
        drafts = [self._drafts(row, start)[: width - 1] for row, start in places]
        return chains(torch.cat([roots[:, None], torch.tensor(drafts, device=roots.device)], dim=1))

    def extend(self, pairs: Pairs) -> None:
        """Nothing to keep."""

    def _drafts(self, row: int, start: int) -> list[int]:
        number = self._num_rounds[row]
        self._num_rounds[row] += 1
        length = self._accept_lens[number] if number < len(self._accept_lens) else self._shape.accept_max
        following = [self._token(row, start + 1 + step) for step in range(self._shape.steps)]
        return [token if step < length - 1 else (token + 1) % VOCAB for step, token in enumerate(following)]

    def _token(self, row: int, position: int) -> int:
        return self._text[row][position] if position < len(self._text[row]) else 0


def marked(positions: Sequence[int]) -> Tensor:
    """Of every position whether it is among these; to look it up is something that can be captured."""
    marks = torch.zeros(POSITIONS_MAX, dtype=torch.bool)
    marks[list(positions)] = True
    return marks.to(DEVICE)


class Stumbles(TargetHead):
    """The target as its own drafter, which has the worst tokens for the best after every position in a list."""

    def __init__(self, model: Decoder, wrong_after: Sequence[int]) -> None:
        super().__init__(model)
        self._is_wrong_after = marked(wrong_after)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The target's pass, turned round where it shall be wrong."""
        output = super().forward(tokens, hidden, positions, attend)
        return torch.where(self._is_wrong_after[positions][:, None], -output, output)


class Knowing:
    """A head with KV and hidden states of its own, whose choices are made by somebody who knows the text of one row.

    The position passes through its hidden states, as their last element. After some positions a decoy is a little
    better than the right token, so that the path to be accepted is not the first of its tree.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, head: PairHead, text: Prompt, decoy_after: Sequence[int] = ()) -> None:
        self._head = head
        self._text = torch.tensor([*text, 0], device=DEVICE)  # and nothing behind it
        self._is_decoy_after = marked(decoy_after)
        self.kv, self.dtype, self.num_tokens, self.hidden_size = head.kv, head.dtype, VOCAB, head.hidden_size + 1

    def fuse(self, last: Tensor, aux_hidden: tuple[Tensor, ...]) -> Tensor:
        """The head's, with room for the position."""
        return pad(self._head.fuse(last, aux_hidden), (0, 1))

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The head's, and the position."""
        output = self._head.forward(tokens, hidden[:, :-1], positions, attend)
        return torch.cat([output, positions[:, None].to(output.dtype)], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """The text's next token, or the one before it in the vocabulary."""
        positions = hidden[:, -1].to(torch.int64)
        tokens = self._text[(positions + 2).clamp(max=len(self._text) - 1)]
        decoys = 20.5 * self._is_decoy_after[positions]
        logits = torch.zeros(len(hidden), VOCAB, device=hidden.device)
        logits.scatter_(1, ((tokens - 1) % VOCAB)[:, None], decoys[:, None])
        return logits.scatter_(1, tokens[:, None], 20.0)

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's."""
        return draft_ids


def told(kind: str, config: EngineConfig, texts: Sequence[Prompt], accept_lens: Sequence[int] = ()) -> Served:
    """An engine whose drafter knows the texts, prompts and outputs."""
    served = Served(model_of(kind), config)
    served.executor.runner.passes.drafter = Told(served.engine.state.resolved.spec, texts, accept_lens)
    return served


def drafted(config: EngineConfig, wrong_after: Sequence[int] = (), head: PairHead | None = None) -> Served:
    """The forgetful checkpoint drafted by itself, wrong after some positions."""
    model = model_of("forgetful")
    return Served(model, config, head=head or Stumbles(model, wrong_after))


def turn(served: Served, name: str, tokens: Prompt, num_new: int, session: str = "s") -> int:
    """Run one turn of a session to its end; how many tokens it inherited."""
    served.submit(name, tokens, num_new, session)
    served.run()
    return served.finish(name).usage.cached_tokens


def close(served: Served, session: str = "s") -> None:
    """Close a session."""
    served.post(CloseSession(session_id=session))
    served.run()


def until_output(served: Served, name: str, num_tokens: int) -> Request:
    """Tick until a request has returned so many tokens; the request."""
    for _ in range(200):
        served.engine.tick()
        if len(served.output(name)) >= num_tokens:
            return served.engine.state.requests[name]
    raise AssertionError(f"{name} returned {len(served.output(name))} tokens in 200 ticks")


def assert_every_page_is_back(served: Served) -> None:
    """Nothing runs and no session is open: free and cached is all; after a flush, free is all."""
    state = served.engine.state
    for book in range(len(state.resolved.books)):
        held = accounts(state, book)
        assert (held["leased"], held["retiring"]) == (0, 0), (book, held)
    events: list[Event] = []
    served.engine.post(FlushCache(), events.append)
    served.run()
    for book, sizes in enumerate(state.resolved.books):
        assert accounts(state, book)["free"] == sizes.num_pages - 1, (book, events)
