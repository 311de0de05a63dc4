"""Short trainings with different placements, strategies and numbers of towers, compared on this machine."""
