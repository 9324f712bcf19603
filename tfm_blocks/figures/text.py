"""Widths of text in DejaVu Sans, the widest of the fonts that a reader is likely to have."""

from __future__ import annotations

from collections.abc import Sequence

_ASCII = """
318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636 636 337
337 838 838 838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603 787 695 635 611 732
684 989 685 611 685 390 337 390 838 500 500 613 635 550 635 615 352 635 634 278 278 579 278 974 634 612 635
635 411 521 392 634 592 818 592 592 525 636 337 636 838
"""
WIDTHS = {chr(code): width for code, width in enumerate(map(int, _ASCII.split()), ord(" "))}  # in thousandths of an em
WIDEST = 1900  # of the other letters, whatever font draws them


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in points; letters that are not ASCII count as the widest ones."""
    return sum(WIDTHS.get(letter, WIDEST if ord(letter) > 0x24F else 1000) for letter in text) * size / 1000


def wrap(words: Sequence[str], letters: int, separator: str = " ") -> tuple[str, ...]:
    """Join words into lines of at most `letters` letters where the words allow it."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(separator) + len(word) <= letters:
            lines[-1] += separator + word
        else:
            lines.append(word)
    return tuple(lines)
