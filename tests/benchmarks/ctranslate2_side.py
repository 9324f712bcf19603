"""The CTranslate2 side of decoding_ctranslate2.py: translate batches, one JSON line each, in a process without torch.

In one process, both libraries would share an OpenMP runtime. With more threads than cores, the runtime's threads sleep
between two operations, and both sides become slower: docs/notebook/experiments.md.
"""

from __future__ import annotations

import json
import sys
import time

import ctranslate2

assert "torch" not in sys.modules, "this process measures CTranslate2 alone"


def translate_lines(folder: str, precision: str, beam: int, length: int, threads: int) -> None:
    """Read a batch of sentences as JSON from each line; print the wall and CPU seconds and the translations as JSON."""
    translator = ctranslate2.Translator(folder, intra_threads=threads, compute_type=precision)
    for line in sys.stdin:
        texts, wall, cpu = json.loads(line), time.perf_counter(), time.process_time()
        results = translator.translate_batch(
            texts, beam_size=beam, min_decoding_length=length, max_decoding_length=length, return_scores=False
        )
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps({**seconds, "texts": [result.hypotheses[0] for result in results]}), flush=True)


if __name__ == "__main__":
    folder, precision, *numbers = sys.argv[1:]
    translate_lines(folder, precision, *map(int, numbers))
