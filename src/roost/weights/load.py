"""From files to a model: a checkpoint on disk, and the family that puts its tensors together.

A GGUF file and a Hugging Face folder look the same from here. An error of any part names the file, the key or the
tensor. Called at start-up, and by tools that want a model without a server.
"""

from pathlib import Path

import torch

from roost.errors import ConfigError
from roost.layers.ops import TORCH_OPS, Ops
from roost.models.decoder import Decoder
from roost.models.registry import decoder_config
from roost.weights.folder import Folder
from roost.weights.source import Source


def open_source(path: Path) -> Source:
    """The checkpoint at a path: a folder, or a GGUF file."""
    if path.is_dir():
        return Folder(path)
    if path.suffix != ".gguf":
        raise ConfigError(f"--model: {path} is neither a folder nor a .gguf file")
    from roost.weights.gguf import GgufFile  # noqa: PLC0415 (the one part that needs the gguf package)

    return GgufFile(path)


def load_model(source: Source, *, weights: str, device: torch.device, ops: Ops = TORCH_OPS) -> Decoder:
    """The model of a checkpoint, its weights kept as `weights` says."""
    config = decoder_config(source.config())  # before the tensors: it says best why a checkpoint does not fit
    return Decoder(config, source, weights, device, ops)
