"""Shell completion of commands, options, models, blocks, run folders, and the groups, keys and names of a run."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfm_blocks.cli import options
from tfm_blocks.errors import TfmError

SCRIPT = r"""
# `python train.py …` is completed as `tfm train …`
_tfm_train_py() {
    if [[ -n "${ZSH_VERSION-}" ]]; then
        if [[ "${words[2]:t}" != train.py ]]; then _default; return; fi
        local IFS=$'\013' typed="${BUFFER%%train.py*}train.py" completions
        completions=($(IFS="$IFS" COMP_LINE="tfm train${BUFFER#$typed}" COMP_POINT=$((CURSOR - ${#typed} + 9)) \
            _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=zsh _ARGCOMPLETE_SUPPRESS_SPACE=1 __python_argcomplete_run tfm))
        _describe tfm completions -S ''
    elif [[ "${COMP_WORDS[1]##*/}" == train.py ]]; then
        local typed="${COMP_LINE%%train.py*}train.py"
        COMP_LINE="tfm train${COMP_LINE#"$typed"}" COMP_POINT=$((COMP_POINT - ${#typed} + 9))
        _python_argcomplete tfm
    fi
}
if [[ -n "${ZSH_VERSION-}" ]]; then
    compdef _tfm_train_py python python3
else
    complete -o nospace -o default -o bashdefault -F _tfm_train_py python python3
fi
"""
ZSH = "autoload -Uz compinit && (( $+functions[compdef] )) || compinit\n"


def add_commands(commands: options.Commands) -> None:
    """Add the parser of `tfm completion`."""
    what = 'for ~/.bashrc: eval "$(tfm completion bash)"; for ~/.zshrc: eval "$(tfm completion zsh)"'
    command = commands.add_parser("completion", help="print the shell script that completes tfm", description=what)
    command.add_argument("shell", choices=("bash", "zsh"))
    command.set_defaults(run=_print, data=True)


def _print(arguments: Namespace) -> None:
    import argcomplete

    script = argcomplete.shell_integration.shellcode(["tfm"], shell=arguments.shell)
    print((ZSH if arguments.shell == "zsh" else "") + script + SCRIPT, end="")


def complete(parser: ArgumentParser) -> None:
    """Print the completions that the shell requested, and exit."""
    import argcomplete

    for name, command in _commands(parser):
        if name == "train":
            # Hydra parses these options
            command.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
            command.add_argument("-cd", "--config-dir", type=Path)
            command.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
            for flags in (["-m", "--multirun"], ["--resolve"], ["--yes"], ["--version"], ["--hydra-help"]):
                command.add_argument(*flags, action="store_true")
        for action in command._actions:
            if action.metavar in COMPLETED:
                action.completer = _complete  # type: ignore[attr-defined]  # for argcomplete
    argcomplete.autocomplete(parser, always_complete_options=False)


def _commands(parser: ArgumentParser) -> Iterator[tuple[str, ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for name, command in action.choices.items():
                yield name, command
                yield from _commands(command)


def _complete(prefix: str, action: Action, parsed_args: Namespace, **_: Any) -> list[str]:
    """Return the completions of an argument by its metavar; none if a file of the config folder is invalid."""
    from tfm_blocks.compose.completion import complete_override, list_blocks
    from tfm_blocks.compose.folders import config_folders, list_options

    folder, kind = getattr(parsed_args, "config_dir", None), str(action.metavar)
    names: list[str] = []
    with suppress(TfmError):
        if kind == "KEY=VALUE":
            name, equals, typed = prefix.partition("=")
            if equals and name in ("resume", "cooldown", "init_from"):
                return [f"{name}={run}" for run in _folders_with("model.json") if run.startswith(typed)]
            model = [f"model={parsed_args.model}"] if getattr(parsed_args, "model", None) else []
            return complete_override(prefix, [*model, *(parsed_args.overrides or [])], folder)
        if kind.startswith("MODEL"):
            names += list_options("model", config_folders(folder))
    if "RUN" in kind:
        names += _folders_with("model.json")
    if kind == "RUNS":
        names = sorted([*names, *_folders_with("sweep.json")])
    if kind == "BLOCK":
        names = list_blocks()
    if kind == "TASK":
        from tfm_blocks.probes.catalogue import TASKS

        names = list(TASKS)
    return [name for name in names if name.startswith(prefix)]


def _folders_with(name: str) -> list[str]:
    """Return the folders below runs/ and in sweeps that contain a file."""
    return sorted(str(path.parent) for depth in ("*", "*/*") for path in Path("runs").glob(f"{depth}/{name}"))


COMPLETED = ("KEY=VALUE", "MODEL", "MODEL|RUN", "RUN", "RUN2", "RUNS", "BLOCK", "TASK")  # metavars
