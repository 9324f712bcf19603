"""Masked accuracy of an encoder on the Python documentation against counts of words, and the text of this experiment.

SOURCES is the folder `_sources` of the documentation as HTML, which the Debian package python3.11-doc contains in
/usr/share/doc/python3.11/html. The first command writes the text of the tutorial in docs/encoders.md, and the second
one compares a run of `experiment=mlm` with baselines, which predict the most frequent token, the most frequent
successor of the token before it, or the most frequent token between its two neighbours.

    python tests/benchmarks/encoder.py text SOURCES FOLDER
    python tests/benchmarks/encoder.py baselines runs/mlm FOLDER
"""

import argparse
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.runs.folder import METRICS, TOKENIZER
from tfm_blocks.runs.metrics import read_rows

SECTIONS = ("c-api", "distutils", "extending", "faq", "howto", "library", "reference", "tutorial", "using", "whatsnew")
TRAIN = 100  # labelled paragraphs of each section
TEST = 60  # at most, of each section
WORDS = 40  # at most, of a labelled paragraph, so that it has fewer tokens than the model has positions


def paragraphs(path):
    """Yield the prose of a page, a paragraph per line, without its markup."""
    text = re.sub(r":[\w:+-]+:`[!~]?([^`<]*?)(?:\s*<[^>]*>)?`", r"\1", path.read_text("utf-8"))
    text = re.sub(r"`+([^`]*?)(?:\s*<[^>]*>)?`+_*|\*\*?([^*\n]+)\*\*?", r"\1\2", text)
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        plain = sum(letter.isalpha() or letter in " ,.'" for letter in line) / max(1, len(line))
        if 12 <= len(line.split()) <= 90 and plain > 0.93 and line[0].isalpha() and line.endswith((".", ":")):
            yield line


def write_text(sources, folder):
    """Write the paragraphs of each split, and a small labelled part: the last fifth of a page is held out."""
    seen, rows = set(), defaultdict(list)
    for section in SECTIONS:
        for page in sorted((sources / section).glob("**/*.txt")):
            lines = [line for line in paragraphs(page) if line not in seen and page.name != "changelog.rst.txt"]
            seen.update(lines)
            for place, line in enumerate(lines):
                split = "train" if place < 0.8 * len(lines) else "val" if place < 0.9 * len(lines) else "test"
                rows[split].append((section, line))
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in rows.items():
        draw, labelled = random.Random(1), []
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for _, line in pairs), "utf-8")
        for section in SECTIONS:
            lines = [line for place, line in pairs if place == section and len(line.split()) <= WORDS]
            most = TRAIN if split == "train" else TEST
            labelled += [(section, line) for line in draw.sample(lines, min(most, len(lines)))]
        draw.shuffle(labelled)
        (folder / f"sections.{split}.txt").write_text("".join(f"{line}\n" for _, line in labelled), "utf-8")
        (folder / f"sections.{split}.labels").write_text("".join(f"{place}\n" for place, _ in labelled), "utf-8")
        words = sum(len(line.split()) for _, line in pairs)
        print(f"{split}: {len(pairs):,} paragraphs with {words:,} words, {len(labelled):,} paragraphs with labels")


def show_baselines(run, folder):
    """Print the accuracy of the baselines over all tokens of the validation text, and of the run at each validation."""
    tokenizer = load_tokenizer(run / TOKENIZER)

    def documents(split):
        lines = (folder / f"{split}.txt").read_text("utf-8").splitlines()
        return [[tokenizer.EOS, *ids, tokenizer.EOS] for ids in tokenizer.encode_batch(lines)]

    single, after, between = Counter(), defaultdict(Counter), defaultdict(Counter)
    for ids in documents("train"):
        for left, id, right in zip(ids, ids[1:], ids[2:]):  # noqa: B905
            single[id] += 1
            after[left][id] += 1
            between[left, right][id] += 1
    right_of = Counter()
    for ids in documents("val"):
        for left, id, right in zip(ids, ids[1:], ids[2:]):  # noqa: B905
            (first, _), *_ = single.most_common(1)
            second = after[left].most_common(1)[0][0] if left in after else first
            third = between[left, right].most_common(1)[0][0] if (left, right) in between else second
            right_of.update(
                {"tokens": 1, "unigram": first == id, "bigram": second == id, "both neighbours": third == id}
            )
    for name in ("unigram", "bigram", "both neighbours"):
        print(f"{name}: {right_of[name] / right_of['tokens']:.1%}")
    for row in read_rows(run / METRICS):
        if "val/token_accuracy" in row:
            print(f"step {row['step']:,.0f}: {row['val/token_accuracy']:.1%}, loss {row['val/loss']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["text", "baselines"])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    (write_text if arguments.command == "text" else show_baselines)(arguments.source, arguments.folder)
