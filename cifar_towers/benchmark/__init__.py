"""A recipe's step with different placements, strategies and numbers of towers, measured on this machine."""
