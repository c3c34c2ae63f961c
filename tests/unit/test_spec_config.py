"""Options of speculation: what is absent is filled in, and what cannot work or would be ignored is refused."""

import pytest

from roost.attention.registry import TRITON
from roost.config.options import EngineConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.config.speculation import drafter_of, lookup_of, spec_shape
from roost.drafters import registry
from roost.drafters.registry import EAGLE, EAGLE3, NGRAM
from roost.errors import ConfigError
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from tests.support.spec_configs import AUTO_CHAIN, AUTO_JOINT, AUTO_NGRAM

HEAD = "some/head"


def _eagle(**options: int | str) -> SpecConfig:
    return SpecConfig(spec="eagle", draft=HEAD, **options)  # type: ignore[arg-type]


def _ngram(steps: int) -> SpecShape:
    return SpecShape(steps=steps, topk=1, tokens=steps + 1, reads_history=True)


def _shape(steps: int, topk: int, tokens: int) -> SpecShape:
    """Of a head beside which drafts are looked up, as many as it drafts one after the other."""
    joined = {"reads_history": steps > 0, "lookup_steps": steps}
    return SpecShape(steps=steps, topk=topk, tokens=tokens, draft_kv=DraftKv.PAIR, **joined)


def _alone(steps: int, topk: int, tokens: int) -> SpecShape:
    return SpecShape(steps=steps, topk=topk, tokens=tokens, draft_kv=DraftKv.PAIR)


