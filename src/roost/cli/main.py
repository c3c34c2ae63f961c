"""The `roost` command: finds the subcommand and turns errors into one line and an exit code.

0: done; 1: it failed; 2: it cannot work like this. Called by the installed script and by `python -m roost`.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

import roost
from roost.errors import ConfigError, RequestError, RoostError

Command = Callable[[Namespace], int]

COMMANDS = {
    "serve": "Serve a model over HTTP: OpenAI's API and SGLang's.",
    "chat": "Talk with a model in the terminal.",
    "generate": "Print what follows a prompt.",
    "pull": "Fetch the default model and say where it is.",
    "bench": "Measure a running server, or an engine in this process.",
    "train-draft": "Train a draft head for a model on its own answers.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = ArgumentParser(prog="roost", description="An LLM serving engine for conversations.")
    parser.add_argument("--version", action="version", version=f"roost {roost.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if word in COMMANDS), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:  # a server has no use for the parts that run a model, and needs no time to load them
            _module(name).add_flags(command)
    args = parser.parse_args(words)
    run: Command = _module(args.command).run
    try:
        return run(args)
    except ConfigError as error:
        print(f"roost: {error}", file=sys.stderr)
        return 2
    except RequestError as error:
        name = f"--{error.param.replace('_', '-')}" if error.param in args else error.param
        print(f"roost: {name}: {error.reason}", file=sys.stderr)
        return 2
    except RoostError as error:
        print(f"roost: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _module(name: str) -> ModuleType:
    return import_module(f"roost.cli.{name.replace('-', '_')}")
