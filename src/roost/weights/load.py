"""From files to a model: a checkpoint on disk, and the family that makes a model of its tensors.

A GGUF file and a Hugging Face folder look the same from here. Errors name the file, the key or the tensor. Called at
start-up, and by tools that need a model without a server.
"""

from pathlib import Path

import torch

from roost.errors import ConfigError
from roost.layers.ops import TORCH_OPS, Ops
from roost.models.decoder import Decoder
from roost.models.fields import Fields
from roost.models.model import Model
from roost.models.registry import decoder_config, find_family
from roost.models.shards import check_shards
from roost.weights.folder import Folder, read_config
from roost.weights.mxfp4 import Mxfp4Folder
from roost.weights.quantisation import MXFP4, read_quantisation
from roost.weights.quantised_folder import QuantisedFolder
from roost.weights.source import Source


def open_source(path: Path) -> Source:
    """The checkpoint at a path: a folder, or a GGUF file."""
    if path.is_dir():
        quantisation = read_quantisation(read_config(path))
        if quantisation is None:
            return Folder(path)
        return (Mxfp4Folder if quantisation.packing == MXFP4 else QuantisedFolder)(path, quantisation)
    if path.suffix != ".gguf":
        raise ConfigError(f"--model: {path} is neither a folder nor a .gguf file")
    from roost.weights.gguf import GgufFile  # noqa: PLC0415 (the one part that needs the gguf package)

    return GgufFile(path)


def load_model(source: Source, *, weights: str, device: torch.device, ops: Ops = TORCH_OPS) -> Model:
    """The model of a checkpoint, its weights kept as `weights` says; of a group's ranks each has its part."""
    family = find_family(source.config())
    config = family.read_config(Fields(source.config()))  # before the tensors: it says best why a checkpoint fails
    check_shards(config, ops.group.size)
    return family.load(config, source, weights, device, ops)


def load_decoder(source: Source, *, weights: str, device: torch.device, ops: Ops = TORCH_OPS) -> Decoder:
    """The same where the model must be a plain decoder; any other family is refused."""
    decoder_config(source.config())
    model = load_model(source, weights=weights, device=device, ops=ops)
    assert isinstance(model, Decoder), model
    return model
