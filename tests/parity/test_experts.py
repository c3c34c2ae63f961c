"""Mixtures of experts in every form of weights: a token's bits are its own, and what cannot be run is refused."""

from dataclasses import replace

import pytest
import torch

from roost.errors import ConfigError
from roost.layers.experts import Experts, Routed, best_experts
from roost.layers.linear import make_linear
from roost.layers.ops import TORCH_OPS
from roost.models.decoder import Decoder
from roost.models.registry import decoder_config
from tests.support.tiny_models import CPU, Served, configure, prompts, tiny
from tests.support.workload import logits_in_one_pass

KIND = "qwen3-moe"


@pytest.mark.parametrize("kind", [KIND, "gpt-oss"])
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_an_output_does_not_depend_on_who_runs_beside_it(weights: str, kind: str) -> None:
    asked = prompts(21, 5, 34, 13, seed=5)
    model = Decoder(tiny(kind).config, tiny(kind).reference.state_dict(), weights, CPU)
    together = Served(model, configure(chunk=6))
    for number, prompt in enumerate(asked):
        together.submit(str(number), prompt, 20)
    together.run()
    for number, prompt in enumerate(asked):
        alone = Served(model, configure())
        alone.submit("r", prompt, 20)
        alone.run()
        assert alone.output("r") == together.output(str(number))
        alone.executor.close()
    together.executor.close()


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_what_experts_say_of_a_token_has_the_same_bits_in_any_batch(weights: str) -> None:
    state = {name: each.float() for name, each in tiny(KIND).reference.state_dict().items()}
    gate_up, down = (state[f"model.layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    experts = Experts(
        gate_up=[make_linear(each, None, weights) for each in gate_up],
        down=[make_linear(each, None, weights) for each in down],
        activation="silu",
        stacked=None,
    )
    generator = torch.Generator().manual_seed(6)
    normed, scores = (torch.randn(60, width, generator=generator) for width in (48, 5))
    whole = TORCH_OPS.mix_experts(normed, best_experts(scores, 2, is_normed=True), experts)
    for first, end in ((0, 1), (0, 7), (20, 53)):
        routed = best_experts(scores[first:end], 2, is_normed=True)
        assert torch.equal(TORCH_OPS.mix_experts(normed[first:end], routed, experts), whole[first:end])


@pytest.mark.parametrize("kind", [KIND, "gpt-oss"])
def test_int8_experts_say_nearly_what_floats_say(kind: str) -> None:
    (prompt,) = prompts(40, seed=7)
    state, config = tiny(kind).reference.state_dict(), tiny(kind).config
    floats, whole = (logits_in_one_pass(Decoder(config, state, form, CPU), prompt) for form in ("fp32", "int8"))
    # of most tokens: one whose experts are chosen otherwise is far off
    assert (floats - whole).abs().median() < 0.1 * floats.std()


def test_the_best_of_equal_scores_are_the_first_ones_and_shares_are_normed_where_that_is_asked_for() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 9.0]])
    for is_normed in (False, True):
        routed = best_experts(scores, 2, is_normed=is_normed)
        assert routed.ids.tolist() == [[1, 2], [3, 0]]
        chances = scores.softmax(dim=-1).gather(1, routed.ids)
        wanted = chances / chances.sum(dim=-1, keepdim=True) if is_normed else chances
        torch.testing.assert_close(routed.shares, wanted)


def test_a_backend_that_needs_matrices_side_by_side_refuses_other_forms_by_the_flag() -> None:
    def mix(normed: torch.Tensor, routed: Routed, experts: Experts) -> torch.Tensor:
        assert experts.stacked is not None
        return TORCH_OPS.mix_experts(normed, routed, experts)

    ops, state = replace(TORCH_OPS, mix_experts=mix), tiny(KIND).reference.state_dict()
    Decoder(tiny(KIND).config, state, "bf16", CPU, ops)
    with pytest.raises(ConfigError, match="--weights int8: this backend runs a mixture of experts in fp32 or bf16"):
        Decoder(tiny(KIND).config, state, "int8", CPU, ops)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_experts_per_tok": 6}, "6 of 5 experts"),
        ({"num_local_experts": 4}, r"mlp\.gate\.weight is \[5, 48\], its config says \[4, 48\]"),
        ({"moe_intermediate_size": 20}, r"experts\.gate_up_proj is \[5, 48, 48\], its config says \[5, 40, 48\]"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(changed: dict[str, object], said: str) -> None:
    made = tiny(KIND)
    with pytest.raises(ConfigError, match=said):
        Decoder(decoder_config({**made.config_json, **changed}), made.reference.state_dict(), "fp32", CPU)


def test_an_expert_too_many_is_refused_by_name() -> None:
    made = tiny(KIND)
    extra = {"model.layers.1.mlp.experts.9.up_proj.weight": torch.zeros(24, 48)}
    with pytest.raises(ConfigError, match=r"does not use: model\.layers\.1\.mlp\.experts\.9\.up_proj\.weight"):
        Decoder(made.config, made.reference.state_dict() | extra, "fp32", CPU)
