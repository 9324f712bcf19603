"""Log to TensorBoard with Lightning's logger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np
import yaml
from PIL import Image

from tfm_blocks.config.settings import Settings
from tfm_blocks.metric_schema import IN_EVERY_ROW
from tfm_blocks.tracking.loggers import LoggedRun, LoggerKind, RunLogger, TranslationSample

FOLDER = "tensorboard"


class TensorboardSettings(Settings):
    """TensorBoard's event files in the run folder."""


class TensorboardLogger(RunLogger):
    """Write event files to `folder`/tensorboard. A resumed run replaces them and logs all earlier rows."""

    name = "TensorBoard"
    shows_pictures = True

    def __init__(self, settings: TensorboardSettings, run: LoggedRun) -> None:
        from lightning.pytorch.loggers import TensorBoardLogger

        self.inner = TensorBoardLogger(run.folder, name="", version=FOLDER, default_hp_metric=False, purge_step=0)
        self._last: int | None = None  # the last step whose tokens and seconds were logged: every row has them
        text = yaml.safe_dump({**run.config, "facts": dict(run.facts)}, sort_keys=False, allow_unicode=True)
        self.inner.experiment.add_text("config", f"```yaml\n{text}```")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        new = {name: value for name, value in metrics.items() if name not in IN_EVERY_ROW or step != self._last}
        self._last = step
        self.inner.log_metrics(new, step)

    def log_samples(self, split: str, samples: Sequence[TranslationSample], step: int) -> None:
        lines = ["| source | output | reference |", "|---|---|---|"]
        lines += [f"| {' | '.join(text.replace('|', '&#124;') for text in sample)} |" for sample in samples]
        self.inner.experiment.add_text(f"samples/{split}", "\n".join(lines), step)

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        for name, picture in pictures.items():
            image_HWC = np.asarray(Image.open(BytesIO(picture)).convert("RGB"))
            self.inner.experiment.add_image(name, image_HWC, step, dataformats="HWC")

    def close(self, exit_code: int, reason: str) -> None:
        self.inner.finalize("failed" if exit_code else "success")


LOGGER = LoggerKind(TensorboardSettings, TensorboardLogger, extra="tensorboard")
