"""Generate text from a prompt and print it.

The prompt comes from the command line or from standard input. Runs the model in this process. Called by `main`.
"""

import sys
from argparse import ArgumentParser, Namespace

from roost.cli import generation_flags
from roost.cli.config_file import add_config, completed
from roost.cli.flag_parser import add_engine, engine_of
from roost.library.llm import LLM
from roost.terminal import download_bar

EXAMPLES = """\
  roost generate "The sea was" --max-new-tokens 40
  roost generate --chat "What is a heat pump?" --temperature 0.7 --seed 1
  roost generate < prompt.txt"""


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("prompt", nargs="?", help="standard input if absent")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message, not a text to continue")
    generation_flags.add_flags(parser, temperature=0.0, max_new_tokens=128)
    add_config(parser)
    add_engine(parser)


def run(args: Namespace) -> int:
    """Generate one output, printed as it arrives."""
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    with download_bar() as progress:
        llm = LLM(config=engine_of(completed(args)), progress=progress)
    with llm:
        options = generation_flags.options_of(args)
        message = [{"role": "user", "content": prompt}]
        pieces = llm.stream_chat(message, options) if args.chat else llm.stream(prompt, options)
        for piece in pieces:
            print(piece.text, end="", flush=True)
    print()
    return 0
