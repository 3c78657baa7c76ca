"""A processor and a GPU that exist on paper, with exact times: what lesson 10 measures, the same on every machine."""


class Machine:
    """Python and a GPU with a queue between them. All times in microseconds.

    launch_us: Python's time for a launch. compile_us: on top of it, when a kernel is launched for the first time.
    """

    def __init__(self, launch_us: float = 10.0, compile_us: float = 0.0):
        self.launch_us, self.compile_us = launch_us, compile_us
        self.now = self.free = 0.0  # Python's clock; when the GPU has done all that is queued
        self.known: set[str] = set()
        self.spans: list[tuple[str, float, float]] = []  # (kernel, start, end)

    def clock(self) -> float:
        """What a stopwatch in Python shows."""
        return self.now

    def launch(self, name: str, runs_us: float) -> None:
        """Put a kernel into the queue, and go on. It begins when all before it have ended."""
        self.now += self.launch_us + (0 if name in self.known else self.compile_us)
        self.known.add(name)
        self._run(name, runs_us)

    def replay(self, kernels: list[tuple[str, float]]) -> None:
        """One launch for a whole list of (name, runs_us): a CUDA graph."""
        self.now += self.launch_us
        for name, runs_us in kernels:
            self._run(name, runs_us)

    def _run(self, name, runs_us):
        start = max(self.now, self.free)
        self.free = start + runs_us
        self.spans.append((name, start, self.free))

    def record(self) -> float:
        """Put an event into the queue: the GPU notes the time when it comes there."""
        return max(self.now, self.free)

    def synchronize(self) -> None:
        """Python waits until the GPU has done all that is queued."""
        self.now = max(self.now, self.free)

    def elapsed_us(self, begin: float, end: float) -> float:
        """Between two events. Raises ValueError while the GPU has not come to the second."""
        if end > self.now:
            raise ValueError("the GPU has not come to this event yet: synchronize() first")
        return end - begin
