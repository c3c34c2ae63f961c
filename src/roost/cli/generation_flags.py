"""Generation flags: the sampling options that `chat` and `generate` share.

Their defaults suit a quick try and differ from the library's. Called by those commands.
"""

from argparse import ArgumentParser, Namespace

from roost.front.options import Options


def add_flags(parser: ArgumentParser, *, temperature: float, max_new_tokens: int) -> None:
    """Add the flags, with a command's own defaults for two of them."""
    section = parser.add_argument_group("Sampling")
    numbers: tuple[tuple[str, type, float, str], ...] = (
        ("--max-new-tokens", int, max_new_tokens, "most tokens of the answer"),
        ("--temperature", float, temperature, "0 is greedy"),
        ("--top-k", int, -1, "sample from the k most probable tokens; -1 is all"),
        ("--top-p", float, 1.0, "sample from the most probable tokens that together have this probability"),
        ("--min-p", float, 0.0, "sample from tokens with at least this share of the best one's probability"),
        ("--repetition-penalty", float, 1.0, "penalty for tokens that occurred before; 1 is none"),
    )
    for flag, kind, default, text in numbers:
        metavar = "N" if kind is int else "X"
        section.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default})")
    section.add_argument(
        "--seed", type=int, default=None, metavar="N", help="the same seed gives the same text; random if absent"
    )
    section.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="a text that ends the output; repeatable"
    )


def options_of(args: Namespace) -> Options:
    """The options from parsed flags."""
    return Options(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
    )
