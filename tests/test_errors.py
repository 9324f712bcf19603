"""Error messages."""

import pytest

from tfm_blocks.errors import ConfigError, Place, Problem, cut, printable, shown, suggest

LONG = ["x" * 5000, list(range(5000)), {"a": "\n" * 5000}, 10**5000, [10**5000], 2**300]


@pytest.mark.parametrize("value", LONG, ids=["text", "list", "mapping", "integer", "list of an integer", "300 bits"])
def test_every_shown_value_is_short(value):
    assert len(shown(value)) <= 80 and len(shown(value).splitlines()) == 1


def test_a_short_value_is_shown_as_it_is():
    assert (shown("heads"), shown(2.5), shown(None), shown([1, "a"])) == ("'heads'", "2.5", "None", "[1, 'a']")


def test_a_text_that_is_cut_keeps_its_beginning_and_its_end():
    assert len(cut("a" * 100 + "b" * 100)) == 80
    assert cut("a" * 100 + "b" * 100).startswith("aaa") and cut("a" * 100 + "b" * 100).endswith("bbb")
    assert cut("a" * 80) == "a" * 80


def test_messages_have_at_most_2000_characters_and_all_their_parts():
    long = "0123456789" * 1000
    message = str(
        Problem(
            f"address{long}", f"rule{long}", Place(f"file{long}", 3, 4, f"text{long}"), f"origin{long}", f"help{long}"
        )
    )
    assert len(message) < 2000
    assert all(part in message for part in ("address", "rule", "file", "text", "origin", "help: help"))


def test_many_problems_are_cut_to_the_first_and_a_count_of_the_others():
    error = ConfigError([Problem(f"key{number}", "is wrong. " * 10, help="repair it") for number in range(100)])
    message = str(error)
    assert len(message) <= 2000 and len(error.problems) == 100
    listed = message.count("error: ")
    assert listed > 5 and message.endswith(f"and {100 - listed} more problems")


def test_one_other_problem_is_counted_in_the_singular():
    many = [Problem(f"key{number}", "is wrong. " * 10, help="repair it") for number in range(100)]
    listed = str(ConfigError(many)).count("error: ")
    assert str(ConfigError(many[: listed + 1])).endswith("and 1 more problem")


@pytest.mark.parametrize(
    "letter", ["\x00", "\x1b", "\x7f", "\x9b", "\r", "\u200f", "\u202e", "\u2066", "\u2028", "\ud800", "\U000e0001"]
)
def test_a_control_character_is_printed_as_an_escape(letter):
    assert printable(f"a{letter}b") == f"a{letter.encode('unicode_escape').decode()}b"


def test_letters_of_any_script_line_breaks_and_tabs_are_printed_as_they_are():
    assert printable("größe →\t日本\n\xa0»") == "größe →\t日本\n\xa0»"


def test_a_suggested_name_with_a_comma_is_in_quotes():
    names = ["attention", "attention, rotary", "lstm"]
    assert (
        suggest("attention, rotay", names)
        == 'did you mean "attention, rotary"? one of: attention, "attention, rotary", lstm'
    )
