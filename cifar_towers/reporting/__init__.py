"""Reports of a run: terminal, JSON records, TensorBoard, pictures, HTML pages, profiles."""
