"""Flags of a generation: the options that `chat` and `generate` share.

Defaults are those of a quick try, not of the library. Called by those commands.
"""

from argparse import ArgumentParser, Namespace

from roost.front.options import Options


def add_flags(parser: ArgumentParser, *, temperature: float, max_new_tokens: int) -> None:
    """Add them."""
    section = parser.add_argument_group("How tokens are chosen.")
    section.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"(default: {max_new_tokens})")
    section.add_argument("--temperature", type=float, default=temperature, help=f"0 is greedy (default: {temperature})")
    section.add_argument("--top-k", type=int, default=-1, help="-1 is all")
    section.add_argument("--top-p", type=float, default=1.0)
    section.add_argument("--min-p", type=float, default=0.0)
    section.add_argument("--repetition-penalty", type=float, default=1.0)
    section.add_argument("--seed", type=int, default=None, help="a new one if absent")
    section.add_argument("--stop", action="append", default=[], help="a text that ends the output; repeatable")


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
