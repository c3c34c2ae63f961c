"""The `roost` command: finds the subcommand and turns errors into one line and an exit code.

0: done; 1: it failed; 2: it cannot work like this. Called by the installed script and by `python -m roost`.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

import roost
from roost.cli import bench, chat, generate, pull, serve
from roost.errors import ConfigError, RequestError, RoostError

Command = Callable[[Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = ArgumentParser(prog="roost", description="An LLM serving engine for conversations.")
    parser.add_argument("--version", action="version", version=f"roost {roost.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (serve, chat, generate, pull, bench):
        name = module.__name__.rpartition(".")[2]
        text = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=text, description=text)
        module.add_flags(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    run: Command = args.run
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
