"""From a folder to a model: config, tensors, and the family that puts them together.

Owns nothing; what it returns keeps no file open. An error of any part names the file, the key or the tensor. Called at
start-up, and by tools that want a model without a server.
"""

from pathlib import Path

import torch

from roost.models.decoder import Decoder
from roost.models.registry import decoder_config
from roost.weights.folder import Checkpoint, Progress, read_config, silent


def load_model(folder: Path, *, weights: str, device: torch.device, progress: Progress = silent) -> Decoder:
    """The model in a Hugging Face folder, its weights kept as `weights` says."""
    config = decoder_config(read_config(folder))  # before the tensors: it says best why a checkpoint does not fit
    checkpoint = Checkpoint(folder, progress)
    model = Decoder(config, checkpoint, weights, device)
    progress(checkpoint.total_bytes, checkpoint.total_bytes)  # what is known and dropped was never read
    return model
