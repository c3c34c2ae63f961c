"""How a checkpoint is quantised: `quantization_config` or `compression_config` of its config.json as one record.

A method, a packing or a scheme that is not supported is refused by its name, with those that are. Knows no tensors: the
readers of packings (`weights.fp8_formats`, …) turn tensors into weights by this record. Called when a folder is opened.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roost.errors import ConfigError
from roost.models.fields import Fields

KEYS = ("quantization_config", "compression_config")  # of a config.json; the second is compressed-tensors' older name
_PATTERN = "re:"  # what a list of modules writes before a regular expression
_LINEAR = "Linear"  # the class that stands for every projection in compressed-tensors' targets
_CT = "compressed-tensors"
MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How the projections of a checkpoint are quantised."""

    form: str  # of the weights, as --weights names it: fp8, int4; or one that is always dequantised: mxfp4
    packing: str  # names and layout of its tensors: fp8, fbgemm_fp8, compressed-tensors, awq, gptq, gptq_v2, mxfp4
    strategy: str  # what shares a scale: tensor, channel, block, group
    block: tuple[int, int] | None = None  # outputs and inputs of a block
    group_size: int | None = None  # inputs of a group; None: all of them
    has_zeros: bool = False  # groups have zero points beside their scales
    activations: str = "none"  # what is quantised besides the weights: none, dynamic, static
    targets: tuple[str, ...] = (_LINEAR,)  # modules that are quantised
    ignored: tuple[str, ...] = ()  # modules that are not, although they are targets
    kv_scales: bool = False  # it comes with scales for keys and values

    def covers(self, module: str) -> bool:
        """Whether a projection is among those that are said to be quantised."""
        is_target = _LINEAR in self.targets or any(_names(each, module) for each in self.targets)
        return is_target and not self.ignores(module)

    def ignores(self, module: str) -> bool:
        """Whether a module is listed as left in floats."""
        return any(_names(each, module) for each in self.ignored)


def read_quantisation(config: Mapping[str, object]) -> Quantisation | None:
    """How the checkpoint of a config.json is quantised; None if it is not."""
    fields, present = Fields(config), [key for key in KEYS if config.get(key)]
    if not present:
        return None
    if len(present) > 1:
        raise fields.wrong(present[0], f"and {present[1]} are both there; which one counts is unclear")
    group = fields.group(present[0])
    method = group.choice("quant_method", _METHODS, _CT if present[0] == KEYS[1] else None)
    return _METHODS[method](group)


def _fp8(group: Fields) -> Quantisation:
    """FP8 as transformers, DeepSeek and Qwen write it, and AutoFP8."""
    group.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = _pair(group, "weight_block_size") if group.has("weight_block_size") else None
    return Quantisation(
        form="fp8",
        packing="fp8",
        strategy="tensor" if block is None else "block",
        block=block,
        activations=group.choice("activation_scheme", ("dynamic", "static"), "dynamic"),
        ignored=_modules(group, "modules_to_not_convert") + _modules(group, "ignored_layers"),
        kv_scales=group.has("kv_cache_scheme"),
    )


def _fbgemm_fp8(group: Fields) -> Quantisation:
    """FP8 as Meta publishes it: a scale per output, activations by token."""
    return Quantisation(
        form="fp8",
        packing="fbgemm_fp8",
        strategy="channel",
        activations="dynamic",
        ignored=_modules(group, "modules_to_not_convert"),
    )


def _awq(group: Fields) -> Quantisation:
    """AWQ, four bits, in the order of AutoAWQ's gemm kernel."""
    _four_bits(group, "bits")
    group.choice("version", ("gemm", "GEMM"), "gemm")
    return Quantisation(
        form="int4",
        packing="awq",
        strategy="group",
        group_size=_group_size(group),
        has_zeros=group.flag("zero_point", True),
        ignored=_modules(group, "modules_to_not_convert"),
    )


def _gptq(group: Fields) -> Quantisation:
    """GPTQ, four bits, groups of neighbouring inputs."""
    _four_bits(group, "bits")
    if group.flag("desc_act", False):
        raise group.wrong("desc_act", "is true: inputs ordered by activation are not supported; false is")
    group.refuse_unless("dynamic", {})  # rules of its own for some modules
    return Quantisation(
        form="int4",
        packing=group.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq"),  # they store zero points differently
        strategy="group",
        group_size=_group_size(group),
        has_zeros=not group.flag("sym", True),
        ignored=_modules(group, "modules_to_not_convert"),
    )


def _mxfp4(group: Fields) -> Quantisation:
    """gpt-oss as OpenAI publishes it: experts in blocks of 32, everything else in bfloat16."""
    return Quantisation(
        form=MXFP4,
        packing=MXFP4,
        strategy="group",
        group_size=32,
        ignored=_modules(group, "modules_to_not_convert"),
    )


