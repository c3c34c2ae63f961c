"""Engines that speculate well, and the check that nobody can tell: every output is the dense reference's.

The checkpoint is the forgetful one, of which a drafter that sees all but the first token misses nothing, and which
repeats itself enough for n-grams. Used by the tests of options under speculation, and by their table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from bench.heads import TargetHead
from roost.config.options import EngineConfig
from roost.drafters.accept import Accepted
from roost.forward.passes import TargetOutput
from roost.grammar.rows import GrammarRows
from roost.messages import PromptLogprobs, Submit, TokenLogprob, Tokens
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.text.stream import StopFinder
from tests.support.grammars import compiler
from tests.support.random_heads import make_head
from tests.support.slow_reference import slow_logprobs, slow_output
from tests.support.small_vocabularies import CONTROL, byte_level
from tests.support.stand_in_heads import NULL, HalfHead, checkpoint
from tests.support.tiny_models import Served, configure, prompts

MODES = {
    "plain": PLAIN,
    "chain": SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR),
    "tree": SpecShape(steps=4, topk=4, tokens=14, draft_kv=DraftKv.PAIR),
    "n-gram": SpecShape(steps=3, topk=1, tokens=4),
    "joint": SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=3),
    "joint tree": SpecShape(steps=4, topk=4, tokens=14, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=4),
}
# on other layers, under random heads: a mode, and the checkpoint
ON_OTHER_LAYERS = {
    "hybrid chain": ("chain", "qwen3.5"),
    "hybrid tree": ("tree", "qwen3.5"),
    "hybrid joint": ("joint", "qwen3.5"),
    "experts chain": ("chain", "qwen3-moe"),
    "experts joint tree": ("joint tree", "qwen3-moe"),
}
NEAR = 1e-4  # log-probabilities differ by rounding at most
NEAR_CODES = 0.02  # with quantised KV where sums have another order than the reference's: a code may be the next one
TOKENIZER = byte_level()  # its first tokens are enough for the tiny vocabulary: three special ones, then ASCII


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Under what an option is tried."""

    mode: str
    depth: int
    head: str = "half"  # half, sure, eagle or eagle3 (random weights)
    kind: str = "forgetful"
    page_size: int = 4
    chunk: int = 512

    @property
    def shape(self) -> SpecShape:
        """Of a round."""
        return MODES[self.mode]

    @property
    def expects_accepts(self) -> bool:
        """Whether the drafter is good enough for some of its drafts to be right."""
        return self.shape.speculates and (not self.shape.pair or self.head in ("half", "sure"))


class Speculating(Served):
    """An engine under a setting; counts the rounds whose accepted path was not at the front of its tree."""

    def __init__(self, setting: Setting, **changes: int | bool) -> None:
        model = checkpoint(setting.kind).model()
        super().__init__(model, _config(setting, **changes), _head(setting, model), _new_stop_finder)
        self.executor.runner._grammars = GrammarRows(compiler().new_matcher)
        self.engine.state.start_compiling = compiler().start
        self.setting = setting
        self.num_moved = 0
        passes = self.executor.runner.passes
        move = passes._move_accepted

        def watched(target: TargetOutput, accepted: Accepted) -> None:
            number = torch.arange(accepted.nodes.shape[1], device=accepted.nodes.device)
            is_kept = number < accepted.lens[:, None]
            self.num_moved += int(((accepted.nodes != number) & is_kept).any(dim=1).sum())
            move(target, accepted)

        passes._move_accepted = watched  # type: ignore[method-assign]

    def serve(self, submits: Iterable[Submit], preempt_ticks: int = 0) -> None:
        """Run requests side by side."""
        for submit in submits:
            self.post(submit)
        self.run(preempt_ticks)

    def check(self, submits: Sequence[Submit], *, accepts: bool = True) -> None:
        """Every output, its end and its logprobs are the reference's, and drafts were accepted on the way."""
        for submit in submits:
            assert_exact(self, submit, self.setting.kind)
        if accepts and self.setting.expects_accepts:
            assert self.num_accepted(submits) > 0, "no draft was accepted: nothing was tried"

    def num_accepted(self, submits: Iterable[Submit]) -> int:
        """Drafts of some requests that were accepted."""
        return sum(self.finish(each.request_id).spec.drafts_accepted for each in submits)

    def num_overshot(self, submits: Iterable[Submit]) -> int:
        """Accepted tokens past the ends of some requests' outputs."""
        return sum(self.finish(each.request_id).spec.overshoot for each in submits)


