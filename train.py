"""Trains one run, or with -m one for each point of a sweep: python train.py model=base heads=8 layers=6."""

import subprocess
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

finished = []  # jobs: what was asked of each, and its exit status


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(config):
    from tfm_blocks.compose.run import task_overrides

    finished.append((" ".join(task_overrides()), told(run_job, config)))


def run_job(config):
    from tfm_blocks.compose.run import compose_run, task_overrides

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return run_apart(task_overrides())
    from tfm_blocks.training.check import checked

    composed = compose_run(config)
    settings = checked(composed)
    from tfm_blocks.training.run import train  # seconds to import: only for a run that can start

    return train(composed, settings)


def run_apart(overrides):
    """A job of a sweep, in a process of its own, which is not left behind."""
    with subprocess.Popen([sys.executable, __file__, *overrides]) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


def told(action, argument):
    """What `action` returns; a mistake of the user's is printed, and its exit status returned."""
    from tfm_blocks.errors import TfmError

    try:
        return action(argument)
    except TfmError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def prepared(arguments):
    from tfm_blocks.compose.command_line import prepare
    from tfm_blocks.compose.help import HELP, help_text

    if not HELP.isdisjoint(arguments):
        sys.exit(print(help_text(arguments)))
    sys.argv[1:] = prepare(arguments)
    return 0


def told_of_sweep():
    failed = [(asked, status) for asked, status in finished if status]
    print(f"sweep: {len(finished) - len(failed)} of {len(finished)} runs done")
    for asked, status in failed:
        print(f"  failed with exit status {status}: {asked}")


if __name__ == "__main__":
    from tfm_blocks.training.signals import end_on_signals

    end_on_signals()
    status = told(prepared, sys.argv[1:])
    if status == 0:
        main()
    if len(finished) > 1:
        told_of_sweep()
    sys.exit(max([status, *(status for _, status in finished)]))
