"""The install cell of the lessons, with the versions that Google Colab has: pip resolves it, and CUDA stays at 12."""

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checks import only_all

from xtrain import lesson

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.13"
STAY = {
    "numpy": "2.1.*",
    "numba": "0.61.*",
    "cupy-cuda12x": "14.0.*",
}  # of Colab's packages, those that fit
RAISED = {"numba-cuda": (0, 22), "cuda-core": (0, 3)}  # those that are too old for xtrain
# Versions of these count CUDA's: cuda-bindings 12.9, nvidia-cublas 13.1
COUNTED = ("cuda-bindings", "cuda-python", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
UNREACHABLE = re.compile(r"Retrying \(|ConnectionError|ProxyError|Temporary failure|timed out")


def requirements() -> list[str]:
    """What `pip install -e './xtrain[...]'` of the install cell asks for."""
    cell = lesson.tagged(lesson.lesson_file("1").read_text(encoding="utf-8"), "install")
    (extra,) = re.findall(r"pip install -q -e './xtrain\[(\w+)\]'", cell)
    setup = configparser.ConfigParser(inline_comment_prefixes="#")
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"], setup["options.extras_require"][extra]
    return [line for text in lines for line in text.split("\n") if line.strip()]


def for_cuda_13(packages: dict[str, str]) -> list[str]:
    """The packages, {name: version}, that belong to CUDA 13 by their name or their version."""
    by_name = [n for n in packages if re.search(r"cu(da)?-?13", n)]
    by_version = [n for n, v in packages.items() if n.startswith(COUNTED) and v.startswith("13.")]
    return sorted({*by_name, *by_version})


def test_no_requirement_is_for_cuda_13():
    assert any("cu12" in line or "cuda12" in line for line in requirements())
    assert not any(re.search(r"cu(da)?-?13", line) for line in requirements())


def test_cuda_13_is_noticed():
    found = {
        "cupy-cuda13x": "14.0",
        "nvidia-nccl-cu12": "2.27",
        "cuda-bindings": "13.0.1",
        "nvidia-cuda-nvcc": "13.1",
    }
    assert for_cuda_13(found) == ["cuda-bindings", "cupy-cuda13x", "nvidia-cuda-nvcc"]
    assert for_cuda_13({"cuda-bindings": "12.9.1", "nvidia-ml-py": "13.580"}) == []


@pytest.mark.slow
@only_all
def test_pip_resolves_the_install_cell_on_colab(tmp_path):
    """pip downloads the wheels to read what they need (half a minute), and installs nothing."""
    constraints, report = tmp_path / "colab.txt", tmp_path / "report.json"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in STAY.items()))
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", str(report)),
        *("--python-version", PYTHON, "--only-binary=:all:", "--target", str(tmp_path / "none")),
        *(word for platform in PLATFORMS for word in ("--platform", platform)),
        *("--retries", "1", "--timeout", "30", "-c", str(constraints), *requirements()),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index is too slow")  # pip has not ended: it has not judged them
    if done.returncode and UNREACHABLE.search(done.stderr + done.stdout):
        pytest.skip("the package index cannot be reached")  # nothing was compared
    assert not done.returncode, done.stderr[-2000:]
    found = {
        re.sub(r"[-_.]+", "-", p["metadata"]["name"].lower()): p["metadata"]["version"]
        for p in json.loads(report.read_text(encoding="utf-8"))["install"]
    }
    assert for_cuda_13(found) == []
    for name, colab in RAISED.items():
        assert tuple(map(int, found[name].split(".")[:2])) > colab, f"{name} {found[name]}"
    for name, version in STAY.items():
        assert found[name].startswith(version[:-1])
