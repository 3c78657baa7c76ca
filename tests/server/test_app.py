"""xtrain serve: OpenAI's client, errors, limits, disconnects and SIGTERM against a tiny model on the CPU."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

from served import Served  # noqa: E402
from waiting import free_port, listening, until  # noqa: E402

from xtrain.server import listen  # noqa: E402
from xtrain.server.app import Limits  # noqa: E402

HI = [{"role": "user", "content": "def f"}]


def ask(served, **options):
    return served.client.chat.completions.create(
        **{"model": "tiny", "messages": HI, "max_tokens": 12, "seed": 3} | options
    )


def test_chat_is_seeded_and_streams_the_same_text(served):
    whole, again = ask(served, n=2), ask(served, n=2)
    texts = [choice.message.content for choice in whole.choices]
    assert texts == [choice.message.content for choice in again.choices] and texts[0] != texts[1]
    assert ask(served).choices[0].message.content == texts[0]
    assert whole.usage.completion_tokens <= 24 and whole.usage.prompt_tokens > 0
    streamed, last = ["", ""], None
    for chunk in ask(served, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
        last = chunk
    assert streamed == texts and last.usage == again.usage and not last.choices


def test_completions_logprobs_and_stop(served):
    create = served.client.completions.create
    options = dict(model="tiny", max_tokens=8, temperature=0, logprobs=2)
    (one,) = create(prompt="def f", **options).choices
    assert len(one.logprobs.tokens) == len(one.logprobs.top_logprobs) == 8
    assert one.logprobs.token_logprobs[0] == max(one.logprobs.top_logprobs[0].values())
    both = create(prompt=["def f", "x"], **options).choices
    assert both[0].text == one.text and both[1].index == 1
    stop = one.text[2:4]
    (cut,) = create(prompt="def f", stop=[stop], **options).choices
    assert cut.text == one.text[: one.text.index(stop)] and cut.finish_reason == "stop"
    chat = ask(served, logprobs=True, top_logprobs=3).choices[0]
    assert len(chat.logprobs.content) == 12 and len(chat.logprobs.content[0].top_logprobs) == 3
    assert chat.finish_reason == "length"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "leaves no room"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs 'messages': the model's",
        ),
        ({"chat_template_kwargs": {"source": "x"}}, "chat template does not read this value"),
    ],
)
def test_a_bad_request_is_a_sentence(served, change, says):
    body = {"messages": HI} | change
    answer = httpx.post(served.url + "/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"], error
    assert "Value error" not in error["message"] and "str" not in (error["param"] or "").split(
        "."
    ), error
    assert error["type"] == "invalid_request_error" and served.idle


def test_other_errors(served):
    with pytest.raises(openai.NotFoundError, match="no model"):
        ask(served, model="other")
    for method, path, status in [("GET", "/nothing", 404), ("GET", "/v1/completions", 405)]:
        answer = httpx.request(method, served.url + path)
        assert answer.status_code == status and answer.json()["error"]["message"]
    assert httpx.get(served.url + "/health").json() == {"status": "ok"}
    assert [m.id for m in served.client.models.list()] == ["tiny"]
    assert "xtrain_slots 2.0" in httpx.get(served.url + "/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_slot(served, stream):
    body = {"messages": HI, "max_tokens": 200, "stream": stream, "n": 2, "seed": 1}
    request = httpx.Client().build_request("POST", served.url + "/v1/chat/completions", json=body)
    host, port = request.url.host, request.url.port
    head = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    with socket.create_connection((host, port)) as connection:
        line = "POST /v1/chat/completions HTTP/1.1\r\n"
        connection.sendall((line + head + "\r\n").encode() + request.content)
        until(lambda: served.engine.scheduler.decoding)
        running = list(served.engine.scheduler.decoding)
    until(lambda: served.idle)
    assert {r.completion.reason for r in running} == {"cancelled"}
    assert all(len(r.completion) < 200 for r in running)


def fail(*_):
    raise RuntimeError("planted")


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_raises_fails_its_requests_alone(served, stream, monkeypatch):
    """The client gets OpenAI's error object without a traceback, and the next request works."""
    right = ask(served).choices[0].message.content
    monkeypatch.setattr(served.engine, "step", fail)
    with pytest.raises(openai.APIError, match="the engine failed") as caught:
        answer = ask(served, stream=stream)
        list(answer)
    assert "planted" not in str(caught.value) and "Traceback" not in str(caught.value)
    monkeypatch.undo()
    until(lambda: served.idle)
    assert ask(served).choices[0].message.content == right
    assert httpx.get(served.url + "/health").status_code == 200


