"""Talk with a model in the terminal.

The conversation is sent again with every turn; the prefix cache makes that cheap, and each turn says how much of it was
found there, when the first token came and how fast the others followed, and how many tokens a round of speculation
gave if there was one. Runs the model here. Called by `main`.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from rich.console import Console

from roost.cli import sample
from roost.cli.flags import add_engine, engine_of
from roost.errors import RequestError
from roost.llm import LLM
from roost.messages import SpecStats
from roost.terminal import loading_bar


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--system", default=None, help="a system message; the template's own if absent")
    sample.add_flags(parser, temperature=0.7, max_new_tokens=512)
    add_engine(parser)


def run(args: Namespace) -> int:
    """Read, answer, repeat."""
    console = Console(stderr=True)
    with loading_bar() as progress:
        llm = LLM(config=engine_of(args), progress=progress)
    with llm:
        console.print(f"{llm.name} is ready. An empty line or Ctrl-D ends the conversation.", style="dim")
        messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
        while text := _read_line():
            messages.append({"role": "user", "content": text})
            try:
                answer = _turn(llm, messages, args, console)
            except RequestError as error:
                console.print(str(error), style="red")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _turn(llm: LLM, messages: list[dict[str, Any]], args: Namespace, console: Console) -> str:
    """One answer, printed as it comes; returns it."""
    began = time.monotonic()
    first: float | None = None
    text, num_tokens, cached, prompt, spec = "", 0, 0, 0, SpecStats()
    try:
        for piece in llm.stream_chat(messages, sample.options_of(args)):
            first = first or time.monotonic()
            text += piece.text
            num_tokens += len(piece.tokens)
            print(piece.text, end="", flush=True)
            if piece.finished is not None:
                cached, prompt = piece.finished.usage.cached_tokens, piece.finished.usage.prompt_tokens
                spec = piece.finished.spec
    except KeyboardInterrupt:
        pass  # the rest of this answer is not wanted
    print()
    first = first or time.monotonic()
    rate = (num_tokens - 1) / max(time.monotonic() - first, 1e-9)
    note = f"{num_tokens} tokens, {rate:.1f}/s; first after {first - began:.2f} s; {cached} of {prompt} cached"
    if spec.drafts_offered:
        note += f"; accept length {spec.accept_length:.2f}"
    console.print(note, style="dim")
    return text
