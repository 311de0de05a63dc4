"""Assertions on printed text that pin names, numbers and flags, and leave the prose free."""


def lines_with(text, *parts):
    """Return the lines of `text` that contain all parts."""
    return [line for line in text.splitlines() if all(str(part) in line for part in parts)]
