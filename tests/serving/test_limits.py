"""Faults, slow clients, many connections and long requests in `tfm serve` affect no other request."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import published_words, save, sentences
from tests.serving.clients import continuing_model, request, serving
from tests.serving.test_serve import texts_of
from tfm_blocks.serving import Limits
from tfm_blocks.serving.batcher import Batcher, Job, Metrics
from tfm_blocks.serving.requests import SamplingBody, TranslateBody
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

ROOT = Path(__file__).parents[2]
SETTINGS = [{}, {"beam": 3, "nbest": 2}, {"beam": 2, "coverage": 0.2}, {"sampling": {"seed": 4}}]


@pytest.fixture(scope="module")
def poisoned(translator):
    """Return a translator of which the word `Kinder` makes the logits infinite, and its text of one token for it."""
    graph = {"model.graph.tgt_emb": {"same": None, "block": "embedding"}, "model.graph.logits.tie": None}
    network = tfm.build("tiny", layers=1, d_model=16, vocab=translator.tokenizer.size, seed=3, **graph)
    (*_, id) = translator.tokenizer.encode("Kinder")
    with torch.no_grad():
        network["src_emb"].block.weight[id] = torch.nan
    return Translator(network.eval(), translator.tokenizer)


def post_all(port, path, bodies):
    """Return the responses to requests that are sent concurrently."""
    replies = [None] * len(bodies)

    def post(place):
        replies[place] = httpx.post(f"http://127.0.0.1:{port}{path}", json=bodies[place], timeout=60)

    threads = [threading.Thread(target=post, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


@pytest.mark.grid
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "beam", "coverage", "sampling"])
def test_a_text_whose_logits_are_not_finite_fails_alone(poisoned, settings):
    texts = [["am Fluss"], ["zwei Kinder"], ["ein Haus", "zwei Kinder", "", "am Fluss"]]
    with serving(poisoned, wait=0.3) as (port, batcher):
        first, second, third = post_all(port, "/translate", [{"texts": row, **settings} for row in texts])
        alone = [
            texts_of(httpx.post(f"http://127.0.0.1:{port}/translate", json={"texts": [text], **settings}))[0]
            for text in ("am Fluss", "ein Haus")
        ]
    assert batcher.metrics.batch_texts._sum.get() == 5 + 2  # all three requests were one batch
    assert texts_of(first) == alone[:1]
    assert second.status_code == 500 and "not finite" in second.json()["error"]["rule"]
    (error,) = third.json()["errors"]
    assert error["address"] == "sentence 2" and "not finite" in error["rule"]
    house, children, blank, river = texts_of(third)
    assert (children, blank) == ([], [""])
    assert "sampling" in settings or (house, river) == (alone[1], alone[0])  # samples depend on the sentence's number


def test_a_stream_whose_logits_are_not_finite_ends_with_an_error(translator):
    network = tfm.build("decoder_only", layers=1, d_model=16, d_ff=16, heads=2, vocab=translator.tokenizer.size)
    with torch.no_grad():
        network["emb"].block.weight[translator.tokenizer.encode("Kinder")[-1]] = torch.nan
    with serving(Translator(network.eval(), translator.tokenizer)) as (port, _):
        body = {"prompts": ["zwei Kinder"], "tokens": 9, "stream": True}
        (line,) = httpx.post(f"http://127.0.0.1:{port}/generate", json=body).text.splitlines()
    assert "not finite" in json.loads(line)["error"]["rule"]


def test_a_stream_whose_batch_fails_after_some_pieces_ends_with_an_error(translator, monkeypatch, capsys):
    lm = continuing_model(translator.tokenizer)
    head, calls = lm.network.head, iter(range(99))

    def failing(*arguments, **options):
        if next(calls) > 3:
            raise RuntimeError(str(ROOT))
        return head(*arguments, **options)

    monkeypatch.setattr(lm.network, "head", failing)
    with serving(lm) as (port, _):
        body = {"prompts": ["am Fluss"], "tokens": 40, "stream": True}
        response = httpx.post(f"http://127.0.0.1:{port}/generate", json=body)
    *pieces, last = map(json.loads, response.text.splitlines())
    assert response.status_code == 200 and pieces and all("piece" in piece for piece in pieces)
    assert last["error"]["rule"] == "the server failed" and str(ROOT) not in response.text
    assert str(ROOT) in capsys.readouterr().err


@contextlib.contextmanager
def batching(translator):
    """Yield a batcher that waits long enough to batch jobs that are submitted one after the other."""
    batcher = Batcher(translator, Limits(wait=0.1), Metrics(), contextlib.nullcontext)
    try:
        yield batcher
    finally:
        batcher.close()


def job_of(translator, text):
    return Job(translator.translation_tasks([text], Search()), 1, Search())


def test_the_cost_of_a_job_includes_the_limits_of_an_imported_model_and_its_prefix():
    tokenizer = published_words(longest=300)
    translator = Translator(tfm.build("tiny", layers=1, d_model=16, d_ff=16, heads=2, vocab=tokenizer.size), tokenizer)
    body, prefixed = TranslateBody(texts=["a boat"]), TranslateBody(texts=["a"], prefixes=["red " * 400])
    assert body.job(translator, Limits()).cost == 1 + 3 + 300
    assert prefixed.job(translator, Limits()).cost == 1 + 2 + 401


def test_an_exception_in_the_progress_of_a_client_fails_its_job_only(translator):
    def progress(ids):
        raise RuntimeError("Event loop is closed")

    with batching(translator) as batcher:
        broken, other = job_of(translator, "am Fluss"), job_of(translator, "zwei Kinder")
        broken.progress = progress
        batcher.submit(broken)
        batcher.submit(other)
        assert other.outputs.result(60)[0][0].text == translator.translate(["zwei Kinder"])[0]
        assert "Event loop" in str(broken.outputs.exception(60))


def test_an_exception_that_one_request_causes_fails_that_request_only(translator, monkeypatch):
    run, fault = translator.run, translator.tokenizer.encode("am Fluss")

    def failing(tasks, search, **options):
        if any(task.sources[0][:-1] == fault for task in tasks):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return run(tasks, search, **options)

    monkeypatch.setattr(translator, "run", failing)
    with batching(translator) as batcher:
        jobs = [job_of(translator, text) for text in ("ein Haus", "am Fluss", "zwei Kinder")]
        for job in jobs:
            batcher.submit(job)
        assert "allocate" in str(jobs[1].outputs.exception(60))
        outputs = [jobs[place].outputs.result(60)[0][0].text for place in (0, 2)]
    monkeypatch.undo()
    assert outputs == translator.translate(["ein Haus", "zwei Kinder"])


def test_only_short_requests_run_in_a_pause(translator):
    jobs = [job_of(translator, "am Fluss") for _ in range(4)]
    for job, cost in zip(jobs, (741, 96, 681, 100), strict=True):
        job.cost = cost
    with batching(translator) as batcher:
        batcher.waiting = jobs
        chosen, waiting = batcher._select_batch(125), batcher.waiting
        batcher.waiting, batcher.running = [], []
    assert chosen == [jobs[1], jobs[3]] and waiting == [jobs[0], jobs[2]]


def test_a_short_request_does_not_wait_for_the_largest_one(translator, monkeypatch):
    """The large request runs for seconds when it is alone. It continues after the short one."""
    monkeypatch.setattr("tfm_blocks.serving.batcher.SLICE", 0.05)
    own = continuing_model(translator.tokenizer)
    (expected,) = own.generate(["am Fluss"], 8, Search())[0]
    large = {"prompts": sentences(64, 3), "tokens": 1024, "beam": 16, "patient": True}
    with serving(own) as (port, batcher), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request("/generate", large))
        while not batcher.running:
            time.sleep(0.01)
        (job,) = batcher.running
        for _ in range(3):
            reply = httpx.post(f"http://127.0.0.1:{port}/generate", json={"prompts": ["am Fluss"], "tokens": 8})
            assert reply.json()["outputs"][0][0]["text"] == expected.text
            assert job in batcher.running and not job.outputs.done()
        client.close()


def received(client):
    """Return the bytes until the server closes the connection."""
    client.settimeout(60)
    return b"".join(iter(lambda: client.recv(10_000), b""))


@pytest.mark.grid
@pytest.mark.parametrize("sent", [b"", b"POST /translate HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
@pytest.mark.parametrize("after", ["the connection", "a response"])
def test_a_head_that_does_not_arrive_closes_the_connection(translator, monkeypatch, sent, after):
    monkeypatch.setattr("tfm_blocks.serving.server.HEAD_SECONDS", 0.3)
    with serving(translator) as (port, _), socket.create_connection(("127.0.0.1", port)) as slow:
        if after == "a response":
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"".join(iter(lambda: slow.recv(1), b"}")).startswith(b"HTTP/1.1 200")
        slow.sendall(sent)
        stop = threading.Event()
        drip = threading.Thread(target=send_slowly, args=(slow, stop))
        if sent:
            drip.start()
        reply = received(slow)
        stop.set()
    if sent:
        drip.join()
        assert reply.startswith(b"HTTP/1.1 408") and json.loads(reply.split(b"\r\n\r\n")[1])["error"]["rule"]


def test_a_client_that_is_still_sending_a_large_body_can_read_the_error(translator):
    head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n"
    with serving(translator) as (port, _), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head + b"x" * 2_000_000)
        assert received(client).startswith(b"HTTP/1.1 413")


def send_slowly(client, stop):
    """Send a byte every 50 ms, which must not extend the time limit."""
    with contextlib.suppress(OSError):
        while not stop.wait(0.05):
            client.sendall(b"x")


def test_a_client_that_sends_in_time_is_not_limited_afterwards(translator, monkeypatch):
    monkeypatch.setattr("tfm_blocks.serving.server.HEAD_SECONDS", 1.0)
    with serving(translator, wait=1.5) as (port, _), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request("/translate", {"texts": ["am Fluss"]}))
        client.settimeout(60)
        assert client.recv(10_000).startswith(b"HTTP/1.1 200")


@pytest.mark.grid
def test_a_further_connection_replaces_the_one_that_waited_longest(translator):
    with serving(translator, connections=4) as (port, _), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        for client in clients[:37]:
            with contextlib.suppress(ConnectionResetError):
                assert not received(client)
        clients[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert clients[-1].recv(10_000).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_nothing_is_disconnected(translator, monkeypatch):
    monkeypatch.setattr("tfm_blocks.serving.server.SEND_SECONDS", 1.0)
    with serving(translator) as (port, _), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", port))
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)


@pytest.mark.grid
def test_health_answers_at_the_limit_of_files(translator, tmp_path):
    save(translator, tmp_path / "run")
    command = [sys.executable, "-m", "tfm_blocks", "serve", "run", "--port", "0", "--device", "cpu"]
    with (tmp_path / "log").open("wb") as log, contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, preexec_fn=few_files)
        )
        stack.callback(process.terminate)
        port = int(process.stdout.readline().split(b":")[2])
        for _ in range(600):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).json()["status"] == "ok"
        assert (tmp_path / "log").stat().st_size < 1000


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))


def test_the_page_shows_the_defaults_of_sampling():
    page = (ROOT / "docs" / "serving.md").read_text()
    shown = page.split("optional: `")[1].split("`")[0]
    assert json.loads(shown) == SamplingBody().model_dump()
