"""exact_decode_attention.py compiles without a GPU, without local memory; its static arrays keep the tiles aligned."""

import re

from offline import CARDS_BF16, compiled, nvvm, signatures
from test_exact_decode_attention import launch_all

__all__ = ["nvvm"]


def test_it_compiles(nvvm, monkeypatch):
    found = signatures(monkeypatch, launch_all)
    assert len(found) == 6
    for kernel, signature in found:
        for ptx in compiled(monkeypatch, kernel, signature, CARDS_BF16[-2:]).values():
            sizes = re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", ptx)
            assert len(sizes) == 5 and all(int(n) % 256 == 0 for n in sizes)
