"""Assertions on printed text that pin names, numbers and flags, and leave the prose free."""

import re

NUMBER = r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?"


def lines_with(text, *parts):
    """Return the lines of `text` that contain all parts."""
    return [line for line in text.splitlines() if all(str(part) in line for part in parts)]


def words_and_numbers(text):
    """Return the words of `text`, with n in place of numbers, and the numbers."""
    return re.sub(NUMBER, "n", text).split(), [
        float(n.replace(",", "")) for n in re.findall(NUMBER, text)
    ]
