"""Serve a model over HTTP: OpenAI's API and SGLang's.

Needs the server's packages, the extra `server`. The port is bound first; then the default model is fetched if it is
not there yet. Called by `main`.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires
from typing import TYPE_CHECKING

from roost.cli.config_file import add_config, completed, ignored_variables
from roost.cli.flag_parser import add_engine, add_group, engine_of, group_of
from roost.errors import ConfigError
from roost.server.config import ServerConfig, check_server, served_names
from roost.terminal import download_bar
from roost.weights.pull import find_model

if TYPE_CHECKING:
    from roost.server.tracing import Tracing

EXAMPLES = """\
  roost serve                                        the default model at http://127.0.0.1:8000
  roost serve --model ./Llama-3.2-1B --port 9000     a Hugging Face folder
  roost serve --context 4096 --max-running 16        less memory
  roost serve --spec none                            without speculation
  roost serve --config roost.toml                    options from a file
  roost serve --ray --replicas 2                     replicas on Ray Serve"""


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    add_config(parser)
    section = parser.add_argument_group("Replicas on Ray Serve (docs/CLUSTER.md)")
    section.add_argument("--ray", action="store_true", help="serve replicas on Ray Serve")
    several = "with --ray: how many replicas, or between how many, as the load asks for (default: 1)"
    section.add_argument("--replicas", default=None, metavar="N|MIN:MAX", help=several)
    grows = "with --ray: nodes are added when they are asked for, so that a cluster may be too small now"
    section.add_argument("--cluster-grows", action="store_true", default=None, help=grows)
    add_group(parser, ServerConfig)
    add_engine(parser)


def run(args: Namespace) -> int:
    """Serve until stopped."""
    if args.ray:
        return _run_on_ray(completed(args))
    for flag, value in (("--replicas", args.replicas), ("--cluster-grows", args.cluster_grows)):
        if value is not None:
            raise ConfigError(f"{flag} needs --ray")
    try:
        from roost.server.keys import read_keys  # noqa: PLC0415 (the other commands work without its packages)
        from roost.server.listener import bind_listeners  # noqa: PLC0415
        from roost.server.serve import serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"the package {error.name} is missing: pip install {_packages('server')}") from error
    args = completed(args)
    config, engine = group_of(args, ServerConfig), engine_of(args)
    names = served_names(config.served_model_name)
    config = replace(config, served_model_name=names)
    check_server(config)
    tracing = _tracing(config)
    keys = read_keys(config)
    if keys.warning:
        print(f"roost: warning: {keys.warning}", file=sys.stderr)
    if keys.names:
        print(f"keys: {keys.names}", flush=True)  # a log that is a file would have it only at the end
    listeners = bind_listeners(config)  # so that a port in use is reported before anything is fetched
    with download_bar("fetching") as progress:
        find_model(engine.model.model, progress)
    return serve(engine, config, listeners, keys, tracing, warnings=ignored_variables())


def _run_on_ray(args: Namespace) -> int:
    try:
        from roost.ray.serve import run as run_on_ray  # noqa: PLC0415 (nothing else needs Ray)
    except ModuleNotFoundError as error:
        needs = f"the package {error.name} is missing: pip install {_packages('ray')}"
        raise ConfigError(f"--ray: {needs}") from error
    return run_on_ray(args)


def _tracing(config: ServerConfig) -> "Tracing | None":
    """Spans of requests for --otlp-endpoint; without the flag nothing of OpenTelemetry is imported."""
    if config.otlp_endpoint is None:
        return None
    try:
        from roost.server.tracing import tracing_to  # noqa: PLC0415
    except ModuleNotFoundError as error:
        needs = f"the package {error.name} is missing: pip install {_packages('otel')}"
        raise ConfigError(f"--otlp-endpoint: {needs}") from error
    return tracing_to(config.otlp_endpoint)


def _packages(extra: str) -> str:
    """An extra's packages by name, since Roost itself is in no package index."""
    try:
        asked = [each.partition(";") for each in requires("roost") or ()]
    except PackageNotFoundError:  # run from its sources
        asked = []
    names = [f"'{name.strip()}'" for name, _, marker in asked if f'extra == "{extra}"' in marker]
    return " ".join(names) or f"'.[{extra}]' in Roost's folder"
