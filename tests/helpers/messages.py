"""Assertions on printed text that pin names, numbers and flags, and leave the prose free."""

import re

import pytest

ROUNDING = 1e-5  # below it, a printed number is an error of rounding
NUMBER = r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?"


def lines_with(text, *parts):
    """Return the lines of `text` that contain all parts."""

    def has_all(line):
        return all(str(part) in line for part in parts)

    return [line for line in text.splitlines() if has_all(line)]


def words_and_numbers(text):
    """Return the words of `text`, with n in place of numbers, and the numbers."""
    words = re.sub(NUMBER, "n", text).split()
    numbers = [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]
    return words, numbers


def assert_prints_the_same(printed, kept, rel):
    """Check that a text has the words of another, and its numbers to within `rel`.

    Errors of rounding differ between processors: at most ten times as large is the same.
    """
    words, numbers = words_and_numbers(printed)
    kept_words, kept_numbers = words_and_numbers(kept)
    assert words == kept_words
    for number, kept_number in zip(numbers, kept_numbers, strict=True):
        if 0 < kept_number < ROUNDING:
            assert 0 <= number <= 10 * kept_number, (number, kept_number)
        else:
            assert number == pytest.approx(kept_number, rel=rel)
