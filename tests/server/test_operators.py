"""What operators see: ids of requests, lines of the log, metrics by vLLM's names, and spans."""

import re

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from served import Served  # noqa: E402
from waiting import until  # noqa: E402

from xtrain.server import metrics  # noqa: E402
from xtrain.server.engine_loop import Figures  # noqa: E402

HI = [{"role": "user", "content": "def f"}]
BODY = {"prompt": "def f", "max_tokens": 6, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(folder):
    served = Served(folder, access_log=True)
    yield served
    served.close()


def post(served, headers=None, path="/v1/completions", **change):
    return httpx.post(served.url + path, json=BODY | change, headers=headers, timeout=60)


# ----------------------------------------------------------------------------- ids and lines
def test_every_answer_has_the_id_of_its_request(served, monkeypatch):
    ours = {"X-Request-Id": "my-id.1"}
    for answer in (
        post(served, ours),
        post(served, ours, stream=True),
        post(served, ours, max_tokens=-1),
        httpx.get(served.url + "/nothing", headers=ours),
    ):
        assert answer.headers.get_list("x-request-id") == ["my-id.1"]
    assert post(served, ours).json()["id"] == "cmpl-my-id.1"
    ids = [post(served, {"X-Request-Id": x}).headers["x-request-id"] for x in ("a b", "x" * 129)]
    ids += [post(served).headers["x-request-id"] for _ in range(2)]
    assert len(set(ids)) == 4 and all(re.fullmatch("[0-9a-f]{24}", x) for x in ids)

    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(served.engine, "step", fail)  # an error of the application's own
    assert post(served, ours).headers.get_list("x-request-id") == ["my-id.1"]
    monkeypatch.setattr(served.server.config.app.state.server, "_read", fail)
    answer = post(served, ours)
    assert answer.status_code == 500 and answer.headers.get_list("x-request-id") == ["my-id.1"]


def lines(capsys, n):
    """-> the fields of the next n lines"""
    found = []

    def all_there():
        for line in capsys.readouterr().err.splitlines():
            if " client=" in line:
                found.append(dict(part.split("=", 1) for part in line.split(" ")[1:]))
        return len(found) >= n

    until(all_there)
    assert len(found) == n
    return found


def test_a_line_for_each_request(served, capsys):
    capsys.readouterr()
    post(served, {"X-Request-Id": "a"}, n=2, stream=True)
    (line,) = lines(capsys, 1)
    assert float(line.pop("seconds")) > float(line.pop("first_token")) > 0
    assert int(line.pop("cached_tokens")) < int(line["prompt_tokens"])
    n_prompt = len(served.p.tokenizer.encode_prompt("def f"))
    assert line == {
        "client": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": "200", "id": "a",
        "prompt_tokens": str(n_prompt), "tokens": "12", "finish": "length:2",
    }  # fmt: skip
    httpx.get(served.url + "/health")  # no line
    httpx.get(served.url + "/a%0Ab c")
    post(served, max_tokens=-1)
    with httpx.stream(
        "POST", served.url + "/v1/completions", json=BODY | {"max_tokens": 200, "stream": True}
    ) as answer:
        next(answer.iter_lines())
    odd, refused, gone = lines(capsys, 3)
    assert (odd["path"], odd["status"]) == ("/a%0Ab%20c", "404")
    assert (refused["status"], refused["error"]) == ("400", "invalid_request_error")
    assert "tokens" not in refused
    assert (gone["status"], gone["finish"]) == ("200", "abort:1") and 0 < int(gone["tokens"]) < 200
    until(lambda: served.idle)


def test_a_line_of_throughput(served, capsys, monkeypatch):
    before = Figures(blocks=10, blocks_available=10, prompt_tokens=100, reused_tokens=5)
    after = Figures(
        slots_used=3, pending=2, blocks=10, blocks_available=6, prompt_tokens=400, reused_tokens=105, preemptions=1
    )  # fmt: skip
    line = metrics.throughput(before, after, 250, 10.0)
    assert line.partition(" ")[2] == (
        "30.0 prompt tokens/s, 25.0 tokens/s; 3 sequences running, 2 waiting, 1 preempted; "
        "KV cache 40.0 % in use, 25.0 % of prompt tokens found in it"
    )
    monkeypatch.setattr(metrics, "LOG_SECONDS", 0.05)
    own = Served(served.p.folder, access_log=True)
    try:
        capsys.readouterr()
        post(own)
        seen = []
        until(lambda: seen.append(capsys.readouterr().err) or " tokens/s; " in "".join(seen))
    finally:
        own.close()


# ----------------------------------------------------------------------------- metrics
def figures(served):
    """-> {(name, labels): value}, without those of buckets"""
    text = httpx.get(served.url + "/metrics").text
    return {
        (sample.name, *sorted(set(sample.labels.values()) - {"tiny", "0"})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_have_vllm_s_names_and_count_sequences(folder):
    served = Served(folder)
    try:
        post(served, n=3)  # in two slots
        (ids,) = served.engine.generate([[5]], 1)
        post(served, prompt=[5], stop_token_ids=ids, temperature=0)
        with httpx.stream(
            "POST", served.url + "/v1/completions", json=BODY | {"max_tokens": 200, "stream": True}
        ) as answer:
            next(answer.iter_lines())
        until(lambda: served.idle)
        post(served, max_tokens=0)
        post(served, path="/nothing")
        post(served, prompt="def f(x)", echo=True, logprobs=1)  # the prompt is scored
        weight = served.engine.model.model.norm.weight
        weight.data = weight.numpy() * float("nan")
        assert post(served).status_code == 500
        found = figures(served)
        name = "vllm:request_success_total"
        reasons = {reason: found[name, reason] for reason in ("stop", "length", "abort", "error")}
        assert reasons == {"stop": 1, "length": 4, "abort": 1, "error": 1}
        computed = 6  # sequences with a token
        for part in ("e2e_request_latency", "request_queue_time", "request_prefill_time",
                     "request_decode_time", "request_inference_time"):  # fmt: skip
            assert found[f"vllm:{part}_seconds_count",] == computed
        assert found["vllm:request_queue_time_seconds_sum",] > 0
        assert found["vllm:time_to_first_token_seconds_count",] == computed
        generated = found["vllm:generation_tokens_total",]
        assert generated == found["vllm:request_generation_tokens_sum",] >= 4 * 6 + 1
        assert 0 < found["vllm:inter_token_latency_seconds_count",] <= generated - computed
        assert found["vllm:request_params_n_sum",] == 7
        assert found["vllm:num_requests_waiting",] == found["vllm:num_requests_running",] == 0
        assert 0 <= found["vllm:kv_cache_usage_perc",] < 1
        assert found["vllm:num_preemptions_total",] == 0
        for part in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert found[f"vllm:spec_decode_{part}_total",] == 0
        assert (
            found["vllm:prefix_cache_queries_total",] >= found["vllm:prefix_cache_hits_total",] > 0
        )
        handler = "/v1/completions"
        statuses = [
            found["http_requests_total", *sorted((handler, "POST", f"{x}xx"))] for x in (2, 4, 5)
        ]
        assert statuses == [4, 1, 1] and found["http_requests_total", "4xx", "POST", "none"] == 1
    finally:
        served.close()


def test_buckets_are_vllm_s(served):
    text = httpx.get(served.url + "/metrics").text
    bounds = {}
    for name, bound in re.findall(r"^(vllm:\w+)_bucket\{.*le=\"([^\"]+)\"", text, re.M):
        bounds.setdefault(name, []).append(bound)
    assert bounds["vllm:inter_token_latency_seconds"] == [
        "0.01",
        "0.025",
        "0.05",
        "0.075",
        "0.1",
        "0.15",
        "0.2",
        "0.3",
        "0.4",
        "0.5",
        "0.75",
        "1.0",
        "2.5",
        "5.0",
        "7.5",
        "10.0",
        "20.0",
        "40.0",
        "80.0",
        "+Inf",
    ]
    assert bounds["vllm:request_prompt_tokens"] == [
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "20.0",
        "50.0",
        "100.0",
        "200.0",
        "+Inf",
    ]
    assert len(bounds["vllm:time_to_first_token_seconds"]) == 23
    assert len(bounds["vllm:request_queue_time_seconds"]) == 22


# ----------------------------------------------------------------------------- spans
def test_spans(folder, monkeypatch):
    pytest.importorskip("opentelemetry.instrumentation.asgi")
    exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    spans = memory.InMemorySpanExporter()
    monkeypatch.setattr(exporter, "OTLPSpanExporter", lambda endpoint: spans)
    served = Served(folder, otlp_traces_endpoint="http://localhost:4318/v1/traces")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    try:
        post(served, {"traceparent": parent, "X-Request-Id": "a"}, stream=True)
        post(served, max_tokens=-1)
    finally:
        served.close()
    answered, refused = spans.get_finished_spans()
    assert f"{answered.context.trace_id:x}" in parent and answered.name.startswith("POST")
    named = answered.attributes
    assert (named["gen_ai.request.id"], named["gen_ai.usage.output_tokens"]) == ("a", 6)
    assert named["gen_ai.response.finish_reasons"] == "length:1"
    assert named["gen_ai.latency.time_to_first_token"] > 0
    assert refused.attributes["error.type"] == "invalid_request_error"
    assert answered.resource.attributes["service.name"] == "xtrain"
