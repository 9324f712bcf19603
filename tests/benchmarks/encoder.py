"""Train an encoder on the Python documentation, then a classifier of its sections: pretrained against random weights.

SOURCES is the folder `_sources` of the documentation as HTML, which the Debian package python3.11-doc contains in
/usr/share/doc/python3.11/html. The commands `text`, `mlm`, `finetune` and `report` run one after the other; without a
command all four run. Trainings are resumed if the command is repeated.

    python tests/benchmarks/encoder.py SOURCES -o FOLDER
"""

import argparse
import random
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTIONS = ("c-api", "distutils", "extending", "faq", "howto", "library", "reference", "tutorial", "using", "whatsnew")
TRAIN = 100  # labelled paragraphs of each section
TEST = 60  # at most, of each section
WORDS = 40  # at most, of a labelled paragraph, so that it has fewer tokens than the model has positions
SEEDS = "1,2,3,4,5"


def paragraphs(path):
    """Return the prose of a page, a paragraph per line, without its markup."""
    text = re.sub(r":[\w:+-]+:`[!~]?([^`<]*?)(?:\s*<[^>]*>)?`", r"\1", path.read_text("utf-8"))
    text = re.sub(r"`+([^`]*?)(?:\s*<[^>]*>)?`+_*|\*\*?([^*\n]+)\*\*?", r"\1\2", text)
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        words = line.split()
        plain = sum(letter.isalpha() or letter in " ,.'" for letter in line) / max(1, len(line))
        if 12 <= len(words) <= 90 and plain > 0.93 and line[0].isalpha() and line.endswith((".", ":")):
            yield line


def write_text(sources, folder):
    """Write the paragraphs of each split, and a small labelled part: the last fifth of a page is for validation and test."""
    seen, rows = set(), defaultdict(list)
    for section in SECTIONS:
        pages = sorted((sources / section).glob("**/*.txt"))
        for page in pages:
            lines = [line for line in paragraphs(page) if line not in seen and page.name != "changelog.rst.txt"]
            seen.update(lines)
            for place, line in enumerate(lines):
                split = "train" if place < 0.8 * len(lines) else "val" if place < 0.9 * len(lines) else "test"
                rows[split].append((section, line))
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in rows.items():
        draw = random.Random(1)
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for _, line in pairs), "utf-8")
        print(split, len(pairs), "paragraphs,", sum(len(line.split()) for _, line in pairs), "words")
        labelled = []
        for section in SECTIONS:
            lines = [line for place, line in pairs if place == section and len(line.split()) <= WORDS]
            print("  ", section, len(lines))
            most = TRAIN if split == "train" else TEST
            labelled += [(section, line) for line in draw.sample(lines, min(most, len(lines)))]
        draw.shuffle(labelled)
        (folder / f"sections.{split}.txt").write_text("".join(f"{line}\n" for _, line in labelled), "utf-8")
        (folder / f"sections.{split}.labels").write_text("".join(f"{place}\n" for place, _ in labelled), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    a = parser.parse_args()
    write_text(a.sources, a.out)
