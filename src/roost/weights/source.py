"""Source: a checkpoint on disk, whatever its format.

Tensors are read one at a time, when they are looked up, so that loading needs little more memory than the model keeps.
A quantised matrix is found under its name, `….weight`, like any other, as the floats that it stands for; `quantised`
gives it as it is kept. Implemented by the folders and the GGUF file; called by `load`.
"""

from abc import abstractmethod

import torch

from roost.layers.quantised import QuantisedWeight
from roost.models.parts import Shape
from roost.models.tensors import QuantisedState
from roost.text.language import Language


class Source(QuantisedState):
    """A checkpoint: tensors by their Hugging Face names, its config, its tokenizer and chat template."""

    @abstractmethod
    def config(self) -> dict[str, object]:
        """The contents of its config.json, or of the one it would have."""

    @abstractmethod
    def language(self) -> Language:
        """Its tokenizer and chat template."""

    @property
    def form(self) -> str | None:
        """None: it has no quantised matrices."""
        return None

    @property
    def stored_form(self) -> str | None:
        """A form in which its matrices can be kept as they are stored, although they stand for floats otherwise."""
        return None

    def quantised(self, name: str, device: torch.device, shape: Shape | None = None) -> QuantisedWeight | None:
        """None: no matrix is quantised."""
        return None

    def warnings(self) -> tuple[str, ...]:
        """What its user should know of how it is read."""
        return ()
