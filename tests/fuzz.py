"""Mutations of model files, and the verdict on each of them under an audit hook (PEP 578).

    python -m tests.fuzz COUNT SEED

prints as JSON how many were accepted and refused, every event of the hook, traceback, slow or faulty verdict, and the
longest of the verdicts in seconds. Accepted models of small sizes are built and run.
"""

import encodings.unicode_escape  # noqa: F401  else loaded by the first message that escapes a letter
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random

import torch
import yaml
from omegaconf import OmegaConf

from tests.network.examples import ALL, TESTS
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.chain import Replacement
from tfm_blocks.language.files import HEADER
from tfm_blocks.language.spec import Axis
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.registry.blocks import GRAMMAR, REGISTRY

FORBIDDEN = ("exec", "import", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "ctypes.")
FORBIDDEN += ("pickle.", "marshal.", "shutil.", "os.remove", "os.rename", "os.mkdir", "os.putenv", "code.__new__")
HUGE = "an integer of 5,000 digits"  # a placeholder, because Python does not print integers this long
SLOW = 1.0  # seconds of CPU time
MOST_NODES = 300  # nodes, the limit of a model that is built and run
LARGEST = 3_000_000  # weights, the limit of a model that is built and run
LONGEST_MESSAGE = 2000
SMALL = {"d_model": 16, "d_ff": 24, "heads": 2, "vocab": 30, "layers": 2, "dropout": 0.0}


class Watch:
    """Collect the audit events of Python while active."""

    def __init__(self):
        self.on = False
        self.events = []
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if not self.on:
            return
        written = event == "open" and isinstance(arguments[1], str) and not set(arguments[1]).isdisjoint("wax+")
        if written or event.startswith(FORBIDDEN):
            self.events.append(f"{event} {str(arguments)[:200]}")


class Mutator:
    """Change a mapping in a few places, or its text."""

    def __init__(self, random):
        self.random = random
        self.words = [*GRAMMAR, *REGISTRY.blocks, *SMALL, "src", "tgt", "inputs", "graph", "encoder", "entry", "times"]
        self.words += ["pre", "post", "last", "norm", "add", "share", "mask", "eps", "kv", "dropout", "n", "i", "model"]

    def text(self, mapping):
        for _ in range(self.random.choice([1, 1, 1, 1, 2, 3])):
            self._change(mapping)
        text = HEADER + "\n" + yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True, width=10_000)
        text = text.replace(HUGE, "7" * 5000)
        return self._spoil(text) if self.random.random() < 0.15 else text

    def _spots(self, value, spots):
        for key in value if isinstance(value, dict) else range(len(value)):
            spots.append((value, key))
            if isinstance(value[key], (dict, list)):
                self._spots(value[key], spots)
        return spots

    def _change(self, mapping):
        random = self.random
        spots = self._spots(mapping, [])
        holder, key = random.choice(spots)
        kind = random.randrange(12)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[self._key(key)] = holder.pop(key)
        elif kind == 2 and isinstance(holder, dict):
            holder[self._key(key)] = self._value(spots)
        elif kind == 3:
            other, spot = random.choice(spots)
            holder[key] = json.loads(json.dumps(other[spot]))
        elif kind == 4:
            for _ in range(random.choice([1, 2, 5, 40])):
                holder[key] = random.choice([{"layer": holder[key]}, {"x": holder[key]}, [holder[key]]])
        elif kind < 9:
            holder[key] = self._like(holder[key], spots)
        else:
            holder[key] = self._value(spots)

    def _like(self, value, spots):
        """Return another value of the same type, which may be valid."""
        if isinstance(value, (int, float)):
            return self.random.choice([value + 1, value * 2, 1, 2, 3, 4, 0.25, f"{value}*2", "${heads}"])
        others = [holder[key] for holder, key in spots if type(holder[key]) is type(value)]
        return json.loads(json.dumps(self.random.choice(others)))

    def _key(self, key):
        text = str(key)
        at = self.random.randrange(len(text) + 1)
        odd = [
            "_target_",
            "__class__",
            "_modules",
            "0",
            "-1",
            "é",
            "名",
            "a b",
            "",
            "x" * 3000,
            "train",
            "in_x",
            "*",
            ".",
        ]
        near = [text[:at] + text[at + 1 :], text[:at] + "x" + text[at:], text.upper(), text + ".0"]
        return self.random.choice([*near, *odd, self.random.choice(self.words), self.random.choice(self.words)])

    def _value(self, spots):
        random = self.random
        holder, key = random.choice(spots)
        near = holder[key] if isinstance(holder[key], str) else "encoder"
        numbers = [0, 1, -1, 2, 3, 7, 2.5, 1e-300, 1e308, 10**12, 2**63, HUGE, float("inf"), float("nan")]
        texts = [
            "",
            " ",
            "x" * 5000,
            "é",
            "\u202e",
            "\x00",
            "2*d_model",
            "i",
            "n-1-i",
            "((((1))))",
            "1/0",
            "9**9",
            "9" * 79,
        ]
        texts += [
            "${oc.env:HOME}",
            "${heads}",
            "${nothing}",
            "${",
            "???",
            "__import__('os')",
            "true",
            "null",
            "B S",
            "B S 7",
        ]
        texts += [f"{near}.0", f"{near}.*", f"{near}.(i)", f"{near}.-1", f"{near}.999", "entry", "causal", "depths"]
        shapes = [
            None,
            True,
            False,
            [],
            {},
            [[]],
            [None],
            {"block": "ffn"},
            {"block": "weighted_sum", "in": "encoder.*"},
        ]
        shapes += [
            {"layer": {"f": {"block": "ffn"}}, "repeat": 3},
            {"times": 2, "share": True},
            {"_target_": "os.system"},
        ]
        shapes += [["norm", "add"], {"pre": ["norm"], 1: 2}, [{"scale": 0.5}], ["src", "tgt"], {0: {"ffn": None}}]
        word = [random.choice(self.words) for _ in range(4)]
        return random.choice([random.choice(numbers), random.choice(texts), random.choice(shapes), *word])

    def _spoil(self, text):
        random = self.random
        at = random.randrange(len(text))
        odd = [
            "!!python/object/apply:os.system [true]",
            "# @package x\n",
            "${oc.env:HOME}",
            "%YAML 9\n",
            "<<: *a",
            "[" * 50,
        ]
        odd += ["&a ", "*a", "!x ", "2024-01-01", "---\n", *"\t{]'\"\n\x07\ud7ff", ": ", "- ", "0x1f"]
        return random.choice([text[:at] + random.choice(odd) + text[at:], text[:at], text[:at] + text[at + 5 :]])


