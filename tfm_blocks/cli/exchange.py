"""Commands that read and write models of other libraries: import and export."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from tfm_blocks.cli import options
from tfm_blocks.errors import DataError, Place, Problem, config_error, print_line

LIBRARIES = ("huggingface", "peft", "ctranslate2", "onnx")
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8")


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of `tfm import` and `tfm export`."""
    what = "import a published model, a folder with config.json, *.safetensors and tokenizer.json, as a run folder"
    command = options.add_command(commands, "import", _import, "import a published model as a run", what)
    command.add("folder", "a folder as transformers saves it", type=Path, metavar="FOLDER")
    what = "a table of a family that is not shipped, next to the YAML file of its model"
    command.add("--family", what, type=Path, metavar="FILE")
    what = "take the long factors of LongRoPE, for texts of all lengths; by default, the short ones up to their length"
    command.add("--long", what, action="store_true")
    command.add_shared(*options.MODEL_OPTIONS)
    command.add("-o", "the new run folder", **options.OUTPUT | {"metavar": "RUN"}, required=True)
    what = "merge a run of adapters into plain weights: the weights of its base plus the adapters"
    help = "add the adapters of a run to its weights"
    command = options.add_command(commands, "merge", _merge, help, what, ["folder"])
    command.add("-o", "the new run folder", **options.OUTPUT | {"metavar": "RUN"}, required=True)
    command.add_shared("--plugins")
    what = "write a run as a folder that transformers, peft, CTranslate2 or ONNX Runtime loads"
    command = options.add_command(commands, "export", _export, "write a run for another library", what, ["folder"])
    command.add("--to", "the library", required=True, choices=LIBRARIES)
    command.add("-o", "the new folder", **options.OUTPUT | {"metavar": "FOLDER"}, required=True)
    add = command.add
    add("--quantization", "ctranslate2: the type of the weights (float32)", choices=QUANTIZATIONS)
    add("--src", "ctranslate2: compare the translations of these lines with the run's", type=Path, metavar="FILE")
    add("--ref", "ctranslate2: also compare BLEU, by these references", type=Path, metavar="FILE")
    command.add_shared("--plugins")


def _import(arguments: Namespace) -> None:
    from tfm_blocks.exchange.importing import import_folder
    from tfm_blocks.exchange.own_family import read_own_family

    if arguments.config_dir and not arguments.family:
        raise config_error("--config-dir", "belongs to --family", "leave it out, or add --family FILE")
    family = read_own_family(arguments.family, arguments.config_dir) if arguments.family else None
    print_line(str(import_folder(arguments.folder, arguments.path, family, long=arguments.long)))


def _merge(arguments: Namespace) -> None:
    from tfm_blocks.exchange.adapters import merge_run

    parameters = merge_run(arguments.folder, arguments.path, arguments.plugins)
    print_line(f"{arguments.path}: {parameters:,} parameters")


def _export(arguments: Namespace) -> None:
    if arguments.to == "ctranslate2":
        _export_ctranslate2(arguments)
        return
    for name in ("quantization", "src", "ref"):
        if getattr(arguments, name) is not None:
            raise config_error(f"--{name}", "is an option of --to ctranslate2", "leave it out")
    if arguments.to == "peft":
        from tfm_blocks.exchange.adapters import export_to_peft

        architecture = export_to_peft(arguments.folder, arguments.path, arguments.plugins)
        print_line(f"{arguments.path}: the adapters of a {architecture}")
        return
    if arguments.to == "onnx":
        from tfm_blocks.exchange.onnx.export import export_to_onnx

        graphs, certificate = export_to_onnx(arguments.folder, arguments.path)
        content, package = ", ".join(f"{name}.onnx" for name in graphs), "onnxruntime"
    else:
        from tfm_blocks.exchange.exporting import export_run

        content, certificate = export_run(arguments.folder, arguments.path)
        package = "transformers"
    print_line(f"{arguments.path}: {content}")
    print(certificate or f"not compared with the run, because {package} is not installed: pip install {package}")


def _export_ctranslate2(arguments: Namespace) -> None:
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
    print_line(f"{arguments.path}: {quantization}\n{certificate}")