def test_logits_that_are_nan_are_an_error_of_the_server(served):
    right = ask(served).choices[0].message.content
    weight = served.engine.model.model.norm.weight
    values = weight.numpy().copy()
    weight.data = values * np.nan
    with pytest.raises(openai.InternalServerError, match="logits are NaN"):
        ask(served)
    with pytest.raises(openai.InternalServerError, match="logits are NaN"):
        served.client.completions.create(model="tiny", prompt="def f", echo=True, logprobs=1)
    weight.data = values
    until(lambda: served.idle)
    assert ask(served).choices[0].message.content == right


def test_a_request_over_its_time_is_504(folder):
    served = Served(folder, limits=Limits(seconds=0.05))
    step = served.engine.step
    served.engine.step = lambda: (time.sleep(0.03), step())[1]
    try:
        with pytest.raises(openai.APIStatusError, match=r"took longer than 0\.05 s") as caught:
            ask(served, max_tokens=200)
        assert caught.value.status_code == 504
        until(lambda: served.idle)
        with pytest.raises(openai.APIError, match="took longer than"):
            list(ask(served, max_tokens=200, stream=True))
        until(lambda: served.idle)
    finally:
        served.close()


def test_the_asynchronous_client(served):
    want = ask(served).choices[0].message.content

    async def several():
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x") as client:
            chat = client.chat.completions.create
            options = dict(model="tiny", messages=HI, max_tokens=12, seed=3)
            whole = [chat(**options) for _ in range(3)]
            found = [x.choices[0].message.content for x in await asyncio.gather(*whole)]
            stream = await chat(**options, stream=True)
            return [*found, "".join([x.choices[0].delta.content or "" async for x in stream])]

    assert asyncio.run(several()) == [want] * 4


# A machine may lack curl, which no extra installs; CI's has it.
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_reads_a_stream(served):
    want = ask(served).choices[0].message.content
    body = json.dumps(
        {"model": "tiny", "messages": HI, "max_tokens": 12, "seed": 3, "stream": True}
    )
    url = served.url + "/v1/chat/completions"
    out = subprocess.run(
        ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", body],
        capture_output=True, text=True, timeout=30,
    ).stdout  # fmt: skip
    events = [line.removeprefix("data: ") for line in out.splitlines() if line]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == want


