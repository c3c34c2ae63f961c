"""Source: a checkpoint on disk, whatever its format.

Tensors are read one at a time, when they are looked up, so that loading needs little more memory than the model keeps.
Implemented by the folder and the GGUF file; called by `load`.
"""

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from roost.text.language import Language


class Source(Mapping[str, Tensor]):
    """A checkpoint: tensors by their Hugging Face names, its config, its tokenizer and chat template."""

    @abstractmethod
    def config(self) -> dict[str, object]:
        """The contents of its config.json, or of the one it would have."""

    @abstractmethod
    def language(self) -> Language:
        """Its tokenizer and chat template."""
