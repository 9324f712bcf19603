"""The launcher that a config names, and its settings."""

from __future__ import annotations

from typing import Any

import pytest

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.folders import CONF, list_options
from tfm_blocks.compose.sweep import read_sweep
from tfm_blocks.config.settings import names_of
from tfm_blocks.errors import ConfigError
from tfm_blocks.sweep.launcher import PACKAGE, LauncherSettings, read_launcher

pytest.importorskip("ray")
pytest.importorskip("submitit")
from tfm_blocks.sweep.launchers.ray import RaySettings
from tfm_blocks.sweep.launchers.slurm import SlurmSettings


def chosen(*overrides: str) -> LauncherSettings:
    """Return the launcher settings that the command line and conf/ give."""
    return read_launcher(read_sweep(parse_request(["-m", *overrides])).launcher)


def test_every_launcher_has_a_module_and_a_config_file() -> None:
    assert set(names_of(PACKAGE)) == list_options("launcher", [CONF]).keys()


def test_an_unknown_launcher_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.name: must be one of local, ray, slurm, but is 'os'"):
        read_launcher({"name": "os"})


@pytest.mark.grid
def test_options_that_only_the_cluster_knows_need_no_plus() -> None:
    slurm = chosen("launcher=slurm", "launcher.sbatch.constraint=a100", "launcher.sbatch.mail-type=END")
    assert isinstance(slurm, SlurmSettings)
    assert slurm.sbatch == {"constraint": "a100", "mail-type": "END"} and slurm.grace == 120
    ray = chosen("launcher=ray", "launcher.resources.a100=0.5", "launcher.memory=2GB")
    assert isinstance(ray, RaySettings)
    assert (ray.resources, ray.memory) == ({"a100": 0.5}, 2 * 1024**3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launcher=slurm", "launcher.memory=32"], "launcher.memory: must be a size of memory, but is 32"),
        (["launcher=slurm", "launcher.grace=null"], "launcher.grace: must be a duration, but is null"),
        (["launcher=slurm", "launcher.setup=x"], "launcher.setup: must be a list"),
        (["launcher=slurm", "launcher.sbatch.requeue=false"], "launcher.sbatch: must give each option text"),
        (["launcher=slurm", "launcher.cpus=0"], "launcher.cpus: must be at least 1"),
        (["launcher=ray", "launcher.resources.a100=one"], "launcher.resources: must say how much of each, but a100"),
        (["launcher=ray", "launcher.address=null"], "launcher.address: must be a str"),
        (["launcher=slurm,ray"], "launcher=slurm,ray has several values"),
    ],
)
def test_a_wrong_launcher_setting_is_reported_with_its_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(*overrides)
    assert message in str(caught.value)


def test_a_sweep_is_the_same_wherever_it_runs() -> None:
    texts = [
        read_sweep(parse_request(["-m", "seed=1,2", *launcher])).texts
        for launcher in ([], ["launcher=slurm", "launcher.qos=high"])
    ]
    assert texts[0] == texts[1] == ("seed=1,2",)


@pytest.mark.grid
def test_devices_match_the_node_and_not_the_submitting_machine(small: Any) -> None:
    many = small("trainer.devices=64", "trainer.accelerator=cuda")
    with pytest.raises(ConfigError, match="trainer"):
        chosen().check(many)
    for launcher in (["launcher=slurm"], ["launcher=ray"]):
        settings = chosen(*launcher)
        assert isinstance(settings, (SlurmSettings, RaySettings))
        assert settings.gpus_of(settings.check(many).settings.trainer) == 64


@pytest.mark.grid
def test_several_nodes_are_for_slurm_alone(small: Any) -> None:
    two = small("trainer.num_nodes=2")
    assert chosen("launcher=slurm").check(two).settings.trainer.num_nodes == 2
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes: is 2, and this launcher runs each job on one"):
        chosen("launcher=ray").check(two)