def test_limits_and_key(folder):
    served = Served(folder, "secret", Limits(body_bytes=3000, queue=1, answers=3, seconds=30))
    try:
        assert httpx.get(served.url + "/v1/models").status_code == 401
        with pytest.raises(openai.AuthenticationError):
            served.client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APIStatusError, match="longer than 3000 bytes"):
            ask(served, messages=[{"role": "user", "content": "x" * 4000}])
        with pytest.raises(openai.BadRequestError, match="may have 3 answers in all"):
            ask(served, n=4)
        with ask(served, n=3, max_tokens=200, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                ask(served)
            assert refused.value.response.headers["retry-after"] == "1"
        until(lambda: served.idle)
        assert ask(served).choices[0].message.content
    finally:
        served.close()


def test_a_key_may_have_any_characters(folder):
    served = Served(folder, "clé-ключ")
    try:
        send = lambda key: httpx.get(
            served.url + "/v1/models", headers={b"Authorization": f"Bearer {key}".encode()}
        )
        assert [send(key).status_code for key in ("clé-ключ", "clé")] == [200, 401]
    finally:
        served.close()


def test_many_streams_with_disconnects_equal_solitary_answers(served):
    alone = {seed: ask(served, seed=seed).choices[0].message.content for seed in range(4)}
    wrong = []

    def one(number):
        text, cut = "", number % 3 == 0
        with ask(served, seed=number % 4, stream=True) as stream:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if cut and text:
                    return
        if text != alone[number % 4]:
            wrong.append(number)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    until(lambda: served.idle)
    assert served.engine.scheduler.pool.available == served.engine.scheduler.pool.size
    until(lambda: served.server.config.app.state.server.waiting == 0)


@pytest.mark.parametrize(
    "host, key, warned", [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("localhost", None, False)]
)  # fmt: skip
def test_a_server_that_is_open_to_all_says_so(folder, monkeypatch, capsys, host, key, warned):
    monkeypatch.delenv("XTRAIN_API_KEY", raising=False)
    monkeypatch.setattr(listen, "HttpProcess", mock.MagicMock())
    monkeypatch.setattr(listen, "serve_engine", lambda *_, **options: None)
    options = listen.Options(
        model=str(folder), host=host, port=free_port(), api_key=key, device="cpu"
    )
    listen.serve(options)
    text = "".join(capsys.readouterr())
    assert ("--host 0.0.0.0 without --api-key: every machine" in text) == warned, text


def test_sigterm_completes_answers_and_exits_0(folder):
    port = free_port()
    command = [sys.executable, "-m", "xtrain.serve", "--model", str(folder), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--device", "cpu"], env=os.environ, stderr=subprocess.PIPE
    )
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: listening(port), 60)
        body = {
            "messages": HI,
            "max_tokens": 3,
            "seed": 1,
        }  # without, a random model may end sooner
        chat = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
        assert chat.json()["usage"]["completion_tokens"] == 3, chat.text
        body = {"prompt": "def f", "max_tokens": 150, "stream": True, "seed": 1}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"' in rest[-2]
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_model_s_defaults_of_sampling(folder, tmp_path, monkeypatch, capsys):
    """generation_config.json decides what a request leaves open."""
    shutil.copytree(folder, tmp_path / "model")
    content = {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 9, "top_k": 1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(content))
    started = {}
    monkeypatch.setattr(listen, "HttpProcess", mock.MagicMock())
    monkeypatch.setattr(listen, "serve_engine", lambda *_, **options: started.update(options))
    options = listen.Options(model=str(tmp_path / "model"), port=free_port(), device="cpu")
    listen.serve(options)
    said = "generation_config.json: temperature 0.0, top_k 1, repetition_penalty 1.3"
    assert said in capsys.readouterr().err and started["defaults"].max_new_tokens == 9
    served = Served(tmp_path / "model")
    try:
        create = served.client.completions.create
        prompt = served.p.tokenizer.encode_prompt("def f")
        greedy = dict(repetition_penalty=1.3, stop=served.p.stop)
        texts = [
            served.p.tokenizer.decode(ids)
            for n in (9, 4)
            for ids in served.engine.generate([prompt], n, **greedy)
        ]
        answer = create(model="tiny", prompt="def f")
        assert answer.choices[0].text == texts[0] and answer.usage.completion_tokens == 9
        options = dict(model="tiny", prompt="def f", max_tokens=4)
        assert create(**options, temperature=1).choices[0].text == texts[1]  # top_k 1
        draw = lambda **more: {
            create(**options, temperature=2, seed=i, extra_body=more).choices[0].text
            for i in range(6)
        }
        assert draw() == {texts[1]} and len(draw(top_k=0)) > 1 and len(draw(top_k=-1)) > 1
    finally:
        served.close()
