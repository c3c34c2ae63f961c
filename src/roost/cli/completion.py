"""Print a script that completes commands and their options in a shell.

Made from the commands' own parsers, so that a new flag needs no word here. bash, zsh and fish each have a small
template; values are completed where they are a fixed set, and files elsewhere. Called by `main`.
"""

import re
from argparse import Action, ArgumentParser, Namespace
from dataclasses import dataclass

from roost.cli.commands import COMMANDS, load_command

EXAMPLES = """\
  roost completion bash > ~/.local/share/bash-completion/completions/roost
  roost completion zsh > "${fpath[1]}/_roost"
  roost completion fish > ~/.config/fish/completions/roost.fish"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An option of a command, as shells see it."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    is_number: bool = False
    choices: tuple[str, ...] = ()


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="whose script is printed")


def run(args: Namespace) -> int:
    """Print the script."""
    print(_SCRIPTS[args.shell](flags_of_commands()), end="")
    return 0


def flags_of_commands() -> dict[str, list[Flag]]:
    """The options of every command, from its parser."""
    found = {}
    for name in COMMANDS:
        parser = ArgumentParser()
        load_command(name).add_flags(parser)
        found[name] = [_flag(action) for action in parser._actions]  # argparse has no other way to list them
    return found


def _flag(action: Action) -> Flag:
    first = re.split(r"[;:] | \(", action.help or "")[0]
    return Flag(
        names=tuple(action.option_strings),
        help=" ".join(first.split()),
        takes_value=action.nargs not in (0, "?"),
        is_number=action.type in (int, float),
        choices=tuple(map(str, action.choices or ())),
    )


def _bash(commands: dict[str, list[Flag]]) -> str:
    """A function that looks at the command, the word before and the word itself; bash completes files itself."""
    cases, values = [], []
    for command, flags in commands.items():
        takes = " ".join(name for flag in flags if flag.takes_value for name in flag.names)
        names = " ".join(name for flag in flags for name in flag.names)
        others = " ".join(choice for flag in flags if not flag.names for choice in flag.choices)
        cases.append(f'    {command}) names="{names}" takes="{takes}" others="{others}" ;;')
        for name, flag in _each(flags):
            if name and flag.choices:
                offer = f'COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$word"))'
                values.append(f'    "{command} {name}") {offer}; return ;;')
    by_command, by_flag = "\n".join(cases), "\n".join(values)
    return f"""\
# bash completion of roost; made by `roost completion bash`
_roost() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" i
    local names="--help --version" takes="" others="{" ".join(commands)}"
    if [[ $word == "=" ]]; then word=""; fi
    if [[ $before == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${{COMP_WORDS[i]}}" in
        {"|".join(commands)}) command="${{COMP_WORDS[i]}}"; break ;;
        esac
    done
    case "$command" in
{by_command}
    esac
    case "$command $before" in
{by_flag}
    esac
    if [[ " $takes " == *" $before "* ]]; then return; fi
    if [[ $word == -* ]]; then others="$names"; fi
    COMPREPLY=($(compgen -W "$others" -- "$word"))
}}
complete -o default -F _roost roost
"""


def _zsh(commands: dict[str, list[Flag]]) -> str:
    """What `_arguments` is told of each command."""
    listed = "\n".join(f"        {_quoted(f'{name}:{text}')}" for name, text in COMMANDS.items())
    cases = "\n".join(
        f"        {command}) _arguments " + " ".join(f"\\\n            {_spec(flag)}" for flag in _each(flags)) + " ;;"
        for command, flags in commands.items()
    )
    return f"""\
#compdef roost
# zsh completion of roost; made by `roost completion zsh`
_roost() {{
    local -a commands=(
{listed}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$command" in
{cases}
    esac
}}
if [ "$funcstack[1]" = _roost ]; then _roost "$@"; else compdef _roost roost; fi
"""


def _each(flags: list[Flag]) -> list[tuple[str, Flag]]:
    return [(name, flag) for flag in flags for name in flag.names or ("",)]


def _spec(named: tuple[str, Flag]) -> str:
    name, flag = named
    values = f"({' '.join(flag.choices)})" if flag.choices else " " if flag.is_number else "_files"
    if not name:
        return _quoted(f":value:{values}")
    text = re.sub(r"([\[\]:\\])", r"\\\1", flag.help)
    return _quoted(f"*{name}[{text}]" + (f":value:{values}" if flag.takes_value or flag.choices else ""))


def _fish(commands: dict[str, list[Flag]]) -> str:
    """One `complete` line for each command and each option."""
    lines = ["# fish completion of roost; made by `roost completion fish`", "complete -c roost -f"]
    lines += [
        f"complete -c roost -n __fish_use_subcommand -a {name} -d {_fish_quoted(text)}"
        for name, text in COMMANDS.items()
    ]
    for command, flags in commands.items():
        seen = f"complete -c roost -n '__fish_seen_subcommand_from {command}'"
        for flag in flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            values = (
                f"-x -a {_fish_quoted(' '.join(flag.choices))}" if flag.choices else "-x" if flag.is_number else "-r -F"
            )
            takes = values if flag.takes_value or flag.choices else ""
            told = "" if not flag.names else f"-d {_fish_quoted(flag.help)}"
            if names or flag.choices:
                lines.append(" ".join(each for each in (seen, names, takes, told) if each))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
