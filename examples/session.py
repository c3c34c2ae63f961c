"""A session in the library: turns that inherit their history's KV, a fork, a rewind.

    python examples/session.py
    python examples/session.py --model FOLDER_OR_GGUF

`cached` is how many tokens of a turn's prompt were not computed again.
"""

from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

from roost import LLM, Options

OPTIONS = Options(temperature=0, max_new_tokens=24)


def user(text: str) -> list[dict[str, Any]]:
    """A turn's messages: only what is new."""
    return [{"role": "user", "content": text}]


def show(pieces: Iterable[Any]) -> None:
    """Print an answer as it comes, then what it cost."""
    for piece in pieces:
        print(piece.text, end="", flush=True)
        if piece.finished is not None:
            usage = piece.finished.usage
            print(f"\n[prompt {usage.prompt_tokens}, cached {usage.cached_tokens}]")


def main() -> None:
    """Talk, fork, and go back."""
    parser = ArgumentParser(description="A conversation that is forked and rewound.")
    parser.add_argument("--model", default="default", help="a GGUF file, a Hugging Face folder, or 'default'")
    args = parser.parse_args()

    with LLM(args.model) as llm, llm.session() as session:
        show(session.chat(user("Name a river in Europe."), OPTIONS))
        show(session.chat(user("Which countries does it cross?"), OPTIONS))

        with session.fork() as other:  # goes on from here, whatever happens to the first
            show(other.chat(user("And a city on it?"), OPTIONS))
            print(f"fork: {other.state().turns} turns")

        session.rewind(turn=1)  # only the first turn is left, and its KV is still there
        print(f"rewound: {session.state().turns} turn, {session.state().resident} tokens resident")
        show(session.chat(user("How long is it?"), OPTIONS))


if __name__ == "__main__":
    main()
