"""Random MTP heads for the tiny hybrids: checkpoints with one in them, and a pass of it by transformers' layers.

Used by the parity tests.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.weights.draft import load_own_head
from roost.weights.folder import Folder
from tests.support.tiny_models import DEVICE, tiny

SAYS_SO = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}  # what a config.json says of one


class Mtp(nn.Module):
    """A head, by the names of its tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        config = tiny(kind).reference.config
        number, size = config.layer_types.index("full_attention"), config.hidden_size
        layer = Qwen3_5MoeDecoderLayer if kind.endswith("moe") else Qwen3_5DecoderLayer
        self.fc = nn.Linear(2 * size, size, bias=False)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, Qwen3_5RMSNorm(size, eps=config.rms_norm_eps))
        self.layers = nn.ModuleList([layer(config, number)])

    @torch.no_grad()
    def run(self, kind: str, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden states over a sequence: tokens 1 to n, and the target's hidden states 0 to n - 1."""
        reference, positions = tiny(kind).reference, torch.arange(len(tokens))[None]
        embedded = self.pre_fc_norm_embedding(reference.get_input_embeddings()(tokens))
        inputs = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], dim=-1))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        angles = reference.model.rotary_emb(inputs, positions.expand(3, 1, -1))
        last = self.norm(self.layers[0](inputs, angles, attention_mask=mask, position_ids=positions))[0]
        return reference.get_output_embeddings()(last), last


@cache
def mtp(kind: str) -> Mtp:
    """A random one."""
    torch.manual_seed(11)
    head = Mtp(kind)
    for name, weight in head.named_parameters():
        bound = 0.5 if "norm" in name else 0.3
        nn.init.uniform_(weight, -bound, bound)
    return head.eval()


def write_mtp(folder: Path, kind: str, *, whole: bool = True) -> Path:
    """A checkpoint with a head in it; not `whole`, of the head alone."""
    (folder / "config.json").write_text(json.dumps({**tiny(kind).config_json, **SAYS_SO}))
    tensors = {f"mtp.{name}": tensor for name, tensor in mtp(kind).state_dict().items()}
    if whole:
        tensors |= tiny(kind).reference.state_dict()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make_mtp(kind: str, model: Decoder, weights: str = "fp32") -> Head:
    """The head of a tiny hybrid, by way of its file."""
    with TemporaryDirectory() as folder:
        source = Folder(write_mtp(Path(folder), kind, whole=False))
        return load_own_head(source, "mtp", model, weights=weights, device=DEVICE)
