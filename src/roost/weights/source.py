"""Source: a checkpoint on disk, whatever its format, and how its reading is reported.

Tensors are read one at a time when they are looked up, so that the peak is near one copy. Implemented by the folder
and the GGUF file; called by `load`.
"""

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from roost.progress import Progress
from roost.text.language import Language


class Source(Mapping[str, Tensor]):
    """Tensors by Hugging Face's names, and what else a checkpoint says."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self.total_bytes = total_bytes
        self.progress = progress
        self._done_bytes = 0

    @abstractmethod
    def config(self) -> dict[str, object]:
        """What its config.json says, or would say."""

    @abstractmethod
    def language(self) -> Language:
        """Its tokenizer and chat template."""

    def _read(self, num_bytes: int) -> None:
        """Another tensor was read."""
        self._done_bytes += num_bytes
        self.progress(self._done_bytes, self.total_bytes)
