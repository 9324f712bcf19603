"""Commands that read and write models of other libraries: import and export."""

from __future__ import annotations

import argparse
from pathlib import Path

from tfm_blocks.cli import options


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of `tfm import` and `tfm export`."""
    what = "import a published model, a folder with config.json, *.safetensors and tokenizer.json, as a run folder"
    command = options.add_command(commands, "import", _import, "import a published model as a run", what)
    command.add_argument("folder", type=Path, metavar="FOLDER", help="a folder as transformers saves it")
    _add_output(command, "RUN", "the new run folder")
    what = "write a run as a folder that transformers loads, if it has the graph of a published family"
    command = options.add_command(commands, "export", _export, "write a run for another library", what)
    options.add_run(command)
    command.add_argument("--to", required=True, choices=("huggingface",), help="the library")
    _add_output(command, "FOLDER", "the new folder")


def _add_output(command: argparse.ArgumentParser, metavar: str, help: str) -> None:
    command.add_argument("-o", type=Path, required=True, dest="path", metavar=metavar, help=help)


def _import(arguments: argparse.Namespace) -> None:
    from tfm_blocks.exchange.importing import import_folder

    print(import_folder(arguments.folder, arguments.path))


def _export(arguments: argparse.Namespace) -> None:
    from tfm_blocks.exchange.exporting import export_run

    print(f"{arguments.path}: {export_run(arguments.folder, arguments.path)}")
