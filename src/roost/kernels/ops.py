"""The operations of a decoder in Triton: one form for all of them, as `layers.ops` has one in torch.

Chosen at start-up, beside the attention backend of the same name. Called by models.
"""

from roost.kernels.argmax import argmax
from roost.kernels.cos_sin import cos_sin
from roost.kernels.gated_activation import gate_up
from roost.kernels.norm import add_rms_norm, rms_norm
from roost.kernels.rounds import chain_inputs, chain_places, settle_chains
from roost.layers.ops import Ops

TRITON_OPS = Ops(
    norm=rms_norm,
    add_norm=add_rms_norm,
    gate_up=gate_up,
    argmax=argmax,
    cos_sin=cos_sin,
    chain_inputs=chain_inputs,
    chain_places=chain_places,
    settle_chains=settle_chains,
)
