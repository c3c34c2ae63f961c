"""A folder with quantised projections: every tensor is accounted for, and what does not fit is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from roost.errors import ConfigError
from roost.models.decoder import Decoder
from roost.weights.folder import SINGLE_FILE
from roost.weights.load import load_decoder, open_source
from roost.weights.quantised_folder import QuantisedFolder
from tests.support.fp8_folders import FORMATS, write_fp8

CPU = torch.device("cpu")
OUT = "model.layers.0.self_attn.o_proj"
State = dict[str, Tensor]


def changed(folder: Path, layout: str, change: Callable[[State], object]) -> Path:
    """A checkpoint whose tensors were changed after it was written."""
    write_fp8(folder, FORMATS[layout])
    state = load_file(folder / SINGLE_FILE)
    change(state)
    save_file(state, folder / SINGLE_FILE)
    return folder


CASES: list[tuple[str, Callable[[State], object], str]] = [
    (
        "compressed",
        lambda state: state.pop(f"{OUT}.weight_scale"),
        f"the checkpoint's {OUT}.weight has no weight_scale or weight_scale_inv, and its config does not list it",
    ),
    (
        "compressed",
        lambda state: state.pop(f"{OUT}.weight"),
        f"the checkpoint's {OUT}: it has weight_scale; weight and one of weight_scale, weight_scale_inv are needed",
    ),
    (
        "compressed",
        lambda state: state.update({f"{OUT}.weight_scale": torch.ones(47, 1)}),
        f"the checkpoint's {OUT}: it has 47 scales for 48 outputs; one is needed, or one for each",
    ),
    (
        "deepseek",
        lambda state: state.update({f"{OUT}.weight_scale_inv": torch.ones(3, 3)}),
        f"the checkpoint's {OUT}: its scales are [3, 3], blocks of [16, 32] need [3, 2]",
    ),
    (
        "compressed",
        lambda state: state.update({f"{OUT}.weight": torch.zeros(48, 48)}),
        f"the checkpoint's {OUT}: its weight is [48, 48] of torch.float32; a matrix of torch.float8_e4m3fn is needed",
    ),
    (
        "compressed",
        lambda state: state.update({f"{OUT}.weight": torch.zeros(48, 40).to(torch.float8_e4m3fn)}),
        f"the checkpoint's {OUT}.weight is [48, 40], its config says [48, 48]",
    ),
    (
        "compressed",
        lambda state: state.update({f"{OUT}.g_idx": torch.zeros(48)}),
        f"the checkpoint has tensors that this model does not use: {OUT}.g_idx",
    ),
    (
        "fbgemm",
        lambda state: state.update({"model.layers.1.self_attn.o_proj.weight_scale": torch.ones(48, 1)}),
        "the checkpoint's model.layers.1.self_attn.o_proj is quantised, although its config lists it as left out",
    ),
]


@pytest.mark.parametrize(("layout", "change", "said"), CASES)
def test_what_does_not_fit_is_refused_by_its_name(
    layout: str, change: Callable[[State], object], said: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, layout, change)
    with pytest.raises(ConfigError) as refusal:
        load_decoder(open_source(folder), weights="fp32", device=CPU)
    assert str(refusal.value).startswith(said)


def test_types_that_only_quantised_tensors_may_have_are_refused_elsewhere(tmp_path: Path) -> None:
    folder = changed(
        tmp_path,
        "compressed",
        lambda state: state.update({"model.norm.weight": torch.zeros(48, dtype=torch.int32)}),
    )
    with pytest.raises(ConfigError, match=r"model.norm.weight is of type I32; it is read as F64, F32, F16, BF16, F8"):
        open_source(folder)
    folder = changed(
        tmp_path,
        "compressed",
        lambda state: state.update({f"{OUT}.bias": torch.zeros(48).to(torch.float8_e4m3fn)}),
    )
    with pytest.raises(ConfigError, match=r"o_proj.bias is of type F8_E4M3; it is read as F64, F32, F16, BF16$"):
        open_source(folder)


def test_scales_of_keys_and_values_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    more = {f"model.layers.{number}.self_attn.{kind}_scale": torch.ones(1) for number in range(3) for kind in "kv"}
    source = open_source(changed(tmp_path, "compressed-tensor", lambda state: state.update(more)))
    load_decoder(source, weights="fp32", device=CPU)
    assert source.warnings() == (
        "the checkpoint's scales of activations are not used: each token is scaled by its own largest",
        "the checkpoint's scales of keys and values are not used",
    )


def test_a_part_that_no_quantiser_has_seen_is_left_in_floats_whatever_the_config_lists(tmp_path: Path) -> None:
    grafted = "mtp.layers.0.self_attn.o_proj.weight"
    source = open_source(changed(tmp_path, "compressed", lambda state: state.update({grafted: torch.ones(48, 48)})))
    assert isinstance(source, QuantisedFolder) and source.quantised(grafted, CPU) is None
    assert torch.equal(source[grafted], torch.ones(48, 48))


def test_a_checkpoint_in_floats_that_says_it_is_quantised_is_refused(tmp_path: Path) -> None:
    def without_scales(state: State) -> None:
        for name in [name for name in state if name.endswith("_scale")]:
            del state[name]

    with pytest.raises(ConfigError, match="has no weight_scale or weight_scale_inv, and its config does not list it"):
        load_decoder(open_source(changed(tmp_path, "compressed", without_scales)), weights="fp32", device=CPU)


def test_projections_in_floats_beside_quantised_ones_are_stacked_as_floats(tmp_path: Path) -> None:
    floats: State = {}

    def unpack_keys(state: State) -> None:
        name = "model.layers.1.self_attn.k_proj.weight"
        state[name] = floats[name]
        state.pop(f"{name}_scale")

    layout = FORMATS["compressed"]
    floats.update(write_fp8(tmp_path, layout))
    folder = changed(tmp_path, "compressed", unpack_keys)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"ignore": ["lm_head"', '"ignore": ["re:.*1.*k_proj", "lm_head"')
    )
    model = load_decoder(open_source(folder), weights="fp32", device=CPU)
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    plain = Decoder(model.config, floats, "fp32", CPU)
    assert torch.equal(model._layers[1].qkv(hidden), plain._layers[1].qkv(hidden))
