"""What llama.cpp calls the parts of a model, for writing and reading GGUF files."""

from ..data.pieces import BOUNDARY

ROTATES_PAIRS = ("llama", "smollm3")  # the others rotate halves, as transformers does
NO_ROPE_EVERY = 4  # SmolLM3: fixed in llama.cpp
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_QWEN2 = rf"{_WORDS}\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_WORDS}\p{{N}}{{1,3}}|{_TAIL}"
_O200K = next(regex for regex in BOUNDARY if r"\p{Lu}" in regex)
BEGINS_LLAMA3 = ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"]  # put BOS before a text
# The regular expressions that split a text one after the other, and ignore_merges -> llama.cpp's
# names of the pre-tokenizer; the first one is written. Its source: src/llama-vocab.cpp.
PRE_TOKENIZERS = {
    ((GPT2,), False): ["gpt-2", "phi-2"],
    ((r"\p{N}", GPT2), False): ["smollm", "starcoder", "refact", "codeshell", "exaone"],
    ((_QWEN2,), False): ["qwen2", "deepseek-r1-qwen"],
    ((_LLAMA3,), True): BEGINS_LLAMA3,
    ((_LLAMA3,), False): ["dbrx", "smaug-bpe"],  # also Phi-4's
    ((_O200K,), False): ["gpt-4o"],
}