def mappings():
    """Yield every shipped and test model, made small: as its file has it, and with all inherited keys written out."""
    for path in ALL:
        mapping = yaml.safe_load(path.read_text())
        small = {**SMALL, "layers": 4} if "at:" in path.read_text() else SMALL
        mapping |= {knob: value for knob, value in small.items() if knob in mapping or "defaults" in mapping}
        yield mapping
        overrides = [f"{knob}={value}" for knob, value in small.items()]
        composed = compose_model(str(path), overrides)
        whole = OmegaConf.to_container(composed.raw, resolve=False)
        whole["model"] = Replacement(REGISTRY, composed.sources).clean(whole["model"], ("model",))
        yield whole


def run(network):
    """Return True if the logits of fitting inputs are numbers, or -inf for ids that cannot be predicted."""
    sizes, inputs = {"B": 2}, {}
    for one in network.spec.inputs:
        for axis in one.sequences:
            sizes.setdefault(axis.name, max(1, min(4 + len(sizes), network.longest(one.name).tokens)))
        shape = [sizes[axis.name] if isinstance(axis, Axis) else axis for axis in one.shape]
        inputs[one.name] = torch.zeros(shape, dtype=torch.int64) if one.tokens else torch.randn(shape)
    with torch.no_grad():
        logits = network.eval()(**inputs)
    return not (logits.isnan() | logits.isposinf()).any()


def verdict(text, folder, watch):
    """Return the checked model or its ConfigError, and the CPU time."""
    path = folder / "mine.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    begin = time.process_time()
    watch.on = True
    try:
        composed = compose_model(str(path))
        spec = check_model(composed.model, composed.sources)
    except ConfigError as error:
        return error, time.process_time() - begin
    finally:
        watch.on = False
    return spec, time.process_time() - begin


def fuzz(count, seed, slow=SLOW):
    watch, random = Watch(), Random(seed)
    report = {
        "accepted": 0,
        "refused": 0,
        "run": 0,
        "events": [],
        "tracebacks": [],
        "slow": [],
        "faulty": [],
        "longest": 0.0,
    }
    originals = list(mappings())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in TESTS:  # some inherit from others
            shutil.copy(path, folder)
        for mapping in originals:  # this imports everything
            result, _ = verdict(HEADER + "\n" + yaml.safe_dump(mapping, sort_keys=False), folder, watch)
            assert not isinstance(result, ConfigError), result
        watch.events.clear()
        for number in range(count):
            text = Mutator(random).text(json.loads(json.dumps(random.choice(originals))))
            try:
                _judge(text, folder, watch, report)
            except Exception:
                report["tracebacks"].append(f"{number}: {traceback.format_exc()[-1500:]}\n{text[:1500]}")
    report["events"] = watch.events
    report["slow"] = [one for one in report["slow"] if one[0] > slow]
    return report


def _judge(text, folder, watch, report):
    result, seconds = verdict(text, folder, watch)
    report["longest"] = max(report["longest"], seconds)
    if seconds > 0.5:
        report["slow"].append((seconds, text[:1500]))
    if isinstance(result, ConfigError):
        report["refused"] += 1
        message = str(result)
        whole = all(one.help and one.rule for one in result.problems)
        if not whole or len(message) > LONGEST_MESSAGE:
            report["faulty"].append(f"{len(message)}: {message[:600]} ... {message[-200:]}")
        return
    report["accepted"] += 1
    parameters = network_without_values(result).parameters() if len(result.nodes) < MOST_NODES else ()
    size = sum(one.numel() for one in parameters) or LARGEST
    if size < LARGEST:
        report["run"] += 1
        if not run(build_network(result, seed=1)):
            report["faulty"].append(f"not finite: {text[:1500]}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    print(json.dumps(fuzz(int(sys.argv[1]), int(sys.argv[2])), indent=1))
