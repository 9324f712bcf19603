"""SCAN: commands and the actions that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import ClassVar, Literal

from tfm_blocks.probes.task import Example, Preset, ProbeTask, order, random_stream, setting_error

Words = tuple[str, ...]
Pair = tuple[Words, Words]  # a command and its actions

ACTION = {"walk": "I_WALK", "look": "I_LOOK", "run": "I_RUN", "jump": "I_JUMP"}
TURN = {"left": "I_TURN_LEFT", "right": "I_TURN_RIGHT"}
COMMAND_WORDS = (*ACTION, "turn", *TURN, "opposite", "around", "twice", "thrice", "and", "after")
TRAIN_PAIRS = 16_728  # of the simple split
JUMPS = 1467  # of the 14,670 training commands of add_jump, a tenth is the command jump
CUTOFFS = range(22, 41)
MOST_HELD_OUT = 10_000  # of at least 13,203 different training commands
JUMP: Pair = (("jump",), ("I_JUMP",))


class Scan(ProbeTask):
    """The question is a command such as `jump twice after walk left`, and the answer the sequence of its actions.

    All 20,910 commands of the grammar occur, so there are no lengths. A split separates training and test commands.
    simple draws 16,728 training commands, with data.seed. length trains on commands of at most `cutoff` actions.
    add_jump trains on all commands without jump, and on the command jump itself, 1,467 times, which is a tenth.
    around_right trains on all commands without `around right`, and tests those that have it, but not after turn.

    split: simple, length, add_jump or around_right.
    cutoff: with split=length: actions in the longest training command, 22 to 40.
    held_out: number of distinct training commands used for validation instead of training; jump is never held out.
    """

    source = "Lake and Baroni 2018; around_right: Loula et al. 2018; cutoffs: Newman et al. 2020"
    presets: ClassVar = {
        "paper": Preset(20_910, 1000, 20_910),
        "lite": Preset(20_910, 300, 500, settings={"held_out": 300}),
    }
    least: ClassVar = {"held_out": 0}
    alphabet = (*COMMAND_WORDS, *ACTION.values(), *TURN.values())
    chance = 1 / 6
    split: Literal["simple", "length", "add_jump", "around_right"] = "simple"
    cutoff: int = 22
    held_out: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cutoff not in CUTOFFS:
            rule = f"must be from {CUTOFFS[0]} to {CUTOFFS[-1]} actions, but is {self.cutoff}"
            raise setting_error("cutoff", rule, "write data.cutoff=26")
        if self.held_out > MOST_HELD_OUT:
            rule = f"must be at most {MOST_HELD_OUT:,}, but is {self.held_out}"
            raise setting_error("held_out", rule, "write data.held_out=1000")

    def check_validation(self, count: int) -> None:
        """Raise ConfigError if `count` exceeds the number of held-out commands."""
        if count > self.held_out:
            rule = f"must be at most data.held_out={self.held_out}, but is {count}"
            raise setting_error("val", rule, f"write data.held_out={count}, which leaves fewer training commands")

    def examples(self, seed: int, split: str, lengths: Sequence[int], count: int) -> Iterator[Example]:
        """Generate the commands of a split in random order."""
        ids = {word: number for number, word in enumerate(self.alphabet)}
        train, test = self.published(seed)
        different = _shuffled([pair for pair in train if pair != JUMP], seed, "different")
        if split == "test":
            pairs = _shuffled(test, seed, "test")
        elif split == "val":
            pairs = different[: self.held_out]
        else:
            pairs = [*different[self.held_out :], *(pair for pair in train if pair == JUMP)]
            pairs = _shuffled(pairs, seed, "train")
        for command, actions in pairs[:count]:
            yield Example(tuple(ids[word] for word in command), tuple(ids[word] for word in actions), None)

    def published(self, seed: int) -> tuple[list[Pair], list[Pair]]:
        """Return the training and test pairs of the published split, before pairs are held out for validation.

        The published draw of the split simple is not reproduced, only its size.
        """
        if self.split == "simple":
            pairs = _shuffled(all_pairs(), seed, "simple")
            return pairs[:TRAIN_PAIRS], pairs[TRAIN_PAIRS:]
        if self.split == "length":
            return _split_by(lambda command, actions: len(actions) <= self.cutoff)
        if self.split == "add_jump":
            train, test = _split_by(lambda command, actions: "jump" not in command)
            return [*train, *[JUMP] * JUMPS], [pair for pair in test if pair != JUMP]
        train, test = _split_by(lambda command, actions: "around right" not in " ".join(command))
        return train, [pair for pair in test if "turn around right" not in " ".join(pair[0])]


@cache
def all_pairs() -> tuple[Pair, ...]:
    """Return all commands of the grammar with their actions."""
    steps = tuple(_steps())
    repeated = [
        ((*command, *word), actions * times)
        for command, actions in steps
        for word, times in (((), 1), (("twice",), 2), (("thrice",), 3))
    ]
    joined = [
        pair
        for (first, before), (second, then) in product(repeated, repeated)
        for pair in (((*first, "and", *second), before + then), ((*first, "after", *second), then + before))
    ]
    return (*repeated, *joined)


def _steps() -> Iterator[Pair]:
    """Generate the commands without twice, thrice, and and after."""
    verbs: list[Pair] = [((verb,), (action,)) for verb, action in ACTION.items()]
    yield from verbs
    for (verb, action), (side, turn) in product([*verbs, (("turn",), ())], TURN.items()):
        yield (*verb, side), (turn, *action)
        yield (*verb, "opposite", side), (turn, turn, *action)
        yield (*verb, "around", side), (turn, *action) * 4


def _split_by(is_training: Callable[[Words, Words], bool]) -> tuple[list[Pair], list[Pair]]:
    pairs = all_pairs()
    return [pair for pair in pairs if is_training(*pair)], [pair for pair in pairs if not is_training(*pair)]


def _shuffled(pairs: Sequence[Pair], seed: int, name: str) -> list[Pair]:
    return [pairs[row] for row in order(random_stream(seed, "scan", name), (1, len(pairs)))[0].tolist()]
