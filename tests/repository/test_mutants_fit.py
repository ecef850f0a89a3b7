"""Mutants break lines of the product, for minutes. That these lines are there is seen at once."""

from pathlib import Path

import pytest

from mutants.listed import MUTANTS, Mutant

TREE = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_finds_the_one_line_that_it_breaks(mutant: Mutant) -> None:
    assert (TREE / mutant.file).read_text().count(mutant.old) == 1, "bring the mutant up to date"
