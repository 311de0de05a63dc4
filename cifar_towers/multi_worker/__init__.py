"""Training with several processes: their addresses, their coordination outside the graph, and their
launcher.

Gradients are exchanged by TensorFlow's own collectives.
"""
