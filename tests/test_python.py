"""The package as used by a Python script."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from safetensors.torch import load_file

import tfm_blocks as tfm
from tests.conftest import SMALL
from tests.preloaded import run_python
from tfm_blocks.launch.python import restore_caller
from tfm_blocks.runs.files import read_json

ROOT = Path(__file__).parent.parent
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
RUN = [*SMALL, "dropout=0.2"]
RUN.remove("dropout=0")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new folder for each test, in which runs/ is created."""
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(text: str) -> subprocess.CompletedProcess[str]:
    """Run `text` as a script in the current folder, without a `__main__` guard."""
    Path("script.py").write_text(text)
    return run_on_one_thread("script.py")


def run_on_one_thread(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python with one thread, because the rounding of a run depends on the number."""
    return run_python(arguments, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def config(run: Path) -> dict[str, Any]:
    """Return the config of a run without its name."""
    return {key: value for key, value in yaml.safe_load((run / "config.yaml").read_text()).items() if key != "name"}


def same(run: Path, other: Path) -> bool:
    """Return True if the weights of two runs are bit-identical."""
    one, two = (load_file(each / "weights.safetensors") for each in (run, other))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.grid
def test_two_runs_of_a_script_have_the_config_and_the_weights_of_two_command_lines(folder: Path) -> None:
    for seed in (1, 2):
        run_on_one_thread(
            ROOT / "train.py", "model=prenorm", f"seed={seed}", f"name=shell{seed}", *RUN
        ).check_returncode()
    done = script(
        "import tfm_blocks as tfm\n"
        f"runs = [tfm.train('prenorm', seed=seed, name=f'python{{seed}}', overrides={RUN}) for seed in (1, 2)]\n"
        "print(*[run.folder for run in runs], runs[0].scores['test/loss'], sep='\\n')\n"
    )
    assert done.returncode == 0, done.stderr
    *_, first, second, loss = done.stdout.splitlines()
    assert (first, second) == ("runs/python1", "runs/python2")
    for seed in (1, 2):
        python, shell = folder / f"runs/python{seed}", folder / f"runs/shell{seed}"
        assert same(python, shell) and config(python) == config(shell)
    assert not same(folder / first, folder / second)
    assert float(loss) == read_json(folder / "runs/shell1/status.json")["scores"]["test/loss"]
    assert read_json(folder / first / "run.json")["commands"][0].startswith("tfm train model=prenorm seed=1 ")


@pytest.mark.grid
def test_a_script_without_a_guard_trains_on_two_devices(folder: Path) -> None:
    done = script(f"import tfm_blocks as tfm\ntfm.train('tiny', name='two', overrides={[*RUN, 'trainer.devices=2']})\n")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (folder / "runs").iterdir()] == ["two"]
    assert "cluster: local, rank 0 of 2" in done.stdout and done.stdout.count("folder: runs/two\n") == 1


@pytest.mark.grid
def test_a_script_without_a_guard_trains_once_with_loader_workers(folder: Path) -> None:
    """The worker processes end with the run, because they would ignore the signals of the script's own forkserver pools."""
    done = script(
        "print('script')\nimport tfm_blocks as tfm\nfrom multiprocessing import forkserver\n"
        "before = forkserver._forkserver._preload_modules\n"
        f"tfm.train('tiny', name='loaded', overrides={[*RUN, 'trainer.workers=2']})\n"
        "server = forkserver._forkserver\n"
        "print('fork server:', server._forkserver_pid, server._preload_modules == before)\n"
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (folder / "runs").iterdir()] == ["loaded"]
    assert done.stdout.splitlines().count("script") == 1
    assert done.stdout.splitlines()[-1] == "fork server: None True"


def traces() -> dict[str, Any]:
    """Return the global state that a run uses."""
    names = ("lightning", "lightning.pytorch", "lightning.fabric", "torch.distributed.elastic")
    return {
        "handlers": [signal.getsignal(number) for number in STOPS],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "levels": [logging.getLogger(name).level for name in names],
        "filters": list(warnings.filters),
        "random": torch.get_rng_state().tolist(),
        "hydra": (GlobalHydra.instance().is_initialized(), HydraConfig.instance().cfg),
        "arguments": list(sys.argv),
        "main": sys.modules["__main__"],
        "threads": threading.active_count(),
        "gradients": torch.is_grad_enabled(),
    }


class Raises(Callback):
    """A callback that raises an error."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        raise ValueError("my own mistake")


@pytest.mark.grid
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_does_not_change_the_process_however_it_ends(devices: int) -> None:
    tfm.train("tiny", name="warm", overrides=RUN)  # libraries start threads and read settings when they are used first
    torch.manual_seed(7)
    before = traces()
    tfm.train("tiny", name="done", overrides=RUN)
    assert traces() == before
    with pytest.raises(ValueError, match="my own mistake"):
        tfm.train("tiny", name="broken", overrides=RUN, callbacks=[Raises()])
    assert traces() == before
    with pytest.raises(tfm.ConfigError, match="heads"):
        tfm.train("tiny", name="wrong", overrides=[one for one in RUN if one != "heads=2"], heads=7)
    assert traces() == before
    if devices == 2:
        tfm.train("tiny", name="two", overrides=[*RUN, "trainer.devices=2"])
        assert traces() == before


def test_settings_of_the_compiler_are_restored() -> None:
    before = torch._functorch.config.backward_pass_autocast
    with restore_caller():
        torch._functorch.config.backward_pass_autocast = "off"  # as `trainer.compile=true` does
    assert torch._functorch.config.backward_pass_autocast == before != "off"


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="the C library is asked for the memory of the process")
def test_memory_that_is_freed_after_a_run_goes_back_to_the_system() -> None:
    """Run in a separate process, whose memory nothing else uses. Training keeps freed memory."""
    done = script(
        "import torch, tfm_blocks as tfm\n"
        f"tfm.train('tiny', overrides={RUN})\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = resident()\n"
        "tensors = [torch.ones(2**24) for _ in range(4)]\n"
        "held = resident() - before\n"
        "del tensors\n"
        "print(held, resident() - before)\n"
    )
    held, left = map(int, done.stdout.splitlines()[-1].split())
    assert held > 2**27 and left < held / 10


class Sends(Callback):
    """Send this process a signal after a step, `times` times."""

    def __init__(self, number: signal.Signals, step: int, times: int = 1) -> None:
        self.number, self.step, self.times = number, step, times

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.grid
def test_a_signal_stops_a_run_with_an_exception_and_the_same_call_resumes_it(folder: Path) -> None:
    whole = tfm.train("tiny", name="whole", overrides=RUN)
    with pytest.raises(tfm.PreemptedError, match="stopped by SIGTERM\nresume: tfm train resume=runs/parted"):
        tfm.train("tiny", name="parted", overrides=RUN, callbacks=[Sends(signal.SIGTERM, 3)])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = tfm.train(resume="runs/parted")
    assert resumed.folder == Path("runs/parted") and same(resumed.folder, whole.folder)
    assert len(read_json(resumed.folder / "run.json")["commands"]) == 2


@pytest.mark.grid
def test_a_second_signal_reaches_the_callers_own_handler() -> None:
    with pytest.raises(KeyboardInterrupt):
        tfm.train("tiny", name="again", overrides=RUN, callbacks=[Sends(signal.SIGINT, 2, times=2)])
    assert read_json(Path("runs/again/status.json"))["state"] == "stopped"


@pytest.mark.grid
def test_a_run_in_a_thread_does_not_change_signal_handlers() -> None:
    before, runs = [signal.getsignal(number) for number in STOPS], list[tfm.Run]()
    thread = threading.Thread(target=lambda: runs.append(tfm.train("tiny", name="aside", overrides=RUN)))
    thread.start()
    while thread.is_alive():
        assert [signal.getsignal(number) for number in STOPS] == before
        thread.join(0.1)
    assert runs[0].folder == Path("runs/aside") and runs[0].load(checkpoint=4).translate(["3 March 1987"])


@pytest.mark.grid
def test_divergence_raises_its_exception_and_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests")
    fault = "++model.graph.bad={block: faulty, harm: poison, sound: 0, steps: 2-3-, after: src_pos}"
    with pytest.raises(tfm.DivergedError, match="diverged after 1 step:"):
        tfm.train("tiny", name="bad", plugins=["faulty"], overrides=[*RUN, fault, "trainer.patience_nan=2"])
    assert read_json(Path("runs/bad/status.json"))["state"] == "diverged"
    assert config(Path("runs/bad"))["plugins"] == ["faulty"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"overrides": ["-m", "heads=2,4"]}, "overrides: must be strings such as 'trainer.steps=20', but has '-m'"),
        ({"overrides": ["heads=2,4"]}, "heads: heads=2,4 has several values"),
        ({"heds": 4}, "heds: no such key: heds=4\n  help: did you mean heads?"),
        ({"resume": "runs/none"}, "runs/none: there is no such run folder"),
        ({"callbacks": [print]}, "callbacks: must be Lightning callbacks"),
        ({"callbacks": [ModelCheckpoint()]}, "callbacks: has ModelCheckpoint, but a run writes its own checkpoints"),
        ({"model": "tiny.yaml"}, "model: a model file must be at FOLDER/model/tiny.yaml"),
        ({"callbacks.early_stopping.monitor": "val/blue"}, "must be a validation metric that can improve"),
        ({"callbacks.early_stopping._target_": "os.system"}, "callbacks.early_stopping._target_: no such key"),
        ({"+callbacks._target_": "os.system"}, "callbacks._target_: no such setting"),
    ],
)
def test_a_wrong_call_raises_an_error_that_names_the_fix(call: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(tfm.TfmError) as caught:
        tfm.train(**{"model": None if "resume" in call else "tiny", **call})
    assert message in str(caught.value) and "help: " in str(caught.value)
    assert not (folder / "runs").exists()


@pytest.mark.grid
def test_a_callback_that_other_processes_cannot_import_is_refused() -> None:
    done = script(
        "import tfm_blocks as tfm\nfrom lightning.pytorch import Callback\nclass Mine(Callback): pass\n"
        f"tfm.train('tiny', overrides={[*RUN, 'trainer.devices=2']}, callbacks=[Mine()])\n"
    )
    assert "callbacks: Mine is defined in the script" in done.stderr and not Path("runs").exists()


def test_an_own_model_and_block_build_train_save_and_load(folder: Path) -> None:
    """Run in a separate process, in which nothing is registered yet."""
    shutil.copy(ROOT / "tests" / "faulty.py", folder / "my_blocks.py")
    (folder / "conf" / "model").mkdir(parents=True)
    graph = "{src_pos: {block: faulty, harm: end, sound: 1000}}"
    text = f"# @package _global_\ndefaults: [tiny, _self_]\nmodel: {{graph: {graph}}}\n"
    (folder / "conf" / "model" / "mine.yaml").write_text(text)
    done = script(
        "import tfm_blocks as tfm\n"
        "mine = 'conf/model/mine.yaml'\n"
        "network = tfm.build('mine', config_dir='conf', layers=1, vocab=300, plugins=['my_blocks'])\n"
        f"run = tfm.train(mine, plugins=['my_blocks'], name='mine', overrides={RUN})\n"
        "translator = run.load(plugins=['my_blocks'])\n"
        "print(sum(p.numel() for p in network.parameters()), len(translator.translate(['3 March 1987'])))\n"
        "print(tfm.save(translator.network, 'saved', tokenizer=translator.tokenizer))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "saved"
    assert read_json(folder / "saved" / "model.json")["plugins"] == ["my_blocks"]
    assert "help" in script("import tfm_blocks as tfm\ntfm.load('saved')\n").stderr
    assert script("import tfm_blocks as tfm\ntfm.load('saved', plugins=['my_blocks'])\n").returncode == 0


@pytest.mark.grid
def test_early_stopping_of_lightning_stops_a_run_with_its_reason() -> None:
    stop = EarlyStopping("val/loss", patience=1, min_delta=100.0)
    run = tfm.train(
        "tiny",
        name="early",
        overrides=[one for one in RUN if "steps=6" not in one] + ["trainer.steps=20"],
        callbacks=[stop],
    )
    assert run.status["steps"] == 8 and run.status["reason"].startswith("stopped early: Monitored metric val/loss")


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Restore the default handlers, because earlier tests of the process may have set others."""
    before = {number: signal.getsignal(number) for number in STOPS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
