"""A simulated CPU and GPU with exact times: lesson 10 measures them, and the results are the same on every machine."""


class Machine:
    """Python and a GPU, with a queue between them. All times are in microseconds.

    launch_us: Python's time for a launch. compile_us: additional time for the first launch of a kernel.
    """

    def __init__(self, launch_us: float = 10.0, compile_us: float = 0.0):
        self.launch_us, self.compile_us = launch_us, compile_us
        self.now = self.free = 0.0  # Python's clock; when the GPU finishes all queued work
        self.known: set[str] = set()
        self.spans: list[tuple[str, float, float]] = []  # (kernel, start, end)

    def clock(self) -> float:
        """The current time, as a timer in Python reads it."""
        return self.now

    def launch(self, name: str, runs_us: float) -> None:
        """Queue a kernel and return. It starts when all kernels queued before it have ended."""
        self.now += self.launch_us + (0 if name in self.known else self.compile_us)
        self.known.add(name)
        self._run(name, runs_us)

    def replay(self, kernels: list[tuple[str, float]]) -> None:
        """One launch for a whole list of (name, runs_us), like a CUDA graph."""
        self.now += self.launch_us
        for name, runs_us in kernels:
            self._run(name, runs_us)

    def _run(self, name, runs_us):
        start = max(self.now, self.free)
        self.free = start + runs_us
        self.spans.append((name, start, self.free))

    def record(self) -> float:
        """Queue an event: the GPU records the time when it reaches the event."""
        return max(self.now, self.free)

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""
        self.now = max(self.now, self.free)

    def elapsed_us(self, begin: float, end: float) -> float:
        """The time between two events. Raises ValueError if the GPU has not reached the second one."""
        if end > self.now:
            raise ValueError("the GPU has not reached this event yet: call synchronize() first")
        return end - begin
