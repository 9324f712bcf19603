"""Trains one run, or with -m one for each point of a sweep: python train.py model=base heads=8 layers=6."""

import subprocess
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

exit_codes = [0]


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(config):
    exit_codes.append(told(run_job, config))


def run_job(config):
    from tfm_blocks.compose import compose_run, task_overrides

    if HydraConfig.get().mode == RunMode.MULTIRUN:  # every job of a sweep is a process of its own
        return subprocess.run([sys.executable, __file__, *task_overrides()], check=False).returncode
    from tfm_blocks.training.check import checked

    composed = compose_run(config)
    settings = checked(composed)
    from tfm_blocks.training.run import train  # seconds to import: only for a run that can start

    return train(composed, settings)


def told(action, argument):
    """What `action` returns; a mistake of the user's is printed, and its exit status returned."""
    from tfm_blocks.errors import TfmError

    try:
        return action(argument)
    except TfmError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def prepared(arguments):
    from tfm_blocks.compose import prepare

    sys.argv[1:] = prepare(arguments)
    return 0


if __name__ == "__main__":
    status = told(prepared, sys.argv[1:])
    if status == 0:
        main()
    sys.exit(max(exit_codes, default=0) or status)
