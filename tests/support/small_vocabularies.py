"""Small vocabularies: one byte-level, one sentencepiece, as GGUF metadata."""

from roost.text.gguf import tokenizer_from_gguf
from roost.text.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = "<think>"  # user defined: added, not special


def spelled(data: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    rest = [byte for byte in range(256) if byte not in PRINTABLE]
    return "".join(chr(byte if byte in PRINTABLE else 256 + rest.index(byte)) for byte in data)


def byte_fields(pre: str = "smollm", **changes: object) -> dict[str, object]:
    """Metadata of a byte-level vocabulary with merges that end inside of characters."""
    pairs = [(b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b" ", b"hell"), ("é".encode()[:1], "é".encode()[1:])]
    pairs += [("🦉".encode()[:1], "🦉".encode()[1:2]), (b"o", "日".encode()[:1]), (b"1", b"2"), (b"12", b"3")]
    singles = [spelled(bytes([byte])) for byte in range(256)]
    merges = [(spelled(left), spelled(right)) for left, right in pairs]
    tokens = [*CONTROL, *singles, *(left + right for left, right in merges), THINK]
    values: dict[str, object] = dict(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL) - 1) + [4],
        merges=[f"{left} {right}" for left, right in merges],
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=False,
    )
    return _fields(values | changes)


PIECES = ["▁", "a", "b", "c", "s", "<", ">", "/", "<s", "s>", "▁a", "bc", "abc", "▁ab", "▁abc", "cab", "ca", "ab"]


def piece_fields(**changes: object) -> dict[str, object]:
    """Metadata of a sentencepiece vocabulary; the first pieces are single characters, the best join comes first."""
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    values: dict[str, object] = dict(
        model="llama",
        tokens=[*head, *PIECES],
        scores=[0.0] * len(head) + [-float(rank) for rank in range(len(PIECES))],
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        bos_token_id=1,
        eos_token_id=2,
    )
    return _fields(values | changes)


def byte_level(pre: str = "smollm", **changes: object) -> Tokenizer:
    """The byte-level vocabulary as a tokenizer."""
    return tokenizer_from_gguf(byte_fields(pre, **changes))


def sentencepiece(**changes: object) -> Tokenizer:
    """The sentencepiece vocabulary as a tokenizer."""
    return tokenizer_from_gguf(piece_fields(**changes))


def _fields(values: dict[str, object]) -> dict[str, object]:
    return {PREFIX + key: value for key, value in values.items() if value is not None}
