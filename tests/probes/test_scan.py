"""SCAN, against an interpreter of the command's text and the numbers of the published files."""

import re
from collections import Counter

import pytest

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.scan import Scan, all_pairs

STEP = (
    r"((walk|look|run|jump)( (opposite |around )?(left|right))?|turn (opposite |around )?(left|right))( twice| thrice)?"
)
GRAMMAR = re.compile(f"{STEP}( (and|after) {STEP})?")


def actions(command):
    """Interpret a command from the outside in."""
    if " after " in command:
        first, then = command.split(" after ")
        return actions(then) + actions(first)
    if " and " in command:
        return [action for part in command.split(" and ") for action in actions(part)]
    for word, times in (("twice", 2), ("thrice", 3)):
        if command.endswith(word):
            return actions(command.removesuffix(f" {word}")) * times
    verb, _, direction = command.partition(" ")
    act = [] if verb == "turn" else [f"I_{verb.upper()}"]
    if not direction:
        return act
    turn = [f"I_TURN_{direction.split()[-1].upper()}"]
    return {"opposite": turn * 2 + act, "around": (turn + act) * 4}.get(direction.split()[0], turn + act)


def commands(part, seed=1, **settings):
    return [" ".join(one.question) for one in printed(Scan(**settings), count=30_000, seed=seed, split=part)]


def test_the_grammar_has_exactly_20910_commands():
    written = {" ".join(command) for command, _ in all_pairs()}
    assert len(written) == len(all_pairs()) == 20_910
    assert all(GRAMMAR.fullmatch(command) for command in written)


def test_actions_match_an_interpreter():
    for command, meaning in all_pairs():
        assert list(meaning) == actions(" ".join(command))


@pytest.mark.parametrize(
    ("command", "meaning"),
    [
        ("turn left twice", "I_TURN_LEFT I_TURN_LEFT"),
        ("jump and turn left", "I_JUMP I_TURN_LEFT"),
        ("look opposite left after run", "I_RUN I_TURN_LEFT I_TURN_LEFT I_LOOK"),
        (
            "turn left thrice and look opposite right",
            "I_TURN_LEFT I_TURN_LEFT I_TURN_LEFT I_TURN_RIGHT I_TURN_RIGHT I_LOOK",
        ),
        ("jump right after turn around left", "I_TURN_LEFT I_TURN_LEFT I_TURN_LEFT I_TURN_LEFT I_TURN_RIGHT I_JUMP"),
        ("jump around right", "I_TURN_RIGHT I_JUMP I_TURN_RIGHT I_JUMP I_TURN_RIGHT I_JUMP I_TURN_RIGHT I_JUMP"),
        ("jump opposite left and walk thrice", "I_TURN_LEFT I_TURN_LEFT I_JUMP I_WALK I_WALK I_WALK"),
        (
            "jump opposite left after walk around left",
            "I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT I_TURN_LEFT I_JUMP",
        ),
    ],
)
def test_lines_of_the_published_files(command, meaning):
    assert dict(all_pairs())[tuple(command.split())] == tuple(meaning.split())


@pytest.mark.parametrize(
    ("split", "train", "test"),
    [
        ("simple", 16_728, 4_182),
        ("length", 16_990, 3_920),
        ("add_jump", 14_670, 7_706),
        ("around_right", 15_225, 4_476),
    ],
)
def test_splits_have_the_published_sizes_and_share_no_command(split, train, test):
    drawn = {name: commands(name, split=split, held_out=500) for name in ("train", "val", "test")}
    assert len(drawn["train"]) + len(drawn["val"]) == train and len(drawn["test"]) == test
    assert len(drawn["val"]) == 500
    assert len(set(drawn["train"]) | set(drawn["val"]) | set(drawn["test"])) == sum(
        len(set(rows)) for rows in drawn.values()
    )


@pytest.mark.parametrize("cutoff", [22, 26, 40])
def test_the_length_split_tests_only_longer_action_sequences(cutoff):
    train, test = (commands(name, split="length", cutoff=cutoff, held_out=0) for name in ("train", "test"))
    assert max(len(actions(command)) for command in train) == cutoff
    assert min(len(actions(command)) for command in test) > cutoff
    assert len(train) + len(test) == 20_910


def test_add_jump_trains_on_jump_alone_in_a_tenth_of_the_rows():
    train, test = (commands(name, split="add_jump", held_out=0) for name in ("train", "test"))
    assert {command for command in train if "jump" in command} == {"jump"}
    assert train.count("jump") * 10 == len(train)
    assert all("jump" in command and command != "jump" for command in test)
    assert "jump" in commands("train", split="add_jump", held_out=10_000), "jump is never held out"


def test_around_right_tests_only_commands_that_no_training_command_contains():
    train, test = (commands(name, split="around_right", held_out=0) for name in ("train", "test"))
    assert not any("around right" in command for command in train)
    assert all("around right" in command and "turn around right" not in command for command in test)
    assert any("around left" in command for command in train) and any(" opposite right" in command for command in train)


def test_another_seed_draws_another_simple_split():
    one, other = (set(commands("test", seed=seed)) for seed in (1, 2))
    assert len(one) == len(other) and 500 < len(one & other) < 1200, "a fifth of 4,182 is 836"


def test_validation_commands_are_different():
    assert max(Counter(commands("val", split="add_jump")).values()) == 1


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"split": "lenght"}, "data.split: must be one of simple, length, add_jump, around_right, but is lenght"),
        ({"cutoff": 21}, "data.cutoff: must be from 22 to 40 actions, but is 21"),
        ({"held_out": 20_000}, "data.held_out: must be at most 10,000, but is 20000"),
        ({"held_out": -1}, "data.held_out: must be at least 0"),
    ],
)
def test_invalid_settings_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        Scan(**settings)