@pytest.fixture(autouse=True)
def _drafters_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of the three is tested, whatever other drafters there are."""
    monkeypatch.setattr(registry, "DRAFTERS", (registry.NGRAM, registry.EAGLE, registry.EAGLE3))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (SpecConfig(), PLAIN),
        (SpecConfig(spec="auto"), AUTO_NGRAM),  # without a head: n-gram
        (SpecConfig(spec="ngram"), AUTO_NGRAM),  # at most: the length is chosen by cost
        (SpecConfig(spec="ngram", spec_steps="auto"), AUTO_NGRAM),
        (SpecConfig(spec="ngram", spec_steps=7, spec_topk=1), _ngram(7)),
        (_eagle(), AUTO_JOINT),
        (_eagle(spec_lookup="own"), AUTO_JOINT),
        (_eagle(spec_lookup="off"), AUTO_CHAIN),
        (_eagle(spec_steps="auto", spec_topk=1), AUTO_JOINT),
        (_eagle(spec_tokens=5), _shape(4, 1, 5)),
        (SpecConfig(spec="eagle3", draft=HEAD, draft_layer_ids="vllm"), AUTO_JOINT),
        (_eagle(spec_steps=3), _shape(3, 1, 4)),
        (_eagle(spec_steps=3, spec_lookup="off"), _alone(3, 1, 4)),
        (_eagle(spec_steps=2, spec_topk=2, spec_lookup="off"), _alone(2, 2, 7)),
        (_eagle(spec_steps=0), _shape(0, 1, 1)),  # a drafter that only keeps up
        (_eagle(spec_topk=4), _shape(4, 4, 16)),
        (_eagle(spec_topk=2, spec_steps=2), _shape(2, 2, 7)),  # fewer candidates than 15: 2 + 1 * 4
        (_eagle(spec_topk=8, spec_steps=5, spec_tokens=32), _shape(5, 8, 32)),
    ],
    ids=str,
)
def test_absent_values_are_filled_in(config: SpecConfig, shape: SpecShape) -> None:
    assert spec_shape(config) == shape
    assert resolve(EngineConfig(spec=config), ModelTraits(vocab_size=100)).spec == shape


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SpecConfig(spec="medusa"), r"^--spec must be one of none, ngram, eagle, eagle3, auto, got medusa$"),
        (
            SpecConfig(spec="auto", draft=HEAD),
            r"^--draft some/head: which drafter .* is not known; give --spec eagle or eagle3$",
        ),
        (SpecConfig(spec="eagle"), r"^--spec eagle needs --draft, the folder of its head$"),
        (SpecConfig(spec="eagle3"), r"^--spec eagle3 needs --draft, the folder of its head$"),
        (SpecConfig(spec="ngram", draft=HEAD), r"^--draft is for --spec eagle, eagle3 or auto, got --spec ngram$"),
        (SpecConfig(draft=HEAD), r"^--draft some/head: which drafter .* is not known; give --spec eagle or eagle3$"),
        (SpecConfig(spec="none", draft=HEAD), r"^--draft is for --spec eagle, eagle3 or auto, got --spec none$"),
        (SpecConfig(spec_steps=3), r"^--spec-steps is for --spec ngram, eagle, eagle3 or auto, got --spec none$"),
        (SpecConfig(spec_topk=1), r"^--spec-topk is for --spec ngram, eagle, eagle3 or auto, got --spec none$"),
        (SpecConfig(spec_tokens=1), r"^--spec-tokens is for --spec ngram, eagle, eagle3 or auto, got --spec none$"),
        (SpecConfig(spec_max_batch=4), r"^--spec-max-batch is for --spec ngram, .* or auto, got --spec none$"),
        (SpecConfig(draft_layer_ids="vllm"), r"^--draft-layer-ids is for --spec eagle3, got --spec none$"),
        (
            SpecConfig(spec="ngram", draft_layer_ids="vllm"),
            r"^--draft-layer-ids is for --spec eagle3, got --spec ngram$",
        ),
        (
            SpecConfig(spec="eagle", draft=HEAD, draft_layer_ids="vllm"),
            r"^--draft-layer-ids is for --spec eagle3, got --spec eagle$",
        ),
        (
            SpecConfig(spec="eagle3", draft=HEAD, draft_layer_ids="hf"),
            r"^--draft-layer-ids must be sglang or vllm, got hf$",
        ),
        (
            SpecConfig(spec="ngram", spec_topk=2),
            r"^--spec-topk must be 1 for --spec ngram, which drafts .*, got 2$",
        ),
        (SpecConfig(spec="auto", spec_topk=2), r"^--spec-topk must be 1 for --spec ngram, which drafts .*, got 2$"),
        (SpecConfig(spec="ngram", spec_steps=0), r"^--spec-steps must be at least 1 for --spec ngram, got 0$"),
        (
            _eagle(spec_steps="auto", spec_topk=4),
            r"^--spec-steps auto is for chains of any length, got --spec-topk 4: give a number$",
        ),
        (
            _eagle(spec_steps="auto", spec_tokens=7),
            r"^--spec-steps auto is for chains of any length, got --spec-tokens 7: give a number$",
        ),
        (SpecConfig(spec_steps="auto"), r"^--spec-steps is for --spec ngram, .* or auto, got --spec none$"),
        (SpecConfig(spec="ngram", spec_steps="many"), r"^--spec-steps must be a number or auto, got many$"),
        (_eagle(spec_steps=-1), r"^--spec-steps must be at least 0, got -1$"),
        (_eagle(spec_topk=0), r"^--spec-topk must be at least 1, got 0$"),
        (_eagle(spec_tokens=4), r"^--spec-tokens must be --spec-steps \+ 1 = 5 for a chain \(--spec-topk 1\), got 4$"),
        (_eagle(spec_topk=2, spec_tokens=16), r"^--spec-tokens must be in \[2, 15\]: .* has 14 candidates .*, got 16$"),
        (_eagle(spec_max_batch=0), r"^--spec-max-batch must be at least 1, got 0$"),
        (SpecConfig(spec_lookup="own"), r"^--spec-lookup is for --spec ngram, eagle, eagle3 or auto, got --spec none$"),
        (_eagle(spec_lookup="far"), r"^--spec-lookup must be one of shared, own, off, got far$"),
        (SpecConfig(spec="ngram", spec_lookup="off"), r"^--spec-lookup off leaves --spec ngram nothing to draft: .*$"),
        (_eagle(spec_steps=0, spec_lookup="own"), r"^--spec-lookup own needs --spec-steps of at least 1: without"),
        (_eagle(spec_steps=0, spec_max_batch=2), r"^--spec-max-batch needs --spec-steps of at least 1: without drafts"),
    ],
    ids=str,
)
def test_an_option_that_cannot_work_or_would_be_ignored_is_refused_with_its_flag(
    config: SpecConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(spec=config), ModelTraits(vocab_size=100))


def test_auto_without_a_head_is_ngram_and_the_others_are_themselves() -> None:
    configs = (SpecConfig(), SpecConfig(spec="auto"), _eagle(), SpecConfig(spec="eagle3", draft=HEAD))
    assert [drafter_of(config) for config in configs] == [None, NGRAM, EAGLE, EAGLE3]


def test_the_shape_of_rounds_says_what_their_drafter_declares() -> None:
    ngram, eagle = spec_shape(SpecConfig(spec="ngram")), spec_shape(_eagle())
    assert (ngram.reads_history, ngram.draft_kv) == (True, DraftKv.NONE)
    assert (eagle.reads_history, eagle.draft_kv) == (True, DraftKv.PAIR)  # drafts are looked up beside it
    alone = spec_shape(_eagle(spec_lookup="off"))
    assert (alone.reads_history, alone.draft_kv) == (False, DraftKv.PAIR)
    assert not PLAIN.reads_history


def test_the_batch_limit_reaches_the_engine() -> None:
    traits = ModelTraits(vocab_size=100)
    assert resolve(EngineConfig(spec=_eagle(spec_max_batch=3)), traits).widths.limit == 3
    assert resolve(EngineConfig(spec=_eagle()), traits).widths.limit is None


@pytest.mark.parametrize(
    ("config", "is_auto"),
    [
        (SpecConfig(), False),
        (SpecConfig(spec="ngram"), True),
        (_eagle(), True),
        (_eagle(spec_steps="auto", spec_max_batch=8), True),
        (_eagle(spec_steps=4), False),
        (_eagle(spec_steps=0), False),
        (_eagle(spec_topk=2), False),
        (_eagle(spec_tokens=5), False),
    ],
    ids=str,
)
def test_the_length_is_chosen_by_cost_where_a_chain_has_none_stated(config: SpecConfig, is_auto: bool) -> None:
    resolved = resolve(EngineConfig(spec=config), ModelTraits(vocab_size=100))
    assert resolved.widths.is_auto == is_auto
    assert resolved.widths.of(1) == ((1, 2, 3, 4, 5, 7) if is_auto else (resolved.spec.tokens,))


@pytest.mark.parametrize(
    ("config", "lookup"),
    [
        (SpecConfig(), "off"),
        (SpecConfig(spec="ngram"), "shared"),
        (SpecConfig(spec="ngram", spec_lookup="own"), "own"),
        (_eagle(), "shared"),
        (_eagle(spec_topk=4), "shared"),
        (_eagle(spec_steps=3, spec_lookup="own"), "own"),
        (_eagle(spec_lookup="off"), "off"),
    ],
    ids=str,
)
def test_drafts_are_looked_up_in_what_all_say_unless_told(config: SpecConfig, lookup: str) -> None:
    assert lookup_of(config) == lookup
    assert resolve(EngineConfig(spec=config), ModelTraits(vocab_size=100)).lookup == lookup


@pytest.mark.parametrize(
    ("config", "narrows"),
    [
        (SpecConfig(), False),
        (SpecConfig(spec="ngram"), True),
        (SpecConfig(spec="ngram", spec_steps=4), False),
        (_eagle(), True),
        (_eagle(spec_steps=4), False),
        (_eagle(spec_topk=2), False),
        (_eagle(spec_lookup="off"), False),
    ],
    ids=str,
)
def test_rounds_are_narrowed_where_the_host_computes_and_the_length_is_chosen(
    config: SpecConfig, narrows: bool
) -> None:
    engine, traits = EngineConfig(spec=config), ModelTraits(vocab_size=100)
    assert resolve(engine, traits).widths.narrows == narrows
    assert not resolve(engine, traits, on_host=False).widths.narrows
    assert not resolve(engine, traits, TRITON).widths.narrows  # what is captured has its width
