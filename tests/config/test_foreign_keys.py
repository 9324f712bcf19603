"""Advice for people who know other toolkits."""

import re
from collections.abc import Callable

import pytest
import yaml

from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.config.foreign_keys import FOREIGN_NAMES, advice


@pytest.mark.parametrize("sentence", FOREIGN_NAMES)
def test_advice_names_keys_that_there_are(small: Callable[..., Composed], sentence: str) -> None:
    configs = [small("schedule=noam", "schedule.warmup=2").mapping, small("schedule=linear").mapping]
    configs.append({"data": yaml.safe_load((CONF / "data" / "lm.yaml").read_text())})
    named = re.findall(r"\b(callbacks|data|optimizer|schedule|trainer)\.(\w+)", sentence)
    roots = re.findall(r"write (\w+)=", sentence)
    assert named or roots
    for group, key in named:
        assert any(key in config.get(group, {}) for config in configs)
    for key in roots:
        assert key in configs[0]


def test_the_last_part_of_a_key_decides() -> None:
    assert advice("lr") == advice("optimizer.lr") == advice("training.optimizer.lr") != ""
    assert advice("lr.eps") == advice("optimizer") == ""
