"""Overlaps of boxes, texts and lines in a picture, measured from the coordinates of the layout."""

from collections import defaultdict
from itertools import combinations

from tfm_blocks.figures.drawing import FigurePicture
from tfm_blocks.figures.labels import text_width
from tfm_blocks.figures.layout import WAVE

SLACK = 0.3  # coordinates are rounded to 0.1


def text_rectangle(text):
    width = text_width(text.text, text.size)
    left = text.x - {"start": 0, "middle": width / 2, "end": width}[text.align]
    return left, text.y - 0.78 * text.size, left + width, text.y + 0.24 * text.size


def rectangle(placed):
    return placed.x, placed.y, placed.x + placed.width, placed.y + placed.height


def overlap(one, other):
    return (
        one[0] < other[2] - SLACK
        and other[0] < one[2] - SLACK
        and one[1] < other[3] - SLACK
        and other[1] < one[3] - SLACK
    )


def contains(outer, inner):
    return (
        outer[0] - SLACK <= inner[0]
        and outer[1] - SLACK <= inner[1]
        and inner[2] <= outer[2] + SLACK
        and inner[3] <= outer[3] + SLACK
    )


def pieces(picture: FigurePicture):
    """Yield everything that occupies space: boxes, and texts and waves next to boxes and plates."""
    for placed in picture.boxes:
        name = placed.about or " ".join(placed.title)
        whole = rectangle(placed)
        yield name, whole
        for text in placed.texts:
            if not contains(whole, text_rectangle(text)):
                yield f"{name}: {text.text}", text_rectangle(text)
        if placed.wave:
            x, y = placed.wave
            yield f"{name}: wave", (x - WAVE, y - WAVE, x + WAVE, y + WAVE)
    for plate in picture.plates:
        for text in plate.texts:
            yield f"{plate.addresses[0]}: {text.text}", text_rectangle(text)


def lines(picture: FigurePicture):
    for placed in picture.arrows:
        for (x, y), (to_x, to_y) in zip(placed.points, placed.points[1:], strict=False):
            assert x == to_x or y == to_y, f"{placed} is not horizontal and vertical"
            yield placed, (min(x, to_x) - SLACK, min(y, to_y) - SLACK, max(x, to_x) + SLACK, max(y, to_y) + SLACK)


def faults(picture: FigurePicture):
    """Return a sentence for each overlap of pieces, line through a piece, and plate that cuts something."""
    named_pieces = list(pieces(picture))
    sentences = [f"{one} overlaps {other}" for (one, a), (other, b) in combinations(named_pieces, 2) if overlap(a, b)]
    for placed, line in lines(picture):
        ends = f"{placed.source.about} → {placed.target.about}"
        sentences += [f"{ends} crosses {name}" for name, piece in named_pieces if overlap(line, shrunk(piece))]
    plates = [(plate.addresses[0], rectangle(plate)) for plate in picture.plates]
    inner = [*named_pieces, *plates]
    for number, (address, plate) in enumerate(plates):
        for name, piece in [*inner[: len(named_pieces)], *plates[number + 1 :]]:
            if overlap(plate, piece) and not contains(plate, piece) and not contains(piece, plate):
                sentences.append(f"the plate {address} cuts {name}")
    sentences += [f"{one} and {other} lie on each other" for one, other in set(shared_lines(picture))]
    page = (0, 0, picture.width, picture.height)
    return sentences + [f"{name} leaves the page" for name, piece in inner if not contains(page, piece)]


def shared_lines(picture: FigurePicture):
    """Yield pairs of arrows that a reader could confuse: they share a line segment but neither source nor target."""
    arrows = {(placed.source, placed.target) for placed in picture.arrows}
    rows = defaultdict(list)
    for placed in picture.arrows:
        for (x, y), (to_x, to_y) in zip(placed.points, placed.points[1:], strict=False):
            key, ends = (("y", y), (x, to_x)) if y == to_y else (("x", x), (y, to_y))
            rows[key].append((min(ends), max(ends), placed))
    for row in rows.values():
        for (low, high, arrow), (first, last, other) in combinations(row, 2):
            alike = {(arrow.source, other.target), (other.source, arrow.target)} <= arrows
            if not alike and min(high, last) - max(low, first) > SLACK:
                yield tuple(f"{end.source.about} → {end.target.about}" for end in (arrow, other))


def shrunk(piece):
    """Shrink a box, because lines may end on borders."""
    return piece[0] + SLACK, piece[1] + SLACK, piece[2] - SLACK, piece[3] - SLACK
