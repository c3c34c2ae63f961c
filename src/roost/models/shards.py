"""Shards of a model: what each of the ranks that share it has, by its config alone.

Heads are split, and KV heads with them, or copied where there are fewer of these than ranks; so are the widths of
feed-forwards, the channels of short convolutions, the heads of recurrences and the vocabulary. What cannot be split
evenly is refused with --tp and what it may be. The parts themselves are cut by whoever loads. Called before that, at
start-up, and by models while they load.
"""

from collections.abc import Iterator
from dataclasses import replace

from roost.errors import ConfigError
from roost.models.decoder_layers import DecoderConfig, Feed, Heads, LayerKind
from roost.models.parts import named


def check_shards(config: object, size: int) -> None:
    """Refuse a number of ranks that a model cannot be split over, by what its family reads of its config.json."""
    if isinstance(config, DecoderConfig):
        shard_config(config, size)
    elif size > 1:
        raise ConfigError(f"--tp {size}: models of this family run on one rank, --tp must be 1")


def shard_config(config: DecoderConfig, size: int) -> DecoderConfig:
    """The config of each of `size` ranks."""
    if size == 1:
        return config
    if problems := list(_uneven(config, size)):
        allowed = [ranks for ranks in range(1, config.num_heads + 1) if not any(_uneven(config, ranks))]
        raise ConfigError(
            f"--tp {size}: {problems[0]} cannot be split evenly; for this model --tp may be {named(allowed)}"
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        layers=tuple(_shard_kind(config, kind, size) for kind in config.layers),
        ranks=size,
    )


def check_vocabulary(num_tokens: int, size: int) -> None:
    """Refuse a vocabulary of which a rank would have nothing."""
    if not _has_tokens_for_all(num_tokens, size):
        raise ConfigError(f"--tp {size}: a vocabulary of {num_tokens} tokens is too small for so many ranks")


def _shard_kind(config: DecoderConfig, kind: LayerKind, size: int) -> LayerKind:
    heads, delta = _heads(config, kind), kind.delta
    return replace(
        kind,
        heads=replace(
            heads, num_kv_heads=max(1, heads.num_kv_heads // size), copies=max(1, size // heads.num_kv_heads)
        ),
        delta=None
        if delta is None
        else replace(delta, num_key_heads=delta.num_key_heads // size, num_value_heads=delta.num_value_heads // size),
    )


def _heads(config: DecoderConfig, kind: LayerKind) -> Heads:
    """A layer's heads as its config has them."""
    return kind.heads or Heads(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, scale=config.scale)


def _uneven(config: DecoderConfig, size: int) -> Iterator[str]:
    """What cannot be split over so many ranks."""
    counts = {"heads": {config.num_heads}}
    counts["numbers of a feed-forward"] = {feed.width for feed in (Feed(width=config.intermediate_size), *config.feeds)}
    deltas = [kind.delta for kind in config.layers if kind.delta is not None]
    counts["heads of a gated delta rule"] = {
        number for each in deltas for number in (each.num_key_heads, each.num_value_heads)
    }
    counts["channels of a convolution"] = {config.hidden_size for kind in config.layers if kind.conv_len}
    for what, numbers in counts.items():
        yield from (f"{number} {what}" for number in sorted(numbers) if number % size)
    kv = {_heads(config, kind).num_kv_heads for kind in config.layers if kind.attends}
    yield from (f"{number} KV heads" for number in sorted(kv) if number % size and size % number)
    if not _has_tokens_for_all(config.vocab_size, size):
        yield f"{config.vocab_size} tokens of the vocabulary"


def _has_tokens_for_all(num_tokens: int, size: int) -> bool:
    return (size - 1) * -(-num_tokens // size) < num_tokens
