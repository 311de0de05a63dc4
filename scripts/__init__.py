"""`train.py` is `cifar-towers train`. `benchmark.py` measures this project, and `compare.py` finds
where two runs or revisions differ.
"""
