"""What a run writes while it trains: terminal, JSON records, TensorBoard, pictures, profiles."""
