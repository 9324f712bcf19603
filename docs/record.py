"""Record the commands of the front page as an animated SVG: python docs/record.py.

The commands run in a temporary copy of conf/. The lines appear at the times of the output, but pauses are shortened.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "images" / "terminal.svg"
COMMANDS = (
    "tfm check base heads=7",
    "python train.py model=base heads=8 layers=6",
    "echo 'Dienstag, 3. März 1987' | tfm translate runs/base-dates-heads8-layers6",
)
COLUMNS, ROWS, WIDTH, HEIGHT, MARGIN = 100, 24, 7.8, 18, 14  # characters, lines, pixels of a character and around them
LONGEST_PAUSE, BEFORE_COMMAND, HELD = 0.7, 1.5, 6.0  # seconds
FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
STYLE = """\
text { font: 13px FONT; fill: #d7dae0; white-space: pre; }
.command { fill: #98c379; }
.line { animation: line {length}s steps(1) infinite; }
#screen { animation: scroll {length}s steps(1) infinite; }
@media (prefers-reduced-motion: reduce) {
  .line, #screen { animation: none; }
  #screen { transform: translateY({last}px); }
}
"""


class Line(NamedTuple):
    """A row of the terminal, with the second at which it appears."""

    second: float
    text: str
    typed: bool


def record(command: str, folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command. Yield the seconds since the previous line, and each line of its output."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    with subprocess.Popen(["bash", "-c", command], **options) as process:
        last = time.monotonic()
        for line in process.stdout:
            now = time.monotonic()
            yield now - last, line.rstrip().replace(f"{ROOT}/", "")  # as in the folder of the clone
            last = now


def lines_of(folder: Path) -> list[Line]:
    """Return the rows of all commands, wrapped at the width of the terminal, with shortened pauses."""
    lines, second = [], 0.0
    for command in COMMANDS:
        second += BEFORE_COMMAND
        lines.append(Line(second, f"$ {command}", typed=True))
        for pause, text in record(command, folder):
            second += min(pause, LONGEST_PAUSE)
            rows = [text[start : start + COLUMNS] for start in range(0, len(text), COLUMNS)] or [""]
            lines += [Line(second, row, typed=False) for row in rows]
    return lines


def draw(lines: list[Line]) -> str:
    """Return the SVG, in which the screen scrolls up when it is full."""
    length = lines[-1].second + HELD
    rows = [_row(number, line, length) for number, line in enumerate(lines)]
    shifts = [(0.0, 0), *((line.second, HEIGHT * max(0, number + 1 - ROWS)) for number, line in enumerate(lines))]
    steps = [(second, after) for (_, before), (second, after) in pairwise(shifts) if after != before]
    frames = (f"{100 * second / length:.3f}% {{ transform: translateY({-up}px); }}" for second, up in steps)
    style = STYLE.replace("FONT", FONT).replace("{length}", f"{length:.2f}").replace("{last}", str(-shifts[-1][1]))
    width, height = COLUMNS * WIDTH + 2 * MARGIN, ROWS * HEIGHT + 2 * MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">',
        "<title>A terminal: an invalid config, its correction, the training and a translation</title>",
        f"<style>{style}@keyframes scroll {{ {' '.join(frames)} }}\n{''.join(frame for frame, _ in rows)}</style>",
        '<rect width="100%" height="100%" rx="8" fill="#21252b"/>',
        f'<svg x="{MARGIN}" y="{MARGIN}" width="{COLUMNS * WIDTH:.0f}" height="{ROWS * HEIGHT}"><g id="screen">',
        *(element for _, element in rows),
        "</g></svg></svg>\n",
    ])  # fmt: skip


def _row(number: int, line: Line, length: float) -> tuple[str, str]:
    """Return the keyframes of a line, which is hidden at first, and its element."""
    frame = f"@keyframes l{number} {{ 0% {{ opacity: 0; }} {100 * line.second / length:.3f}% {{ opacity: 1; }} }}\n"
    kind = "line command" if line.typed else "line"
    place = f'y="{HEIGHT * (number + 1) - 5}" style="animation-name: l{number}"'
    return frame, f'<text class="{kind}" {place}>{escape(line.text)}</text>'


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "conf", Path(folder, "conf"))
        shutil.copy(ROOT / "train.py", folder)
        FILE.write_text(draw(lines_of(Path(folder))), "utf-8")
        sys.stdout.write(f"{FILE}\n")
