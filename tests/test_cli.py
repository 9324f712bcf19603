"""The command `tfm`."""

import contextlib
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from tests.conftest import COMPOSER, refused, save
from tests.exchange.published import publish
from tests.preloaded import run_python
from tests.run_folders import change_json, leave_run
from tfm_blocks.cli import main, run_command
from tfm_blocks.cli.train import _run_training
from tfm_blocks.compose.folders import CONF, FAMILIES
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.run import compose_job
from tfm_blocks.devices import choose_device
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.launch.check import check_run
from tfm_blocks.network.build import build_network, check_model, count_parameters
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.report.screen import screen
from tfm_blocks.runs.model import write_model
from tfm_blocks.sweep.view import show_end
from tfm_blocks.translation.save import save_network


def test_check_of_a_valid_model_prints_fine(capsys):
    main(["check", "base", "heads=4"])
    assert capsys.readouterr().out == "base: fine, 35 nodes\n"


def test_show_lists_layers_once_with_shapes_and_counts(capsys):
    main(["show", "tiny", "vocab=9720"])
    shown = capsys.readouterr().out
    assert "66,304 × 4" in shown and "B T 9720" in shown
    assert "2,569,216 parameters" in shown
    assert "encoder.1.attn " not in shown.split("reads")[1].split("decoder.0.self")[0].replace("encoder.1.ffn", "")


def test_show_reads_a_model_of_an_own_folder(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\nlayers: 1\n")
    main(["show", "mine", "--config-dir", str(tmp_path)])
    assert "model mine" in capsys.readouterr().out


def test_show_of_a_run_refuses_a_config_folder(tmp_path):
    (tmp_path / "run").mkdir()
    assert "--config-dir: has no effect on " in refused("show", tmp_path / "run", "--config-dir", tmp_path)


@pytest.mark.parametrize("value", ["my_blocks", "5", "[5]"])
@pytest.mark.parametrize("command", ["show", "check"])
def test_plugins_that_are_no_list_of_names_are_refused_with_their_place(command, value):
    error = refused(command, "tiny", "data=parity", f"plugins={value}")
    assert "must be a " in error and f"plugins comes from the command line: plugins={value}" in error


def test_blocks_lists_every_block_with_its_signature(capsys):
    main(["blocks"])
    assert "x: B T D, kv?: B S E, score_bias?: heads T S -> B T D" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["ffn"], ["--test", "a_module"]], ids=" ".join)
def test_the_page_of_blocks_takes_no_names(words):
    assert "--markdown: prints the page of all blocks" in refused("blocks", "--markdown", *words)


def test_blocks_with_a_name_prints_arguments_and_source(capsys):
    main(["blocks", "ffn"])
    shown = capsys.readouterr().out
    assert "d_ff" in shown and "relu | gelu" in shown and "section 3.3" in shown


@pytest.mark.parametrize("beam", ["0", "-1", "two", "9" * 5000])
def test_an_invalid_count_has_a_short_error(beam):
    assert len(refused("translate", "run", "--beam", beam).splitlines()[-1]) < 300


def test_the_help_of_tfm_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "check", "show", "blocks", "translate", "evaluate", "average"))


@pytest.mark.grid
def test_a_full_disk_is_an_error_without_a_traceback():
    run = Path(__file__).parent / "runs" / "format_1"
    command = f"echo Haus | {sys.executable} -m tfm_blocks translate {run} > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("error: output: No space left")


