"""The rules of the contract in the order of their checks, and the first that a block breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tfm_blocks.network.contract.breach import BreachError
from tfm_blocks.network.contract.case import Case
from tfm_blocks.network.contract.decoding import steps_as_it_reads, steps_in_a_search
from tfm_blocks.network.contract.forward import (
    gives_finite_numbers,
    gives_gradients,
    has_no_weights_if_weightless,
    has_the_declared_shape,
    keeps_rows_apart,
    repeats_itself,
    runs_on_the_meta_device,
    sees_no_more_than_declared,
    starts_from_the_seed,
)
from tfm_blocks.network.contract.padding import (
    ignores_padding_in_a_decoder,
    ignores_padding_that_comes_first,
    ignores_padding_that_comes_last,
)

Rule = Callable[[Case], None]
BEFORE_A_RUN: Sequence[Rule] = (
    gives_finite_numbers,
    repeats_itself,
    sees_no_more_than_declared,
    ignores_padding_that_comes_last,
    ignores_padding_in_a_decoder,
    steps_as_it_reads,
)
ALL: Sequence[Rule] = (
    runs_on_the_meta_device,
    has_no_weights_if_weightless,
    has_the_declared_shape,
    starts_from_the_seed,
    *BEFORE_A_RUN,
    ignores_padding_that_comes_first,
    keeps_rows_apart,
    gives_gradients,
    steps_in_a_search,
)


@dataclass(frozen=True)
class Breach:
    """The case in which a rule is broken; `measured` completes a sentence that begins with the block's name."""

    case: Case
    measured: str
    fix: str


def first_breach(cases: Iterable[Case], rules: Sequence[Rule] = ALL) -> Breach | None:
    """Check the rules on each case and return the first breach, or None. The caller's random state is preserved."""
    with torch.random.fork_rng(devices=[]):
        for case in cases:
            for rule in rules:
                breach = _breach(case, rule)
                if breach:
                    return breach
    return None


def _breach(case: Case, rule: Rule) -> Breach | None:
    try:
        rule(case)
    except BreachError as error:
        return Breach(case, error.measured, error.fix)
    except Exception as error:  # whatever the code of a plug-in raises
        lines = str(error).strip().splitlines()
        measured = f"fails on float32 tensors on the CPU: {type(error).__name__}: {lines[0] if lines else ''}"
        return Breach(case, measured, f"call the block in Python with small tensors; the rule is {rule.__name__}")
    return None
