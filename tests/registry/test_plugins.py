"""Blocks of other packages."""

import subprocess
import sys

import pytest

from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.model import write_model

BLOCK = """
from torch import Tensor, nn
from tfm_blocks.registry.blocks import block

@block("announced", "x: B N D -> B N D", source="none")
class Announced(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND
"""
MODEL = "# @package _global_\ndefaults: [tiny, _self_]\nmodel: {graph: {src_pos: {block: announced}}}\n"
BUILD = "import tfm_blocks as tfm; print(sum(p.numel() for p in tfm.build('mine.yaml', vocab=9720).parameters()))"
LOAD = "import tfm_blocks as tfm; tfm.load('run')"


@pytest.fixture
def python(tmp_path):
    """Run Python in a folder with a model, with an installed package that declares its block by an entry point."""
    site = tmp_path / "site"
    (site / "other-1.0.dist-info").mkdir(parents=True)
    (site / "other_blocks.py").write_text(BLOCK)
    (site / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (site / "other-1.0.dist-info" / "entry_points.txt").write_text("[tfm_blocks.blocks]\nother = other_blocks\n")
    (tmp_path / "mine.yaml").write_text(MODEL)

    def run(*arguments):
        path = f"import sys; sys.path.append({str(site)!r}); "
        command = [sys.executable, "-c", path + arguments[0]]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


@pytest.mark.grid
def test_build_knows_the_blocks_that_installed_packages_announce(python):
    done = python(BUILD)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2569216\n"


@pytest.mark.grid
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(None, "ModuleNotFoundError: No module named 'other_blocks'", marks=pytest.mark.grid),
        pytest.param("1 / 0", "ZeroDivisionError: division by zero", marks=pytest.mark.grid),
        ("import sys; sys.exit('gone')", "SystemExit: gone"),
    ],
)
def test_a_broken_entry_point_is_a_warning_and_stops_only_models_that_need_it(python, tmp_path, source, reason):
    module = tmp_path / "site" / "other_blocks.py"
    module.unlink() if source is None else module.write_text(source)
    done = python("from tfm_blocks.cli import main; main(['check', 'tiny'])")
    assert (done.returncode, done.stdout) == (0, "tiny: fine, 25 nodes\n"), done.stderr
    plugin = "the plug-in other 1.0 (other = other_blocks)"
    rule = f"{plugin} failed to load, so its blocks are missing: {reason}; reinstall it or remove it"
    assert done.stderr == f"warning: {rule}\n"
    done = python("from tfm_blocks.cli import main; main(['check', 'mine.yaml'])")
    assert done.returncode == 2 and done.stderr.count("warning: ") == 1
    assert "no block is called 'announced'" in done.stderr
    assert f"it may be a block of {plugin}, which failed to load" in done.stderr


@pytest.mark.grid
def test_load_knows_the_blocks_that_installed_packages_announce(python, tmp_path):
    (tmp_path / "run").mkdir()
    model = compose_model("tiny").model
    model["graph"]["src_pos"] = {"block": "announced"}
    write_model(tmp_path / "run", model, [])
    done = python(LOAD)
    assert "has no weights.safetensors" in done.stderr, "the model was checked"


@pytest.mark.grid
def test_a_model_uses_the_plug_ins_whose_blocks_it_has_wherever_their_classes_are_written(tmp_path):
    """The package registers its block in a submodule, and the other plug-in imports a module that registers one."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import package.inner")
    (tmp_path / "package" / "inner.py").write_text(BLOCK)
    (tmp_path / "outer.py").write_text("import elsewhere")
    (tmp_path / "elsewhere.py").write_text(BLOCK.replace("announced", "other").replace("Announced", "Other"))
    script = (
        "from tfm_blocks.registry.plugins import load_plugins, plugins_in_use\n"
        "names = ['outer', 'package', 'math']\nload_plugins(names)\nload_plugins(names)\n"
        "print(*[plugins_in_use(names, used) for used in (['announced'], ['other', 'attention'], ['attention'], ['other', 'announced'])])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "['package'] ['outer'] [] ['outer', 'package']\n", done.stderr


@pytest.mark.grid
def test_modules_that_are_named_are_found_in_the_current_folder_by_python_too(tmp_path):
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text(
        "from tfm_blocks.registry.plugins import load_plugins\nload_plugins(['my_blocks'])\n"
    )
    (tmp_path / "my_blocks.py").write_text(BLOCK)
    done = subprocess.run([sys.executable, "script/script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "rule", "line", "help"),
    [
        ("import sys\nsys.exit()", "ends the process when it is imported", 2, "below the line if __name__"),
        ("\n\n1 / 0", "fails when it is imported: ZeroDivisionError: division by zero", 3, "whole traceback"),
        ("import nowhere_else", "cannot be imported: No module named 'nowhere_else'", 1, "install nowhere_else"),
        (BLOCK.replace("x_BND: T", "y: T"), "TypeError: block 'announced': forward takes y", 5, "whole traceback"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_with_its_line(tmp_path, monkeypatch, source, rule, line, help):
    (tmp_path / "faulty_module.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_plugins(["faulty_module"])
    (problem,) = caught.value.problems
    assert problem.address == "plugins" and rule in problem.rule and help in problem.help
    assert (problem.place.file, problem.place.line) == ("faulty_module.py", line)


def test_the_file_of_a_plug_in_is_named_without_its_suffix(tmp_path, monkeypatch):
    (tmp_path / "my_fine_module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"help: leave \.py out: my_fine_module$"):
        load_plugins(["my_fine_module.py"])
