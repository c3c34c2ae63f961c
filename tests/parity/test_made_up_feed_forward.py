"""A family that only swaps the feed-forward: a reader of its config, one function, and one entry.

Llama with experts, two of which each token goes through. The reference is transformers' Llama with such a module in
the place of each layer's feed-forward.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from roost.errors import ConfigError
from roost.models import registry
from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, Feed, FeedForward, Loader, feed_forward_of_normed
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import plain_decoder, uniform_layers
from roost.weights.folder import CONFIG, SINGLE_FILE
from roost.weights.load import load_model, open_source
from tests.support.tiny_models import DEVICE, SHAPE, Served, configure, ops, prompts

NUM_EXPERTS, PER_TOKEN = 4, 2

# --- the family: what a contributor writes ---------------------------------------------------------------------


def experts(loader: Loader, prefix: str, num_experts: int, per_token: int, wide: int) -> FeedForward:
    """A weighted sum of the few experts that a router picks for each token."""
    hidden, act = loader.config.hidden_size, loader.config.activation
    router = loader.linear((f"{prefix}mlp.router",), (num_experts,), hidden, bias=False)
    each = [
        (
            loader.linear((f"{of}.gate", f"{of}.up"), (wide, wide), hidden, bias=False),
            loader.linear((f"{of}.down",), (hidden,), wide, bias=False),
        )
        for of in (f"{prefix}mlp.experts.{number}" for number in range(num_experts))
    ]

    def said_of(normed: Tensor) -> Tensor:
        best = router(normed).topk(per_token, dim=-1)
        shares = torch.zeros_like(router(normed)).scatter(1, best.indices, best.values.softmax(dim=-1))
        said = [down(loader.ops.gate_up(gate_up(normed), act)) for gate_up, down in each]
        return (torch.stack(said, dim=-1) * shares[:, None]).sum(dim=-1)

    return feed_forward_of_normed(loader, said_of)


def read_config(fields: Fields) -> DecoderConfig:
    """Llama's config, and the experts'."""
    plain = plain_decoder(fields, uniform_layers(fields, window=None), reads=("num_local_experts",))
    per_token, wide = fields.integer("num_experts_per_tok"), plain.intermediate_size
    make = partial(experts, num_experts=fields.integer("num_local_experts"), per_token=per_token, wide=wide)
    return replace(plain, feed_forward=make, feeds=(Feed(width=wide, active=per_token),))


FAMILY = Family(
    architectures=("LlamaOfExpertsForCausalLM",),
    draft_hooks=True,
    read_config=read_config,
    load=Decoder,
)

# --- its reference ---------------------------------------------------------------------------------------------


class Expert(Module):
    """One gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        hidden, wide = SHAPE["hidden_size"], SHAPE["intermediate_size"]
        self.gate, self.up = (Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = Linear(wide, hidden, bias=False)

    def forward(self, normed: Tensor) -> Tensor:
        """Of all tokens."""
        return self.down(silu(self.gate(normed)) * self.up(normed))


class Experts(Module):
    """Several, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Linear(SHAPE["hidden_size"], NUM_EXPERTS, bias=False)
        self.experts = ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def forward(self, normed: Tensor) -> Tensor:
        """Each token through its own."""
        rows = []
        for token in normed.flatten(0, -2):
            values, ids = self.router(token).sort(descending=True)
            shares = values[:PER_TOKEN].softmax(dim=0)
            rows.append(sum(share * self.experts[i](token) for share, i in zip(shares, ids.tolist(), strict=False)))
        return torch.stack(rows).view_as(normed)


def reference() -> LlamaForCausalLM:
    """A random checkpoint."""
    torch.manual_seed(9)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for layer in model.model.layers:
        layer.mlp = Experts()
        for weight in layer.mlp.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the checkpoint, with the family in the registry."""
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, FAMILY))
    model = reference()
    extra = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": PER_TOKEN}
    config = {**model.config.to_dict(), **extra, "architectures": list(FAMILY.architectures)}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / SINGLE_FILE)
    return tmp_path


def test_it_loads_from_its_folder_and_serves_what_its_reference_generates(folder: Path) -> None:
    model = load_model(open_source(folder), weights="fp32", device=DEVICE, ops=ops())
    assert model.activation_width == 2 * PER_TOKEN * SHAPE["intermediate_size"]
    served, asked, other = Served(model, configure(chunk=5)), prompts(13, 4, 22), reference()
    for number, prompt in enumerate(asked):
        served.submit(str(number), prompt, 12)
    served.run()
    for number, prompt in enumerate(asked):
        with torch.no_grad():
            wanted = other.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert served.output(str(number)) == tuple(wanted.tolist()), number


def test_a_family_that_reads_no_experts_refuses_them(folder: Path) -> None:
    config = {**json.loads((folder / CONFIG).read_text()), "architectures": ["LlamaForCausalLM"]}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="num_local_experts is 4, which is not supported"):
        load_model(open_source(folder), weights="fp32", device=DEVICE)
