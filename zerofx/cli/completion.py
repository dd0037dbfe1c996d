"""`zerofx completion`: a completion script for the shell, made from the tree of arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from zerofx.cli.command import Answer
from zerofx.cli.progress import Progress

_SCRIPT = """\
{zsh}_zerofx() {{
  local words="{commands}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "${{COMP_WORDS[1]}} $previous" in
{choices}
    *) case "${{COMP_WORDS[1]}}" in
{options}
    esac ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{commands} --help --version"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _zerofx zerofx
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Make the script."""
    script = script_for(args.parser, args.shell)
    return Answer({"shell": args.shell, "script": script}, (script.rstrip("\n"),))


def script_for(parser: argparse.ArgumentParser, shell: str) -> str:
    """Words to complete: subcommands, then their options, and the choices of the option before."""
    commands = subparsers(parser)
    choices: list[str] = []
    options: list[str] = []
    for name, sub in commands.items():
        flags: list[str] = []
        below = [each for inner in subparsers(sub).values() for each in inner._actions]
        for action in (*sub._actions, *below):
            flags += [flag for flag in action.option_strings if flag not in flags]
            words = " ".join(map(str, action.choices or ()))
            flags += words.split() if not action.option_strings else []
            for flag in action.option_strings if words else ():
                choices.append(f'    "{name} {flag}") words="{words}" ;;')
        options.append(f'    {name}) words="{" ".join(flags)}" ;;')
    return _SCRIPT.format(
        zsh=_ZSH if shell == "zsh" else "",
        commands=" ".join(commands),
        choices="\n".join(choices),
        options="\n".join(options),
    )


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers directly below `parser`, by name."""
    return dict(_pairs(parser))


def _pairs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
