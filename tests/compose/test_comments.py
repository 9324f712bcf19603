"""Comments of YAML files."""

import yaml

from tfm_blocks.compose.comments import Comment, merge_comments, read_comments
from tfm_blocks.language.files import YamlFile

TEXT = """\
# @package _global_
# about the file
# in two lines
first: 1   # beside # it
# above
second: {a: 'x # no comment', b: [1, 2]}   # beside a mapping
third:  # beside a block
  inner: ${first}

  # above the last
  last:  # of nothing
"""


def read(text, prefix=()):
    return read_comments(YamlFile("", text, yaml.compose(text), None), prefix)


def test_comments_are_found_above_beside_and_on_top():
    assert read(TEXT, ("group",)) == {
        ("group",): Comment(("about the file", "in two lines")),
        ("group", "first"): Comment((), "beside # it"),
        ("group", "second"): Comment(("above",), "beside a mapping"),
        ("group", "second", "a"): Comment(),
        ("group", "second", "b"): Comment(),
        ("group", "third"): Comment((), "beside a block"),
        ("group", "third", "inner"): Comment(),
        ("group", "third", "last"): Comment(("above the last",), "of nothing"),
    }


def test_a_file_without_keys_has_the_comment_it_begins_with():
    assert read("# nothing\n") == {(): Comment(("nothing",))}
    assert read("# nothing\n{}\n") == {(): Comment(("nothing",))}


def test_a_file_without_comments_inherits_those_of_its_parent():
    below = {("a",): Comment(("above",), "beside"), ("b",): Comment((), "kept")}
    assert merge_comments(below, {("a",): Comment((), "better"), ("b",): Comment()}) == {
        ("a",): Comment(("above",), "better"),
        ("b",): Comment((), "kept"),
    }
