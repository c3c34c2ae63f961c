"""Check this machine and the installation, and print what a bug report needs.

Nothing private is in the output, nothing is downloaded, and the server's packages may be missing. Ends with 1 if
something is broken, which is said together with what to do about it. Called by `main`.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial

from roost.cli import engine_checks, machine_checks
from roost.cli.check_report import Privacy, ReportSection, as_data, as_text, checked
from roost.cli.config_file import add_config, completed
from roost.cli.flag_parser import add_engine, engine_of
from roost.server.config import ServerConfig, check_server

EXAMPLES = """\
  roost doctor                                what to paste into a bug report
  roost doctor --no-self-test                 at once, without running a model
  roost doctor --model ./Llama-3.2-1B         what the engine would choose for a model, and whether it runs
  roost doctor --config roost.toml            the same for the options of a file
  roost doctor --json --port 9000             as data; port 9000 must be free"""


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    add_config(parser)
    parser.add_argument(
        "--port",
        type=int,
        default=None,
        metavar="N",
        help="a port that must be free for a server; if absent 8000 is looked at, and may be in use",
    )
    parser.add_argument("--no-self-test", action="store_true", default=None, help="run no model")
    parser.add_argument("--json", action="store_true", default=None, help="print the report as JSON")
    add_engine(parser)


def run(args: Namespace) -> int:
    """Print the report."""
    privacy, sections = Privacy.of_this_machine(), []
    for title, check in _checks(completed(args)):
        if not args.json:
            print(title, flush=True)  # what comes may take a while
        sections.append(privacy.cleaned(checked(title, check)))
        if not args.json:
            print(as_text(sections[-1]))
    said = as_data(sections)
    if args.json:
        print(json.dumps(said, indent=2))
    elif said["ok"]:
        print("no problems found")
    else:
        count = len(said["problems"])
        print(f"{count} problem{'s' if count > 1 else ''} found: see PROBLEM above")
    return 0 if said["ok"] else 1


def _checks(args: Namespace) -> Iterator[tuple[str, Callable[[ReportSection], None]]]:
    """The checks in their order, by the titles of their sections."""
    config, must_be_free = engine_of(args), args.port is not None
    server = ServerConfig(port=args.port) if must_be_free else ServerConfig()
    check_server(server)
    yield "versions", machine_checks.versions
    yield "environment", machine_checks.variables
    yield "cpu", machine_checks.processor
    yield "memory", machine_checks.memory
    yield "gpu", machine_checks.gpus
    yield "model cache", machine_checks.models
    yield "kernel cache", machine_checks.kernels
    yield "port", partial(machine_checks.port, config=server, must_be_free=must_be_free)
    yield "engine", partial(engine_checks.choices, config=config)
    if not args.no_self_test:
        yield "self-test", partial(engine_checks.self_test, config=config)
