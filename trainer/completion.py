"""Scripts that complete the commands and settings of `trainer` in a shell."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from common.command_line import PROGRAM, Command
from common.errors import ConfigError
from common.settings.command import option_names


def print_completion(commands: Mapping[str, Command], words: Sequence[str]) -> None:
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if words in (["-h"], ["--help"]):
        sys.stdout.write(
            f"usage: {PROGRAM} completion {'|'.join(scripts)}\n\n"
            "Prints a script that completes commands and settings in the shell.\n\n"
            f"Example for bash:\n  source <({PROGRAM} completion bash)\n"
        )
        return
    shell = words[0] if len(words) == 1 else ""
    if shell not in scripts:
        raise ConfigError(f"{PROGRAM} completion needs the name of a shell: {', '.join(scripts)}")
    sys.stdout.write(scripts[shell]({name: option_names(command) for name, command in commands.items()}))


def _bash(words: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f"        {name}) words={shlex.quote(' '.join(options))} ;;" for name, options in words.items())
    return f"""# eval "$(trainer completion bash)"
_trainer() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=
    if [ "$COMP_CWORD" -eq 1 ] || [ "${{COMP_WORDS[1]}}" = help ]; then
        COMPREPLY=($(compgen -W {shlex.quote(" ".join((*words, "help")))} -- "$current"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
}}
complete -o default -o bashdefault -F _trainer trainer
"""


def _zsh(words: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f"        {name}) words=({' '.join(options)}) ;;" for name, options in words.items())
    return f"""#compdef trainer
# eval "$(trainer completion zsh)"
_trainer() {{
    local -a words_of commands
    commands=({" ".join((*words, "help"))})
    if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then
        compadd -a commands
        return
    fi
    case $words[2] in
{cases.replace("words=(", "words_of=(")}
    esac
    if [[ $PREFIX == -* ]]; then
        compadd -a words_of
    else
        _files
    fi
}}
compdef _trainer trainer
"""


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    names = " ".join((*words, "help"))
    lines = ["# trainer completion fish | source", f"complete -c trainer -n __fish_use_subcommand -f -a {shlex.quote(names)}"]
    for name, options in words.items():
        condition = shlex.quote(f"__fish_seen_subcommand_from {name}")
        lines += [f"complete -c trainer -n {condition} -l {option.removeprefix('--')}" for option in options]
    return "\n".join(lines) + "\n"
