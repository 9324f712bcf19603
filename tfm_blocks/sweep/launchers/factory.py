"""The launcher that the settings name, and what its jobs must be."""

from __future__ import annotations

from collections.abc import Callable

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.launch.check import CheckedRun, check_remote_run, check_run
from tfm_blocks.sweep.launchers.interface import Launcher
from tfm_blocks.sweep.launchers.settings import LauncherSettings, LocalSettings, RaySettings


def open_launcher(settings: LauncherSettings, *, parallel: int, timeout: float | None) -> Launcher:
    """Raises ConfigError where what it needs is not installed, or where there is no such cluster."""
    if isinstance(settings, LocalSettings):
        from tfm_blocks.sweep.launchers.local import LocalLauncher

        return LocalLauncher(parallel)
    if isinstance(settings, RaySettings):
        from tfm_blocks.sweep.launchers.ray import RayLauncher

        return RayLauncher(settings)
    from tfm_blocks.sweep.launchers.slurm import SlurmLauncher

    return SlurmLauncher(settings, timeout)


def check_of(settings: LauncherSettings) -> Callable[[Composed], CheckedRun]:
    """Return the check of a job for this launcher. The check raises ConfigError."""
    if isinstance(settings, LocalSettings):
        return check_run
    if isinstance(settings, RaySettings) or settings.cluster == "local":
        return _on_one_node
    return check_remote_run


def _on_one_node(composed: Composed) -> CheckedRun:
    run = check_remote_run(composed)
    nodes = run.settings.trainer.num_nodes
    if nodes > 1:
        rule = f"is {nodes}, and this launcher runs each job on one machine"
        raise ConfigError(Problem("trainer.num_nodes", rule, help="leave it out, or submit to Slurm: launcher=slurm"))
    return run