def setting_of(mode: str, depth: int) -> Setting:
    """The setting of a column of the table."""
    if mode not in ON_OTHER_LAYERS:
        return Setting(mode=mode, depth=depth)
    shape, kind = ON_OTHER_LAYERS[mode]
    return Setting(mode=shape, depth=depth, kind=kind, head="eagle3")


def _config(setting: Setting, **changes: int | bool) -> EngineConfig:
    usual = {"depth": setting.depth, "page_size": setting.page_size, "chunk": setting.chunk, "pool_tokens": 8192}
    config = configure(**{**usual, "window_pool_tokens": 8192, "max_running": 12, **changes}, spec=setting.shape)
    if not checkpoint(setting.kind).model().traits.recurrent_state:
        return config
    return replace(config, memory=replace(config.memory, state_spacing=setting.page_size))


def _head(setting: Setting, model: Decoder) -> Head | None:
    if not setting.shape.pair:
        return None
    made: dict[str, Callable[[], Head]] = {"half": lambda: HalfHead(model), "sure": lambda: TargetHead(model)}
    return made[setting.head]() if setting.head in made else make_head(setting.head, model)


def _new_stop_finder(stops: tuple[str, ...], in_special: bool) -> StopFinder:
    return StopFinder(TOKENIZER, stops, skip_special=not in_special)


# --- prompts ---------------------------------------------------------------------------------------------------


def repetitive(number: int, seed: int = 50, length: int = 14) -> list[tuple[int, ...]]:
    """Prompts that say the same thing again and again, after a first token nobody looks at."""
    return [(NULL, *(prompt * length)[: length - 1]) for prompt in prompts(*[4] * number, seed=seed)]


# --- the reference ---------------------------------------------------------------------------------------------


def text_of(tokens: Sequence[int], in_special: bool = False) -> str:
    """What the tiny vocabulary's tokens say."""
    num_special = len(CONTROL)
    shown = CONTROL if in_special else [""] * num_special
    return "".join(shown[token] if token < num_special else chr(token - num_special) for token in tokens)


def expected(submit: Submit, kind: str = "forgetful") -> tuple[tuple[int, ...], str, int | str | None]:
    """What a request must return, why it ends, and the stop it met."""
    output, reason = slow_output(kind, replace(submit, stop=()))
    for end in range(submit.min_new_tokens + 1, len(output) + 1 if submit.stop else 0):
        if reason == "stop" and end == len(output):
            break  # a stop id comes before a text that the same token completes
        said = text_of(output[submit.min_new_tokens : end], submit.stop_in_special)
        found = [(said.index(stop) + len(stop), -len(stop), stop) for stop in submit.stop if stop in said]
        if found:
            return output[:end], "stop", min(found)[2]
    return output, reason, output[-1] if reason == "stop" else None


def assert_exact(served: Served, submit: Submit, kind: str = "forgetful") -> None:
    """A request's output, its end and its logprobs are the reference's."""
    name, (output, reason, matched) = submit.request_id, expected(submit, kind)
    end = served.finish(name)
    assert (name, served.output(name)) == (name, output)
    assert (name, end.reason, end.matched) == (name, reason, matched)
    assert end.usage.completion_tokens == len(output)
    _assert_logprobs(served, submit, output, kind)


def _assert_logprobs(served: Served, submit: Submit, output: tuple[int, ...], kind: str) -> None:
    """Every log-probability that was asked for came, once, and is the reference's."""
    name, tokens, prompt_len = submit.request_id, submit.tokens + output, len(submit.tokens)
    places: dict[int, TokenLogprob] = {}
    for event in served.events:
        if isinstance(event, PromptLogprobs) and event.request_id == name:
            assert event.start == max(places, default=event.start - 1) + 1
            places |= {event.start + i: entry for i, entry in enumerate(event.logprobs)}
    start = submit.prompt_logprobs_from
    assert list(places) == ([] if start is None else list(range(start + 1, prompt_len))), name
    events = [event for event in served.events if isinstance(event, Tokens) and event.request_id == name]
    own = [entry for event in events for entry in event.logprobs]
    assert len(own) == (0 if submit.num_top_logprobs is None else len(output)), name
    places |= {prompt_len + i: entry for i, entry in enumerate(own)}
    if not places:
        return
    rows = slow_logprobs(kind, tokens)
    for place, entry in places.items():
        row = rows[place - 1]
        best = (-row).argsort(kind="stable")[: submit.num_top_logprobs or 0]
        assert entry.logprob == pytest.approx(row[tokens[place]], abs=NEAR), (name, place)
        assert [token for token, _ in entry.top_logprobs] == best.tolist(), (name, place)
        assert [value for _, value in entry.top_logprobs] == pytest.approx(row[best], abs=NEAR), (name, place)
