"""A plugin of pytest for nbmake: kernels are forks of one process that has imported what most lessons import.

    PYTHONPATH=tests/helpers pytest -p forked_kernels --nbmake lessons

A new process takes 3 to 4 seconds of a core to import Jupyter, matplotlib, Numba and xtrain; a fork takes 0.5.
Only in .ci/run: `notebooks.py run`, which writes the committed outputs, starts a new process for each lesson.
"""

import multiprocessing
import os
import sys

from jupyter_client.provisioning import local_provisioner

IMPORTED = ["ipykernel.kernelapp", "matplotlib.pyplot", "numba.cuda", "xtrain.lesson"]
IMPORTED += ["matplotlib_inline.backend_inline", "xtrain.simulator", "xtrain.nn.functional"]
PATH = list(sys.path)  # without the folders that pytest adds
# as a kernel sets it; matplotlib reads it when it is imported
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(IMPORTED)


def run_kernel(arguments, env, folder, path, started):
    """Run a kernel in this process, a fork, with the environment and the folder of a notebook."""
    os.setsid()  # as the process of a kernel: signals go to its group
    started.set()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = path
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(arguments)


class Fork:
    """What a provisioner of Jupyter needs of subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, command, env=None, cwd=None, **options):
        started = forks.Event()
        env = {name: value for name, value in env.items() if name != "JPY_PARENT_PID"}
        arguments = command[command.index("-f") :]
        given = arguments, env, cwd or os.getcwd(), PATH, started
        self.process = forks.Process(target=run_kernel, args=given, daemon=True)
        self.process.start()
        started.wait(60)
        self.pid = self.process.pid

    def poll(self):
        """-> the exit code, or None while the kernel runs"""
        return self.process.exitcode

    def wait(self):
        """Wait for the end. -> the exit code"""
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number):
        """Send a signal to the kernel alone."""
        os.kill(self.pid, number)

    def kill(self):
        """Kill the kernel."""
        self.process.kill()

    def terminate(self):
        """Ask the kernel to end."""
        self.process.terminate()


local_provisioner.launch_kernel = Fork
