"""A tiny model's folder, and the server in a thread of the test's process."""

import threading

import openai
from twins import random_model, small
from waiting import until

from xtrain import Engine
from xtrain.data.tokenizer import Tokenizer
from xtrain.server.app import Limits, create_app
from xtrain.server.protocol import HttpServer
from xtrain.serving import pretrained

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is false %}x + {% endif %}"
)


def make_folder(folder, template=TEMPLATE, max_seq_len=256):
    """Save a small random model with a tokenizer and a chat template. -> the folder"""
    tokenizer = Tokenizer.train(["def f(x):\n    return x + größe\n" * 50], 290)
    config = small(vocab_size=tokenizer.vocab_size, max_seq_len=max_seq_len, head_dim=16)
    random_model(config, device="cpu").save_pretrained(folder, tokenizer)
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Served:
    """An application in a thread of this process."""

    def __init__(self, folder, api_key=None, limits=None, drain=30, max_seq_len=256, **options):
        self.p = pretrained.load(folder, "cpu")
        self.engine = Engine(self.p.model, 2, max_seq_len, batch_invariant=True)
        app = create_app(self.engine, self.p, "tiny", api_key, limits or Limits(), **options)
        self.server = HttpServer(app, "127.0.0.1", 0, drain)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(
            base_url=self.url + "/v1", api_key=api_key or "x", max_retries=0
        )

    def close(self):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    @property
    def idle(self):
        return not self.engine.scheduler.unfinished and len(self.engine.scheduler.free_slots) == 2
