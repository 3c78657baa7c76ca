"""Files of test items, and functions that run `xtrain evaluate` on them."""

import json

import torch
import transformers

from xtrain.evaluate import main


def lines(path, *rows):
    """Write one JSON object per line. -> the path"""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def evaluate(capsys, folder, *arguments):
    """-> (exit code, stdout, stderr)"""
    capsys.readouterr()
    code = main(["--model", str(folder), "--precision", "fp32", "--tasks", *map(str, arguments)])
    return code, *capsys.readouterr()


def results(capsys, tmp_path, folder, *arguments):
    """-> the results that --json writes"""
    path = tmp_path / "results.json"
    code, _, err = evaluate(capsys, folder, *arguments, "--json", path)
    assert code == 0, err
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def theirs(folder):
    """-> transformers' model and tokenizer"""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def logprobs(model, ids):
    """-> (T - 1, V): row t is the log-probabilities of the token t + 1, in float64"""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).numpy()
