"""MTP heads: one layer of the model's own kind that comes within its checkpoint, and predicts one token further.

It reads the embedding of a token and the target's last hidden state in front of it, each through a norm, side by side;
its own last hidden states take the target's place when it goes on. Embedding and LM head are the target's. Loaded by
`weights.draft`, called by the EAGLE drafter.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from roost.layers.attention import Attend
from roost.layers.ops import Residual
from roost.models.decoder_layers import Loader
from roost.models.eagle import HeadConfig, LastHiddenHead
from roost.models.model import Model
from roost.models.tensors import Tensors

PREFIX = "mtp."  # what the names of its tensors begin with


class MtpHead(LastHiddenHead):
    """A head of one layer."""

    def __init__(
        self,
        config: HeadConfig,
        aux_layers: tuple[int, ...],
        state: Mapping[str, Tensor],
        model: Model,
        weights: str,
        device: torch.device,
    ) -> None:
        assert not aux_layers, "it reads the last hidden states"
        super().__init__(config.layers, model, weights, device)
        layers, tensors = self._config, Tensors(state, device, self.dtype)
        tensors.drop_if(lambda name: not name.startswith(PREFIX))  # the target's
        loader, hidden = Loader(layers, tensors, weights, model.ops), layers.hidden_size
        self._fc = loader.linear((f"{PREFIX}fc",), (hidden,), 2 * hidden, bias=False)
        self._embed_norm = loader.norm(f"{PREFIX}pre_fc_norm_embedding.weight")
        self._hidden_norm = loader.norm(f"{PREFIX}pre_fc_norm_hidden.weight")
        self._layer = loader.layer(f"{PREFIX}layers.0.", 0, kind=layers.layers[0])
        self._norm = loader.norm(f"{PREFIX}norm.weight")
        tensors.check_all_taken()

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden_size], behind its own last norm as the target's are."""
        eps, norm = self._config.norm_eps, self._ops.norm
        cos_sin = self._ops.cos_sin(positions, self._frequency, self.dtype)
        both = [norm(self._model.embed(tokens), self._embed_norm, eps), norm(hidden, self._hidden_norm, eps)]
        stream = Residual(self._ops.linear(self._ops.concat(both), self._fc))
        stream = self._stack.run(self._layer, 0, stream, cos_sin, attend)
        return self._ops.add_norm(stream, self._norm, eps)[1]
