"""Commands: the names of all subcommands, what each is for, and where its code is.

A command is a module with `add_flags`, `run` and `EXAMPLES`, imported only when it is asked for. Called by `main`, and
by the completion of shells.
"""

from importlib import import_module
from types import ModuleType

COMMANDS = {
    "serve": "Serve a model over HTTP: OpenAI's API and SGLang's.",
    "chat": "Chat with a model in the terminal.",
    "generate": "Generate text from a prompt.",
    "top": "Watch a running server in the terminal.",
    "pages": "List who owns each KV page of a running server.",
    "pull": "Download the default model and print where it is.",
    "doctor": "Check this machine and the installation; the output is for a bug report.",
    "bench": "Measure a running server, or an engine in this process.",
    "train-draft": "Train a draft head for a model on its own answers.",
    "completion": "Print a script for completion in bash, zsh or fish.",
}


def load_command(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(f"roost.cli.{name.replace('-', '_')}")
