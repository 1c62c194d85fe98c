# SPDX-License-Identifier: Apache-2.0
"""Lets a shell complete programs, the flags of training, and their values.

    source <(python -m megatron completion bash)        in ~/.bashrc, or ~/.zshrc with zsh instead of bash

After `python pretrain_gpt.py`, `torchrun ... pretrain_gpt.py`, `torchrun ... -m megatron train` and `megatron-train`
the flags that work are completed, and after one of them its values; elsewhere files, as without it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from megatron.cli.commands import COMMANDS
from megatron.core.errors import command_line
from megatron.core.setting import Setting
from megatron.training.flags.argument import ProgramParser
from megatron.training.flags.declarations import declared_flags, program_flags
from megatron.training.recipes.presets import PRESETS

PROGRAMS = ("torchrun", "python", "python3", "megatron-train", "./pretrain_gpt.py")
"""Program words that start a command. python keeps a completion that the shell already has for it."""
_FUNCTION = """\
_megatron() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}}
    local begun=${{COMP_WORDS[*]:0:COMP_CWORD}} words=""
    COMPREPLY=()
    if [[ $begun == *" -m megatron" ]]; then
        words={programs}
    elif [[ $begun == *pretrain_gpt.py* || $begun == *" -m megatron train"* || $begun == megatron-train* ]]; then
        case $previous in
{values}
        *) [[ $word == -* ]] && words={flags} ;;
        esac
    fi
    # Line by line and without mapfile, which older shells lack.
    local IFS=$'\\n'
    [[ -z $words ]] || COMPREPLY=($(IFS=' '; compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _megatron {always}
for _megatron_program in {unless}; do
    complete -p "$_megatron_program" > /dev/null 2>&1 ||
        complete -o bashdefault -o default -F _megatron "$_megatron_program"
done
unset _megatron_program
"""


def list_flags() -> list[Setting]:
    """The flags of training that work, in the order of the settings."""
    return [flag for flag in program_flags() + declared_flags() if flag.status == "works"]


def _list_values(flag: Setting) -> list[str]:
    if flag.dest == "preset":
        return ["list", *PRESETS]
    return [] if flag.choices is None or flag.is_switch else [str(choice) for choice in flag.offered_choices]


def _format_cases() -> Iterator[str]:
    for flag in list_flags():
        values = _list_values(flag)
        if values:
            yield f"        {'|'.join(flag.names)}) words={shlex.quote(' '.join(values))} ;;"


def format_completion(shell: str) -> str:
    """The script that `shell` (bash or zsh) is to source."""
    flags = [name for flag in list_flags() for name in (*flag.names, *flag.off_names) if name.startswith("--")]
    script = _FUNCTION.format(
        programs=shlex.quote(" ".join(command.name for group in COMMANDS.values() for command in group)),
        values="\n".join(_format_cases()),
        flags=shlex.quote(" ".join(dict.fromkeys(flags))),
        always=" ".join(name for name in PROGRAMS if not name.startswith("python")),
        unless=" ".join(name for name in PROGRAMS if name.startswith("python")),
    )
    # zsh runs bash's functions once it is told to.
    return script if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{script}"


@command_line
def main() -> int:
    """Print the script for the shell that the command line names."""
    parser = ProgramParser(__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    sys.stdout.write(format_completion(parser.parse_args().shell))
    return 0
