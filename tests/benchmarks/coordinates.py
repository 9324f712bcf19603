"""Measure the slopes of `tfm coordinates` for all shipped models: standard, mup, and completep with twice the layers.

The widths are 64, 128 and 256, times --scale. Each result is a line of JSON; results that the file has already are not measured
again. The summary lists the nodes whose mean slope from step 2 on is not within ±0.1.

    python tests/benchmarks/coordinates.py slopes.jsonl --seeds 3 [--models prenorm gqa]
"""

import argparse
import contextlib
import io
import json
from pathlib import Path

from tfm_blocks.cli import main as tfm
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.model import compose_model

WIDTHS = {"d_model": (64, 128, 256), "d_ff": (128, 256, 512), "heads": (2, 4, 8), "kv_heads": (1, 2, 4)}
WIDTHS |= {
    "d_latent": (32, 64, 128),
    "d_query": (32, 64, 128),
    "d_expert": (64, 128, 256),
    "d_embedding": (32, 64, 128),
}
FIXED = {"layers": 2, "decoder_layers": 2}
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def measure(model, parametrisation, seeds, scale):
    """Return the slope of each node and its verdict, or the reason why the model has none."""
    knobs = compose_model(model, []).mapping
    widths = {knob: [scale * width for width in values] for knob, values in WIDTHS.items() if knob in knobs}
    overrides = [f"{knob}={','.join(map(str, values))}" for knob, values in widths.items()]
    overrides += [f"{knob}={value}" for knob, value in FIXED.items() if knob in knobs]
    overrides.append(f"model.parametrisation={parametrisation}")
    if parametrisation == "completep":
        overrides += [f"model.base.{knob}={values[0]}" for knob, values in widths.items()]
        overrides += [f"model.base.{knob}=1" for knob in FIXED if knob in knobs]
    out, problems = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(problems), contextlib.suppress(SystemExit):
        tfm(["coordinates", "--json", "--seeds", str(seeds), model, *overrides])
    if not out.getvalue():
        return {"error": problems.getvalue().strip()}
    return {"nodes": {node["node"]: [node["slope"], node["verdict"]] for node in json.loads(out.getvalue())["nodes"]}}


def summarise(results):
    for (model, parametrisation, seeds, scale), result in sorted(
        results.items(), key=lambda pair: pair[0][1:] + pair[0][:1]
    ):
        nodes = result.get("nodes", {})
        outside = [
            f"{node} {slope:+.2f}" for node, (slope, verdict) in nodes.items() if verdict not in ("flat", "falls")
        ]
        print(
            f"{parametrisation:9} {model:15} {seeds} seeds, from {64 * scale}:",
            result.get("error") or ", ".join(outside) or "flat",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--parametrisations", nargs="*", default=["mup", "completep", "standard"])
    arguments = parser.parse_args()
    lines = arguments.path.read_text().splitlines() if arguments.path.exists() else []
    results = {tuple(record["key"]): record["result"] for record in map(json.loads, lines)}
    for parametrisation in arguments.parametrisations:
        for model in arguments.models:
            key = model, parametrisation, arguments.seeds, arguments.scale
            if key not in results:
                results[key] = measure(*key)
                with arguments.path.open("a") as file:
                    file.write(json.dumps({"key": key, "result": results[key]}) + "\n")
    summarise(results)


if __name__ == "__main__":
    main()
