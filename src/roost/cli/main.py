"""The `roost` command: finds the subcommand and turns errors into one line and an exit code.

0: done; 1: failed; 2: wrong usage or configuration. Called by the installed script and by `python -m roost`.
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence

import roost
from roost.cli.commands import COMMANDS, load_command
from roost.errors import ConfigError, RequestError, RoostError

Command = Callable[[Namespace], int]

_POSITIONAL = {"generate": " [prompt]", "completion": " {bash,zsh,fish}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = ArgumentParser(
        prog="roost",
        description="An LLM serving engine for conversations.",
        epilog="roost COMMAND --help lists the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"roost {roost.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if word in COMMANDS), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, formatter_class=RawDescriptionHelpFormatter)
        if name == chosen:  # only its modules are imported: the server's process needs none that run a model
            module = load_command(name)
            module.add_flags(command)
            command.epilog = f"examples:\n{module.EXAMPLES}"
            command.usage = f"roost {name} [options]" + _POSITIONAL.get(name, "")
    args, unknown = parser.parse_known_args(words)
    if unknown:  # reported by the command's own parser, with its usage
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    run: Command = load_command(args.command).run
    try:
        return run(args)
    except RequestError as error:
        name = f"--{error.param.replace('_', '-')}" if error.param in args else error.param
        return _failed(args.command, f"{name}: {error.reason}", 2)
    except RoostError as error:
        return _failed(args.command, str(error), 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return 130


def _failed(command: str, message: str, code: int) -> int:
    """One line, as the parser would write it."""
    print(f"roost {command}: error: {message}", file=sys.stderr)
    return code
