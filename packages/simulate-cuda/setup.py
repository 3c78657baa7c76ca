"""Adds simulate_cuda.pth to the wheel, which lets NUMBA_ENABLE_CUDASIM=1 start the simulator.

The metadata is in pyproject.toml.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithStartupFile(build_py):
    def run(self):
        super().run()
        self.copy_file("simulate_cuda.pth", self.build_lib)


setup(cmdclass={"build_py": WithStartupFile})
