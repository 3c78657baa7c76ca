"""manifest.py: samples tell models apart. Checksums of saved folders: tests/training/test_checkpoint.py."""

import numpy as np
from test_gguf_model import minimal

from xtrain.formats.manifest import sampled_digest
from xtrain.formats.saved_runs import model_folder


def test_samples_of_gguf_files(tmp_path):
    digests = []
    for i, value in enumerate((1, 1, 2)):
        folder = tmp_path / str(i)
        folder.mkdir()
        table = np.full((2, 8), value, np.float32)
        digests.append(
            sampled_digest(model_folder(minimal(folder / "a.gguf", {}, token_embd=table)))
        )
    assert digests[0] == digests[1] != digests[2]


def test_samples_of_adapters_with_another_scale(tmp_path):
    digests = []
    for alpha in (16, 16, 32):
        (tmp_path / "adapter_model.safetensors").write_bytes(b"the same")
        (tmp_path / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
        digests.append(sampled_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]
