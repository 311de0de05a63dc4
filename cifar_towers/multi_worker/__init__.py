"""Several processes that train as one: who they are, and how they talk outside the graph.

Nothing here knows of TensorFlow, models or files; the gradients travel by TensorFlow's own way.
"""