def _compressed_tensors(group: Fields) -> Quantisation:
    """compressed-tensors: one group of projections, 8-bit floats or packed 4-bit integers."""
    group.choice("quantization_status", ("compressed",), "compressed")
    _refuse_sparsity(group)
    scheme = _only_scheme(group)
    packed = group.choice("format", _CT_FORMATS, scheme.choice("format", _CT_FORMATS, _CT_FORMATS[0]))
    scheme.refuse_unless("output_activations")
    weights = scheme.group("weights")
    kind, bits = weights.choice("type", ("float", "int"), "int"), weights.integer("num_bits", 8)
    known = {("float", 8): "fp8", ("int", 4): "int4"}
    if (kind, bits) not in known:
        raise weights.wrong("num_bits", f"and type are {bits} and {kind}; supported are 8 and float, 4 and int")
    form = known[kind, bits]
    if (form == "int4") != (packed == "pack-quantized"):
        raise group.wrong("format", f"is {packed} for {bits}-bit {kind} weights, which is not supported")
    strategies = ("tensor", "channel", "block") if form == "fp8" else ("group", "channel")
    strategy = weights.choice("strategy", strategies, strategies[0])
    weights.refuse_unless("actorder", "static", "weight", False)  # `group` would order inputs by activation
    if form == "fp8" and not weights.flag("symmetric", True):
        raise weights.wrong("symmetric", "is false: 8-bit floats with zero points are not supported")
    return Quantisation(
        form=form,
        packing=_CT,
        strategy=strategy,
        block=_pair(weights, "block_structure") if strategy == "block" else None,
        group_size=weights.integer("group_size") if strategy == "group" else None,
        has_zeros=not weights.flag("symmetric", True),
        activations=_activations(scheme, form),
        targets=_modules(scheme, "targets") or (_LINEAR,),
        ignored=_modules(group, "ignore"),
        kv_scales=group.has("kv_cache_scheme"),
    )


_CT_FORMATS = ("float-quantized", "naive-quantized", "pack-quantized")


def _refuse_sparsity(group: Fields) -> None:
    sparsity = group.group("sparsity_config")
    if sparsity.has("format"):
        sparsity.choice("format", ("dense",))
    group.refuse_unless("transform_config", {})


def _only_scheme(group: Fields) -> Fields:
    """The one scheme of config_groups."""
    schemes = tuple(group.group("config_groups"))
    if len(schemes) != 1:
        raise group.wrong("config_groups", f"has {len(schemes)} schemes ({', '.join(schemes)}); one is supported")
    return group.group("config_groups").group(schemes[0])


def _activations(scheme: Fields, form: str) -> str:
    """How activations are quantised beside 8-bit weights."""
    if not scheme.has("input_activations"):
        return "none"
    inputs = scheme.group("input_activations")
    if form != "fp8" or inputs.choice("type", ("float", "int"), "int") != "float" or inputs.integer("num_bits") != 8:
        raise scheme.wrong("input_activations", "must be 8-bit floats beside 8-bit weights, and none beside 4-bit ones")
    return "dynamic" if inputs.flag("dynamic", False) else "static"


def _four_bits(group: Fields, name: str) -> None:
    bits = group.integer(name)
    if bits != 4:
        raise group.wrong(name, f"is {bits}; 4 is supported")


def _group_size(group: Fields) -> int | None:
    """Inputs that share a scale; -1 stands for all of them."""
    size = group.integer("group_size", least=-1)
    return None if size == -1 else size


def _pair(group: Fields, name: str) -> tuple[int, int]:
    sizes = group.integers(name, least=1)
    if len(sizes) != 2:
        raise group.wrong(name, f"must be two numbers, outputs and inputs of a block, got {list(sizes)}")
    return sizes[0], sizes[1]


def _modules(group: Fields, name: str) -> tuple[str, ...]:
    return group.choices(name) if group.has(name) else ()


def _names(pattern: str, module: str) -> bool:
    """Whether an entry of a list means a module: by a regular expression, or by whole words of its name.

    `*` stands for anything. An entry may be a module's whole name, its end (`lm_head`, `o_proj`) or its parent.
    """
    if pattern.startswith(_PATTERN):
        try:
            return re.match(pattern.removeprefix(_PATTERN), module) is not None
        except re.error as error:
            raise ConfigError(f"config.json: {pattern!r} is not a regular expression: {error}") from error
    words = re.escape(pattern).replace(r"\*", ".*")
    return re.search(rf"(^|\.){words}(\.|$)", module) is not None


_METHODS: dict[str, Callable[[Fields], Quantisation]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    _CT: _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    MXFP4: _mxfp4,
}