@pytest.mark.parametrize(
    ("error", "end"),
    [
        ("PermissionError(13, 'Permission denied', 'out.png')", "error: out.png: Permission denied"),
        ("ConnectionRefusedError(111, 'refused')", "error: ConnectionRefusedError: refused"),
        ("OSError('a bug')", "OSError: a bug"),
    ],
)
def test_an_error_of_the_system_is_a_sentence_and_one_of_a_library_keeps_its_traceback(error, end):
    code = (
        f"import sys; from tfm_blocks.cli import run_command as run; sys.exit(run(lambda: exec({f'raise {error}'!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, end)
    assert ("Traceback" in done.stderr) == (not end.startswith("error"))


def refuse():
    print("a line without an end", end="")
    raise ConfigError(Problem("model", "is wrong"))


@pytest.mark.parametrize(
    ("stream", "run", "action", "status"),
    [
        ("stdout", run_command, lambda: screen().print("a line"), 0),
        ("stdout", _run_training, lambda: screen().print("a line"), 128 + signal.SIGPIPE),
        ("stderr", run_command, refuse, 2),
        ("stdout", run_command, refuse, 2),
    ],
)
def test_a_pipe_that_its_reader_closed_keeps_the_exit_status(stream, run, action, status, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as out:
        monkeypatch.setattr(sys, stream, out)
        assert run(action) == status
        with contextlib.suppress(BrokenPipeError):
            out.close()


def test_brackets_and_colons_of_a_folder_are_printed_as_they_are(tmp_path, capsys, monkeypatch):
    """rich would read [/x] as the end of a style and :key: as a picture."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "[/x]" / ":key:"
    shutil.copytree(Path(__file__).parent / "runs" / "format_1", folder)
    (tmp_path / "[/x]" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\nlayers: 1\n")
    (tmp_path / "text").write_text("Haus\n")
    for command, expected in (
        (["evaluate", "[/x]/:key:", "--src", "text", "--ref", "text"], "[/x]/:key: "),
        (["show", "[/x]/mine.yaml"], "model [/x]/mine.yaml"),
        (["show", "[/x]/:key:"], "[/x]/:key:: "),
        (["runs", "--in", "[/x]"], "[/x]/:key: "),
        (["compare", "[/x]"], " :key: "),
    ):
        main(command)
        assert expected in capsys.readouterr().out
    show_end([], Path("runs/[/x]"))
    assert "runs/[/x]" in capsys.readouterr().out


@pytest.mark.grid
def test_commands_that_compute_take_the_device_that_training_would(tmp_path, monkeypatch, capsys):
    """Without CUDA this is the CPU; `pytest -m gpu` tests the other."""
    shutil.copytree(Path(__file__).parent / "runs" / "format_1", tmp_path / "run")
    (tmp_path / "lines").write_text("ein Haus\n")
    monkeypatch.chdir(tmp_path)
    device = choose_device("auto")
    assert device == ("cuda" if torch.cuda.is_available() else "cpu")
    for command in (
        ["evaluate", "run", "--src", "lines", "--ref", "lines"],
        ["translate", "run"],
        ["attention", "run", "ein Haus", "-o", "out.html"],
    ):
        said = []
        for options in ([], ["--device", "auto"], ["--device", device]):
            with Path("lines").open() as lines:
                monkeypatch.setattr(sys, "stdin", lines)
                main([*command, *options])
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] == said[2]
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "auto: the accelerator if there is one" in " ".join(capsys.readouterr().out.split())


def test_show_of_a_run_prints_its_state_and_its_trained_nodes(translator, tmp_path, capsys):
    save(translator, tmp_path / "run")
    (tmp_path / "run" / "status.json").write_text('{"state": "done", "steps": 850, "scores": {"test/bleu": 31.25}}')
    (tmp_path / "run" / "run.json").write_text('{"commands": ["python train.py model=[tiny]"]}')
    main(["show", str(tmp_path / "run")])
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'run'}: done, 850 steps, test/bleu 31.25\npython train.py model=[tiny]\n" in shown
    count = sum(one.numel() for one in translator.network.parameters())
    assert f"{count:,} parameters" in shown and "decoder.0.cross" in shown
    main(["show", str(tmp_path / "run"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["run"]["state"], report["run"]["step"], report["run"]["facts"]) == ("done", 850, {})
    assert report["run"]["commands"] == ["python train.py model=[tiny]"] and report["parameters"] == count
    assert "whose settings cannot be changed: 'heads=2'" in refused("show", tmp_path / "run", "heads=2")
    assert "this is not a run folder" in refused("show", tmp_path, status=1)


def test_models_lists_models_of_config_dir_with_their_comments(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "# @package _global_\n# two [b]heads\ndefaults: [tiny, _self_]\nheads: 2\n"
    )
    (tmp_path / "model" / "wrong.yaml").write_text("# @package _global_\ndefaults: [\n")
    main(["models", "--config-dir", str(tmp_path), "--json"])
    models = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    shipped = [path.stem for folder in (CONF, FAMILIES) for path in (folder / "model").glob("*.yaml")]
    assert sorted(models) == sorted([*shipped, "mine", "wrong"])
    assert (models["mine"]["parents"], models["mine"]["knobs"], models["mine"]["about"]) == (
        ["tiny"],
        ["heads=2"],
        "two [b]heads",
    )
    assert models["wrong"]["about"].startswith("invalid: ")
    assert all(one["about"] for one in models.values()) and "figure 1" in models["base"]["about"]
    main(["models", "--config-dir", str(tmp_path)])
    assert "two [b]heads" in capsys.readouterr().out


HALF = "half \ud800 a letter"


def output_of(command, terminal, monkeypatch):
    """Return the output of a command on a terminal or in a pipe that accepts only UTF-8."""
    read, write = pty.openpty() if terminal else os.pipe()
    with ThreadPoolExecutor() as reader:
        said = reader.submit(lambda: b"".join(parse_parts(read)))
        with os.fdopen(write, "w", encoding="utf-8") as out:
            monkeypatch.setattr(sys, "stdout", out)
            main(command)
        return said.result().decode()


def parse_parts(descriptor):
    with os.fdopen(descriptor, "rb", buffering=0) as file, contextlib.suppress(OSError):  # a terminal's end is an error
        while part := file.read(1 << 16):
            yield part


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("command", [["runs", "--in"], ["show"], ["compare"], ["compare", "--csv"], ["runs", "--json", "--in"]], ids=" ".join)  # fmt: skip
def test_lone_surrogates_in_files_of_a_run_are_printed_as_json_escapes(command, terminal, tmp_path, monkeypatch):
    run = leave_run(tmp_path / "runs" / "one", ["Haus"], ["Haus"])
    write_model(run, compose_model("tiny").model, [])
    for name, key in (("run.json", "commands"), ("status.json", "state")):
        change_json(run / name, {key: [HALF] if key == "commands" else HALF})
    monkeypatch.setenv("COLUMNS", "200")
    said = output_of([*command, str(run if command[0] == "show" else run.parent)], terminal, monkeypatch)
    assert r"half \ud800 a letter" in said
    if "--json" in command:
        (entry,) = json.loads(said)
        assert (entry["state"], entry["commands"]) == (HALF, [HALF])


@pytest.mark.grid
@pytest.mark.parametrize("method", ["grid", "random", "bayes"])
def test_a_sweep_for_agents_is_refused_if_a_value_could_not_be_trained(method, tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    with pytest.raises(SystemExit) as left:
        main(["dashboard", "sweep", "tiny", "heads=2,3", "layers=1,2", "--method", method, "-o", str(file)])
    stderr = capsys.readouterr().err
    assert left.value.code == 2 and not file.exists()
    assert "help: leave out heads=3" in stderr and "but D = 128 (the width of src_pos), heads = 3" in stderr
    main(["dashboard", "sweep", "tiny", "heads=2,4", "layers=1,2", "--method", method, "-o", str(file)])
    assert "heads" in file.read_text()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "val/bleu"], "--metric: is val/bleu, which a run of"),
        (["logger=csv"], "logger: does not log to W&B"),
    ],
)
def test_a_sweep_for_agents_is_refused_if_wandb_would_not_receive_the_metric(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(["dashboard", "sweep", "probe_decoder", "data=parity", "d_model=16,32", *words])
    assert left.value.code == 2 and capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.grid
def test_commands_on_models_take_what_train_takes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def output(*words):
        main(list(words))
        return capsys.readouterr().out

    lite = ["experiment=probe/lite", "data=parity", "seed=3"]
    assert output("check", *lite) == output("check", "probe_decoder", *lite) == "probe_decoder: fine, 10 nodes\n"
    assert output("check", "base", "experiment=probe/lite", "trainer.steps=700") == "base: fine, 35 nodes\n"
    jobs = output("check", "-m", "experiment=probe/lite", "data=parity,mqar", "mixer=attention,lstm", "seed=1")
    assert jobs.count("fine") == 4 and "model=probe_decoder experiment=probe/lite data=mqar mixer=lstm" in jobs
    spec = compose_job([*lite], COMPOSER)
    parameters = count_parameters(check_run(spec).spec)
    assert json.loads(output("show", *lite, "--json"))["parameters"] == parameters
    assert f"{parameters:,} parameters" in output("show", "probe_decoder", *lite)
    assert "B T 7" in output("show", *lite)
    output("figure", *lite, "--shapes", "-o", "parity.svg")
    assert "B T 7" in (tmp_path / "parity.svg").read_text().replace("</tspan>", "")
    same = output("diff", "probe_decoder", *lite, "model=probe_decoder", *lite, "mixer=lstm")
    assert "decoder.*.self" in same
    solved = output(
        "solve", "probe_decoder", "d_ff", *lite, "mixer=retention", "--like", "probe_decoder", "--parameters"
    )
    assert f"{parameters:,} parameters requested" in solved
    command = shlex.split(solved.splitlines()[-1])[2:]
    assert count_parameters(check_run(compose_job(command, COMPOSER)).spec) == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(
    ("command", "status", "rule"),
    [
        ("check base heads=7", 2, "D % heads == 0"),
        ("show tiny --weights --plan", 2, "argument --plan: not allowed with argument --weights"),
        ("show tiny --weights --plan --card h100", 2, "argument --plan: not allowed with argument --weights"),
        ("show tiny --weights --devices 8", 2, "--devices: no effect without --plan"),
        ("show tiny --weights --src 9 --length tgt=4", 2, "--src, --length: no effect with --weights"),
        ("blocks atention", 2, "did you mean attention?"),
        ("translate no/run", 1, "there is no such run folder"),
        ("average no/run", 1, "there is no such run folder"),
        ("translate docs", 1, "did not finish\n  help: tfm runs lists all runs"),
        ("translate run --src x", 2, "unrecognized arguments: --src x; tfm translate --help lists the arguments"),
        ("show", 2, "the following arguments are required: MODEL|RUN\n"),
        ("translate run --top-k 3 --seed 2", 2, "--top-k, --seed: no effect without --sample"),
        ("check base data=parity trainer.steps=-4", 2, "trainer.steps: must be at least 1, but is -4"),
        ("check data=in_context_recall model=probe_encoder", 2, "model.inputs: reads all of src"),
        ("check base data=partiy", 2, "data: no data is called 'partiy'"),
        ("check base seed=1 hedas=2", 2, "hedas: no such key: hedas=2"),
        ("show heads=2,4", 2, "heads: heads=2,4 has several values"),
        ("show x.yaml seed=2", 2, "x.yaml: is a path, and overrides of a run"),
        ("figure tests/runs/format_1 -o x.svg --config-dir conf", 2, "--config-dir: has no effect on tests/runs/"),
        ("eject tests/runs/format_1 -o x.py --config-dir conf", 2, "--config-dir: has no effect on tests/runs/"),
        ("view tests/runs/format_1 -o x.html --config-dir conf", 2, "--config-dir: has no effect on tests/runs/"),
        ("view tiny -o x.html --port 8000", 2, "--port: belongs to --watch"),
        ("import theirs -o run --config-dir conf", 2, "--config-dir: belongs to --family"),
        ("compare runs --scaling --csv --exponents", 2, "--exponents: adds a table, but --csv prints only"),
        ("solve tiny d_ff --parameters 1M --within -1", 2, "--within: must be a percentage of at least 0"),
    ],
)
def test_a_wrong_command_is_refused_with_its_rule(command, status, rule):
    assert rule in refused(*command.split(), status=status)


def test_a_folder_that_is_not_a_run_does_not_hide_a_model_of_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    main(["show", "tiny", "--weights", "--json"])
    assert json.loads(capsys.readouterr().out)["model"] == "tiny"
    main(["figure", "tiny", "-o", "tiny.svg"])
    assert Path("tiny.svg").is_file()


@pytest.mark.grid
@pytest.mark.parametrize(("other", "model"), [("decoder", "model=probe_decoder "), ("encoder", "")])
def test_a_check_of_several_experiments_has_a_job_for_each(other, model, tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    for name, chosen in (("one", "decoder"), ("two", other)):
        text = f"# @package _global_\ndefaults:\n  - override /data: parity\n  - override /model: probe_{chosen}\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    main(["check", "-m", "experiment=one,two", "--config-dir", str(tmp_path)])
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == [f"{model}experiment=one", f"{model}experiment=two"]


def test_a_model_file_in_a_config_folder_takes_overrides_of_a_run(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "mine.yaml"
    path.write_text("# @package _global_\ndefaults: [probe_decoder, _self_]\nlayers: 1\n")
    main(["check", str(path), "data=parity", "seed=4"])
    assert capsys.readouterr().out == f"{path}: fine, 7 nodes\n"


@pytest.mark.parametrize("words", [["check", "base"], ["show", "base"], ["diff", "tiny", "base"]])
def test_the_last_of_two_overrides_of_a_key_wins_and_is_named(words, capsys):
    main([*words, "heads=3", "layers=2", "heads=4"])
    assert "heads=3: replaced by heads=4, which comes later\n" in capsys.readouterr().err


@pytest.mark.parametrize("first", ["data.train=1", "data.train=20"])
def test_the_last_of_two_overrides_wins_in_training(first, tmp_path):
    words = ["train.py", first, "model=base", "data.train=20", "model=tiny", "--cfg", "job"]
    done = run_python([Path(__file__).parents[1] / words[0], *words[1:]], tmp_path, timeout=60)
    assert "  train: 20\n" in done.stdout and "d_model: 128" in done.stdout
    assert f"{first}: replaced by data.train=20, which comes later" in done.stderr
    assert "model=base: replaced by model=tiny" in done.stderr


PLUGIN = """
from torch import Tensor, nn
from tfm_blocks.registry.blocks import block

@block("cli_doubled", "x: B N D -> B N D", source="a test")
class Doubled(nn.Module):
    \"\"\"2 x.\"\"\"

    def forward(self, x_BND: Tensor) -> Tensor:
        return 2 * x_BND
"""
TWICE = """# @package _global_
defaults: [tiny, _self_]
layers: 1
model: {graph: {twice: {block: cli_doubled, after: src_pos}}}
"""


@pytest.fixture
def own_model(tmp_path, monkeypatch, translator):
    """Write a plug-in, the model `twice` in the folder conf, and its run `run`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(REGISTRY, "blocks", dict(REGISTRY.blocks))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("cli_plugin", None)
    (tmp_path / "cli_plugin.py").write_text(PLUGIN)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/twice.yaml").write_text(TWICE)
    load_plugins(["cli_plugin"])
    composed = compose_model(
        "twice", [f"vocab={translator.tokenizer.size}", "d_model=16", "d_ff=24"], tmp_path / "conf"
    )
    network = build_network(check_model(composed.model, composed.sources), seed=1)
    save_network(network, tmp_path / "run", translator.tokenizer)
    for name in ("cli_doubled", "cli_plugin"):
        REGISTRY.blocks.pop(name, None)
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "words",
    [
        ["check", "twice"],
        ["check", "-m", "twice", "heads=2,4"],
        ["show", "twice"],
        ["show", "twice", "--plan"],
        ["figure", "twice", "-o", "twice.svg"],
        ["figure", "run", "-o", "twice.svg"],
        ["diff", "twice", "tiny", "layers=1"],
        ["diff", "run", "twice"],
        ["view", "twice", "-o", "page.html"],
        ["eject", "twice", "-o", "model.py"],
        ["eject", "run", "-o", "model.py", "--weights", "model.pt"],
        ["solve", "twice", "d_ff", "--like", "tiny", "layers=1", "--parameters"],
        ["dashboard", "sweep", "twice", "heads=2,4", "-o", "sweep.yaml"],
        ["show", "run"],
    ],
    ids=" ".join,
)
def test_every_command_that_reads_models_takes_own_folders_and_plug_ins(words, own_model, capsys):
    folder = [] if "run" in words and "twice" not in words else ["--config-dir", "conf"]
    main([*words, *folder, "--plugins", "cli_plugin"])
    if words[0] == "dashboard":
        assert "[cli_plugin]" in Path("sweep.yaml").read_text()
    if words[0] == "solve":
        assert "'plugins=[cli_plugin]'" in capsys.readouterr().out
    assert "cli_doubled" in REGISTRY.blocks


def test_a_run_with_a_plug_in_names_the_option_that_every_command_on_runs_takes(own_model):
    change_json(Path("run/model.json"), {"plugins": ["never_loaded"]})
    assert "--plugins never_loaded" in refused("export", "run", "--to", "huggingface", "-o", "out", status=1)


@pytest.mark.grid
def test_a_family_of_ones_own_has_its_model_in_the_config_folder(own_model, capsys):
    text = (files("tfm_blocks.exchange") / "families" / "llama.yaml").read_text("utf-8")
    Path("other.yaml").write_text(text.replace("model: llama", "model: mine"))
    Path("conf/model/mine.yaml").write_text("# @package _global_\ndefaults: [llama, _self_]\n")
    publish("llama", Path("theirs"))
    main(["import", "theirs", "--family", "other.yaml", "-o", "imported", "--config-dir", "conf"])
    assert "--config-dir=conf model=mine" in capsys.readouterr().out
