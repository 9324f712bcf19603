"""The loggers that a config can name are the modules of one package."""

import subprocess
import sys

from tfm_blocks.compose.folders import CONF, list_options
from tfm_blocks.tracking.settings import LOGGERS

LIBRARIES = ("lightning", "wandb", "mlflow", "tensorboard")


def test_every_logger_has_a_module_and_a_config_file() -> None:
    assert LOGGERS.keys() == list_options("logger", [CONF]).keys()


def test_settings_of_loggers_are_read_without_their_libraries() -> None:
    code = (
        "import sys; from tfm_blocks.tracking.settings import LoggerSettings; "
        "LoggerSettings.model_validate({'wandb': {'project': 'p', 'entity': None}}); "
        f"print([name for name in {LIBRARIES} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
