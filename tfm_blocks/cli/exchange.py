"""Commands that read and write models of other libraries: import and export."""

from __future__ import annotations

import argparse
from pathlib import Path

from tfm_blocks.cli import options
from tfm_blocks.errors import ConfigError, DataError, Place, Problem, printable

LIBRARIES = ("huggingface", "peft", "ctranslate2", "onnx")
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8")


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of `tfm import` and `tfm export`."""
    what = "import a published model, a folder with config.json, *.safetensors and tokenizer.json, as a run folder"
    command = options.add_command(commands, "import", _import, "import a published model as a run", what)
    command.add_argument("folder", type=Path, metavar="FOLDER", help="a folder as transformers saves it")
    what = "a table of a family that is not shipped, next to the YAML file of its model"
    command.add_argument("--family", type=Path, metavar="FILE", help=what)
    options.add_shared(command, *options.MODEL_OPTIONS)
    command.add_argument("-o", **options.OUTPUT | {"metavar": "RUN"}, required=True, help="the new run folder")
    what = "merge a run of adapters into plain weights: the weights of its base plus the adapters"
    help = "add the adapters of a run to its weights"
    command = options.add_command(commands, "merge", _merge, help, what, ["folder"])
    command.add_argument("-o", **options.OUTPUT | {"metavar": "RUN"}, required=True, help="the new run folder")
    options.add_shared(command, "--plugins")
    what = "write a run as a folder that transformers, peft, CTranslate2 or ONNX Runtime loads"
    command = options.add_command(commands, "export", _export, "write a run for another library", what, ["folder"])
    command.add_argument("--to", required=True, choices=LIBRARIES, help="the library")
    command.add_argument("-o", **options.OUTPUT | {"metavar": "FOLDER"}, required=True, help="the new folder")
    add = command.add_argument
    add("--quantization", choices=QUANTIZATIONS, help="ctranslate2: the type of the weights (float32)")
    add("--src", type=Path, metavar="FILE", help="ctranslate2: compare the translations of these lines with the run's")
    add("--ref", type=Path, metavar="FILE", help="ctranslate2: also compare BLEU, by these references")
    options.add_shared(command, "--plugins")


def _import(arguments: argparse.Namespace) -> None:
    from tfm_blocks.exchange.importing import import_folder
    from tfm_blocks.exchange.own_family import read_own_family

    family = read_own_family(arguments.family, arguments.config_dir) if arguments.family else None
    print(printable(str(import_folder(arguments.folder, arguments.path, family))))


def _merge(arguments: argparse.Namespace) -> None:
    from tfm_blocks.exchange.adapters import merge_run

    parameters = merge_run(arguments.folder, arguments.path, arguments.plugins)
    print(printable(f"{arguments.path}: {parameters:,} parameters"))


def _export(arguments: argparse.Namespace) -> None:
    if arguments.to == "ctranslate2":
        _export_ctranslate2(arguments)
        return
    for name in ("quantization", "src", "ref"):
        if getattr(arguments, name) is not None:
            raise ConfigError(Problem(f"--{name}", "is an option of --to ctranslate2", help="leave it out"))
    if arguments.to == "peft":
        from tfm_blocks.exchange.adapters import export_to_peft

        architecture = export_to_peft(arguments.folder, arguments.path, arguments.plugins)
        print(printable(f"{arguments.path}: the adapters of a {architecture}"))
        return
    if arguments.to == "onnx":
        from tfm_blocks.exchange.onnx.export import export_to_onnx

        graphs, certificate = export_to_onnx(arguments.folder, arguments.path)
        content, package = ", ".join(f"{name}.onnx" for name in graphs), "onnxruntime"
    else:
        from tfm_blocks.exchange.exporting import export_run

        content, certificate = export_run(arguments.folder, arguments.path)
        package = "transformers"
    print(printable(f"{arguments.path}: {content}"))
    print(certificate or f"not compared with the run, because {package} is not installed: pip install {package}")


def _export_ctranslate2(arguments: argparse.Namespace) -> None:
    from tfm_blocks.data.files import read_lines
    from tfm_blocks.exchange.ctranslate2.export import export_to_ctranslate2

    sources = list(read_lines(arguments.src, "--src")) if arguments.src else []
    references = list(read_lines(arguments.ref, "--ref")) if arguments.ref else []
    if arguments.src and not sources:
        raise DataError(Problem("--src", "has no line", Place(str(arguments.src)), help="leave --src and --ref out"))
    if arguments.ref and len(references) != len(sources):
        rule = f"needs as many lines as --src, but they have {len(references)} and {len(sources)}"
        raise DataError(Problem("--ref", rule, help="line N of --ref translates line N of --src"))
    quantization = arguments.quantization or QUANTIZATIONS[0]
    certificate = export_to_ctranslate2(arguments.folder, arguments.path, quantization, sources, references)
    print(printable(f"{arguments.path}: {quantization}\n{certificate}"))
