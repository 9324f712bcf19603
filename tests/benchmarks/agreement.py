"""Print how far the logits of imported models are from the logits of transformers, and both from float64.

    python tests/benchmarks/agreement.py
    python tests/benchmarks/agreement.py marian bamba

Each family has a tiny, random model. A row has the largest difference relative to the largest logit, the largest
difference, and the largest differences of transformers and of tfm-blocks in float32 from transformers in float64.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import tfm_blocks as tfm  # noqa: E402
from tests.exchange.doors import DOORS, door  # noqa: E402
from tests.exchange.published import FAMILIES, publish  # noqa: E402
from tests.exchange.test_import import logits_of_both, logits_of_encoders  # noqa: E402
from tests.oracles.references import ENCODERS  # noqa: E402
from tfm_blocks.exchange.family import families  # noqa: E402
from tfm_blocks.exchange.importing import import_folder  # noqa: E402


def differences(name: str, folder: Path) -> tuple[float, float, float, float]:
    """Return the figures of a family, whose model is written to a folder."""
    theirs = (door if name in DOORS else publish)(name, folder / "theirs")
    import_folder(folder / "theirs", folder / "run")
    ours = tfm.load(folder / "run")
    is_encoder = name in ENCODERS or (name in DOORS and families()[name].encoder)
    options = {} if is_encoder else {"least": 3}
    logits_of = logits_of_encoders if is_encoder else logits_of_both
    actual, expected = logits_of(theirs, ours, **options)
    theirs.set_experts_implementation("eager")  # the others have no float64
    exact = logits_of(theirs.double(), ours, **options)[1]
    pairs = ((actual, expected), (expected, exact), (actual, exact))
    known = expected.isfinite()
    largest = [(one - other)[known].abs().max().item() for one, other in pairs]
    return largest[0] / expected[known].abs().max().item(), *largest


def main() -> None:
    print(
        "| model | relative | absolute | transformers, from float64 | tfm-blocks, from float64 |\n|---|---|---|---|---|"
    )
    torch.compiler.set_stance("force_eager")  # the layers of BitNet are compiled
    for name in sys.argv[1:] or (*FAMILIES, *ENCODERS, *DOORS):
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {name} |", *(f"{value:.1e} |" for value in differences(name, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
