"""Overrides as they are typed."""

import pytest

from tfm_blocks.compose.command_line import prepare_arguments


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("model.args.d_ff=2*(d_model+1)", "++model.args.d_ff='2*(d_model+1)'"),
        ("data.dir=/my texts (new)", "data.dir='/my texts (new)'"),
        ("data.dir=/Übung", "data.dir='/Übung'"),
    ],
)
def test_a_value_beyond_hydras_grammar_is_text(text, readable):
    assert prepare_arguments(["data=text", text]) == ["data=text", readable]
