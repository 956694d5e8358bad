"""Placeholder so that others can import; the person who builds the cost model overwrites this file."""


class LatencyModel:
    """Least squares on (1, work)."""

    def __init__(self, *, margin_sigmas: float = 1.64) -> None:
        self.known = False
        self.tau0_ns = 0.0
        self.alpha_ns = 0.0
        self.scatter = 0.0
        self._sums = [0.0] * 5

    def observe(self, work: float, length: int, taken_ns: int) -> None:
        """One batch."""
        s = self._sums
        for index, value in enumerate((1.0, work, work * work, taken_ns, work * taken_ns)):
            s[index] += value
        det = s[0] * s[2] - s[1] * s[1]
        self.alpha_ns = max(0.0, (s[0] * s[4] - s[1] * s[3]) / det) if det > 1e-9 else 0.0
        self.tau0_ns = max(0.0, (s[3] - self.alpha_ns * s[1]) / s[0])
        self.known = True

    def expected_ns(self, work: float, length: int = 0) -> int:
        """Nanoseconds."""
        return int(self.tau0_ns + self.alpha_ns * work)

    def upper_ns(self, work: float, length: int = 0) -> int:
        """Nanoseconds."""
        return int(self.tau0_ns + self.alpha_ns * work)
