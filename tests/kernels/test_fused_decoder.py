"""A decoder whose projections are fused with their neighbours gives the hidden states of one whose are not."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roost.layers.ops import TORCH_OPS
from roost.layers.rotary import CosSin, Rope
from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.tensor_names import NormNames
from tests.support.canaries import assert_near

ours = pytest.importorskip("roost.kernels.ops")

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 20
PLAIN = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=WIDE,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    context_max=64,
    layers=(LayerKind(rope=Rope(theta=700.0)),) * LAYERS,
    scale=HEAD_DIM**-0.5,
    norm_eps=1e-2,  # large, so that a wrong one shows
    tied=True,
)
NORMS_AFTER = NormNames(after_attention="after_attention", before_feed="before_feed", after_feed="after_feed")
CONFIGS = {
    "plain": PLAIN,
    "biased": replace(PLAIN, qkv_bias=True, out_bias=True),
    "qk_norm": replace(PLAIN, qk_norm=True),
    "norms_after": replace(PLAIN, norms=NORMS_AFTER, activation="gelu_pytorch_tanh"),
}


def state_of(config: DecoderConfig) -> dict[str, Tensor]:
    """Random weights that bfloat16 holds exactly."""
    generator, query, kv = torch.Generator().manual_seed(7), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {"self_attn.q": (query, HIDDEN), "self_attn.k": (kv, HIDDEN), "self_attn.v": (kv, HIDDEN)}
    matrices |= {"self_attn.o": (HIDDEN, query), "mlp.gate": (WIDE, HIDDEN), "mlp.up": (WIDE, HIDDEN)}
    matrices |= {"mlp.down": (HIDDEN, WIDE)}
    state = {"model.embed_tokens.weight": torch.randn((VOCAB, HIDDEN), generator=generator)}
    state["model.norm.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    norms = (config.norms.before_attention, config.norms.before_feed)
    norms += tuple(name for name in (config.norms.after_attention, config.norms.after_feed) if name)
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        for name, shape in matrices.items():
            state[f"{layer}{name}_proj.weight"] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            if config.qkv_bias and name.startswith("self_attn"):
                state[f"{layer}{name}_proj.bias"] = torch.randn(shape[0], generator=generator)
        for name in norms:
            state[f"{layer}{name}.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
        if config.qk_norm:
            for name in "qk":
                state[f"{layer}self_attn.{name}_norm.weight"] = torch.rand(HEAD_DIM, generator=generator) + 0.5
    return {name: tensor.to(torch.bfloat16).to(torch.float32) for name, tensor in state.items()}


def attend(_number: int, qk: Tensor, value: Tensor, _cos_sin: CosSin, _sinks: Tensor | None) -> Tensor:
    """Stands in for attention: every token reads itself alone, through all its heads."""
    return qk[:, :HEADS] + value.repeat_interleave(HEADS // KV_HEADS, dim=1)


def run(model: Decoder, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Last hidden states, what goes into the second layer, and what comes out of it."""
    tokens = torch.arange(num_tokens, device=device)
    last, aux = model.forward_with_aux(tokens, tokens, attend, (1, LAYERS))
    return model.logits(last), *aux


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_fused_decoder_equals_the_reference(kind: str, num_tokens: int, device: torch.device) -> None:
    config, state = CONFIGS[kind], state_of(CONFIGS[kind])
    exact = run(Decoder(config, state, "fp32", device, TORCH_OPS), num_tokens, device)
    fused = run(Decoder(config, state, "bf16", device, ours.TRITON_OPS), num_tokens, device)
    for mine, reference in zip(fused, exact, strict=True):
        scale = reference.abs().max()
        assert_near((mine / scale), (reference / scale).to(torch.bfloat16), steps=4.0)


@pytest.mark.parametrize(("num_tokens", "norms"), [(1, ["last"]), (3, ["first", "last"])])
def test_no_norm_between_projections_is_a_kernel_of_its_own(
    num_tokens: int, norms: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder(PLAIN, state_of(PLAIN), "bf16", device, ours.TRITON_OPS)
    named = {id(model._norm): "last", id(model._layers[0].first_norm): "first"}
    real, seen = ours.rms_norm, []

    def spy(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        seen.append(named.get(id(weight), "between"))
        normed: Tensor = real(hidden, weight, eps)
        return normed

    monkeypatch.setattr(ours, "rms_norm", spy)
    monkeypatch.setattr(ours, "add_rms_norm", None)
    tokens = torch.arange(num_tokens, device=device)
    model.forward(tokens, tokens, attend)
    assert seen == norms
