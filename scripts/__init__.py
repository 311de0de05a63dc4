"""`train.py` is `cifar-towers train`. `compare_frameworks.py` and `compare_revisions.py` measure
this project.
"""
