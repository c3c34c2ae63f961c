"""Makes the drafter of a configuration, whichever it is.

The registry says where its function is; here is what that function gets. Called by the passes, once.
"""

from dataclasses import dataclass

from roost.attention.kv_cache import PageTable
from roost.attention.protocol import Attention
from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.drafters.joint import JointDrafter
from roost.drafters.lookup import Lookup
from roost.drafters.protocol import Drafter
from roost.errors import InvariantError
from roost.layers.gumbel import RowDraws
from roost.layers.ops import Ops
from roost.lazy_import import load_symbol
from roost.models.model import Head, Model
from roost.spec_shape import DraftKv


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What a drafter may be made of."""

    resolved: Resolved
    model: Model
    ops: Ops  # the model's, in the form that the device runs best
    head: Head | None  # never None where the drafter declares a head
    table: PageTable  # of the first book, which is the full one wherever a drafter keeps KV
    attention: Attention
    lookup: Lookup | None  # None: drafts are not looked up
    draws: RowDraws  # how the rows' tokens are drawn, so that drafts can be drawn alike
    device: Device
    is_host: bool  # whether the host computes: nothing runs beside it, or is captured

    @property
    def num_rows(self) -> int:
        """Rows by which a drafter keeps its state: those of requests, and the one that padding stands for."""
        return self.resolved.num_rows + 1


def make_drafter(parts: Parts) -> Drafter | None:
    """The drafter that was asked for; None without one."""
    kind = parts.resolved.drafter
    if kind is None:
        return None
    if kind.head is not None and parts.head is None:
        raise InvariantError(f"the drafter {kind.name} needs a head")
    layers = () if parts.head is None else parts.head.kv
    if any(kv.window is not None for kv in layers) or (layers and kind.draft_kv is DraftKv.NONE):
        raise InvariantError(f"the drafter {kind.name} declares {kind.draft_kv}, and its head has KV {layers}")
    drafter: Drafter = load_symbol(kind.make)(parts)
    if parts.lookup is None or not kind.joins_lookup:
        return drafter
    return JointDrafter(drafter, parts.lookup, parts.resolved.spec, is_host=parts.is_host)
