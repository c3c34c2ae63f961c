"""Flags of a generation: the options that `chat` and `generate` share.

Defaults are those of a quick try, not of the library. Called by those commands.
"""

from argparse import ArgumentParser, Namespace

from roost.front.options import Options


def add_flags(parser: ArgumentParser, *, temperature: float, max_new_tokens: int) -> None:
    """Add them."""
    section = parser.add_argument_group("How tokens are chosen")
    numbers: tuple[tuple[str, type, float, str], ...] = (
        ("--max-new-tokens", int, max_new_tokens, "tokens of the answer, at most"),
        ("--temperature", float, temperature, "0 is greedy"),
        ("--top-k", int, -1, "only the best so many tokens; -1 is all"),
        ("--top-p", float, 1.0, "only the best tokens that together have this probability"),
        ("--min-p", float, 0.0, "only tokens at least this probable, as a share of the best one's"),
        ("--repetition-penalty", float, 1.0, "of tokens that were said before; 1 is none"),
    )
    for flag, kind, default, text in numbers:
        metavar = "N" if kind is int else "X"
        section.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default})")
    section.add_argument(
        "--seed", type=int, default=None, metavar="N", help="the same gives the same text; a new one if absent"
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
