"""Scripts that complete the commands and settings of `trainer` in a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

__all__ = ["SHELLS", "completion_script"]

SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """Return a script for a shell.

    Args:
        shell: one of `SHELLS`.
        words: the options of each command.
    """
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words)


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
