"""Sizes that several tasks share."""

from __future__ import annotations

from tfm_blocks.probes.task import Preset

CHOMSKY = {  # tasks of the Chomsky hierarchy, Delétang et al. 2023
    "paper": Preset(2_000_000, 512, 512, (1, 40), (60, 80, 100, 200, 300, 400, 500)),
    "lite": Preset(64_000, 1000, 1000, (1, 40), (40, 60, 80, 100)),
}
GENERATED_ANSWERS = {  # tasks whose answer is generated, after Kazemnejad et al. 2023
    "paper": Preset(100_000, 10_000, 10_000, (1, 20), tuple(range(1, 41))),
    "lite": Preset(50_000, 500, 500, (1, 20), (10, 20, 30, 40)),
}


def mad(length: int, lite_length: int, **lite_settings: int) -> dict[str, Preset]:
    """Return the sizes of a task of MAD, Poli et al. 2024."""
    lite = Preset(12_800, 640, 640, (lite_length, lite_length), (lite_length,), lite_settings)
    return {"paper": Preset(12_800, 1280, 1280, (length, length), (length,)), "lite": lite}


def tracking(*test_lengths: int) -> dict[str, Preset]:
    """Return the sizes of parity and arithmetic, Grazzi et al. 2024.

    The lite size also trains on shorter strings: with them an LSTM learns parity in a quarter of the steps.
    """
    return {
        "paper": Preset(2_000_000, 8192, 8192, (3, 40), test_lengths),
        "lite": Preset(64_000, 1000, 1000, (1, 40), test_lengths),
    }
