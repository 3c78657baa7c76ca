"""Adds simulate_cuda.pth to the wheel: with NUMBA_ENABLE_CUDASIM=1, Python then starts the simulator. Metadata: pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithStartupFile(build_py):
    def run(self):
        super().run()
        self.copy_file("simulate_cuda.pth", self.build_lib)


setup(cmdclass={"build_py": WithStartupFile})
