"""What is known of something that was visited round after round."""

import statistics


class OverRounds:
    """Adds median and quartiles to what has `images_per_sec`, one number a round."""

    images_per_sec: list[float]

    @property
    def median(self) -> float:
        """Images a second."""
        return statistics.median(self.images_per_sec)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the rounds were slower than the first, a quarter faster than the second."""
        if len(self.images_per_sec) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.images_per_sec, n=4, method="inclusive")
        return low, high
