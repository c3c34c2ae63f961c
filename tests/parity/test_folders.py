"""A folder that transformers saved, whole or in shards, gives the same logits as the model it was saved from."""

from pathlib import Path

import pytest
import torch

from roost.weights.folder import INDEX, SINGLE_FILE
from roost.weights.load import load_model, open_source
from tests.support.tiny_models import CPU, KINDS, prompts, tiny
from tests.support.workload import logits_in_one_pass, reference_logits


@pytest.mark.parametrize("shard_len", ["1GB", "40KB"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_gives_the_same_logits(kind: str, shard_len: str, tmp_path: Path) -> None:
    tiny(kind).reference.save_pretrained(tmp_path, max_shard_size=shard_len)
    assert (tmp_path / INDEX).exists() == (shard_len == "40KB") != (tmp_path / SINGLE_FILE).exists()
    model = load_model(open_source(tmp_path), weights="fp32", device=CPU)
    (prompt,) = prompts(30, seed=15)
    torch.testing.assert_close(logits_in_one_pass(model, prompt), reference_logits(kind, prompt), atol=1e-4, rtol=1e-4)
