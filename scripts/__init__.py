"""`train.py` is `cifar-towers train`. `compare_frameworks.py` measures this project, `compare.py`
finds where two runs or revisions differ.
"""
