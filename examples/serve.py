"""Continue several prompts at once, in one batch.

python examples/serve.py FOLDER "a prompt" ["another" ...]      FOLDER: a run of xtrain.train, or a Llama or Qwen3 folder
"""

import sys

from xtrain import Engine
from xtrain.serving.pretrained import load
from xtrain.serving.text_stream import TextStream


def main(folder: str, prompts: list[str], max_new_tokens: int = 64) -> list[str]:
    p = load(
        folder
    )  # model, tokenizer and the tokens that end an answer; on the GPU if there is one
    engine = Engine(p.model, max_batch=len(prompts))
    texts = [TextStream(p.tokenizer) for _ in prompts]
    ids = [p.tokenizer.encode_prompt(prompt) for prompt in prompts]
    stream = engine.stream(ids, max_new_tokens, temperature=0.8, top_p=0.9, seed=0, stop=p.stop)
    for number, token in stream:
        texts[number].feed(token)  # whole characters: a token may end inside one
    answers = [text.text + text.finish() for text in texts]
    for prompt, answer in zip(prompts, answers):
        print(prompt + answer)
    return answers


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
