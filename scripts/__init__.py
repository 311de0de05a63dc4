"""The programs of a checkout. `compare_frameworks.py` and `compare_revisions.py` measure this project."""
