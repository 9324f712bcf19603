"""`tfm serve`: outputs equal the commands', whatever runs concurrently, and no client can stop the server."""

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import published_words, save, sentences
from tests.serving.clients import Client, closed_loop, continuing_model, request, serving
from tfm_blocks.translation.settings import Sampling, Search

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(translator):
    with serving(translator) as (port, batcher):
        yield port, batcher


@pytest.fixture(scope="module")
def continuing(translator):
    """Yield a server of an untrained model without sources, and its translator."""
    own = continuing_model(translator.tokenizer)
    with serving(own, wait=0.02) as (port, batcher):
        yield port, batcher, own


def post(port, path, body):
    return httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)


def texts_of(response):
    assert response.status_code == 200, response.text
    return [[output["text"] for output in nbest] for nbest in response.json()["outputs"]]


@pytest.mark.parametrize(
    ("settings", "search"),
    [
        ({}, Search()),
        ({"beam": 4, "nbest": 3, "alpha": 1.0, "patient": True}, Search(beam=4, nbest=3, alpha=1.0, patient=True)),
        (
            {"max_tokens": 9, "sampling": {"top_k": 5, "seed": 7}},
            Search(max_tokens=9, sampling=Sampling(top_k=5, seed=7)),
        ),
    ],
    ids=["greedy", "n-best", "sample"],
)
def test_translations_are_the_translators(server, translator, settings, search):
    texts = [*sentences(8, 7), "", "am Fluss"]
    outputs = texts_of(post(server[0], "/translate", {"texts": texts, **settings}))
    assert outputs == [[best.text for best in nbest] for nbest in translator.search(texts, search)]


def test_prefixes_begin_the_translations(server, translator):
    body = {"texts": ["am Fluss", "zwei Kinder"], "prefixes": ["Haus", ""]}
    expected = translator.search(body["texts"], Search(), prefixes=body["prefixes"])
    assert texts_of(post(server[0], "/translate", body)) == [[nbest[0].text] for nbest in expected]


def test_continuations_are_the_translators_and_pieces_join_to_them(continuing):
    port, _, own = continuing
    prompts = ["am Fluss", "", "zwei Kinder spielen"]
    search = Search(beam=3, nbest=2)
    outputs = texts_of(post(port, "/generate", {"prompts": prompts, "tokens": 12, "beam": 3, "nbest": 2}))
    assert outputs == [[best.text for best in nbest] for nbest in own.generate(prompts, 12, search)]
    drawn = Search(sampling=Sampling(seed=5))
    expected = own.generate(["am Fluss"], 40, drawn)[0][0].text
    response = post(port, "/generate", {"prompts": ["am Fluss"], "tokens": 40, "stream": True, "sampling": {"seed": 5}})
    *pieces, last = [json.loads(line) for line in response.text.splitlines()]
    assert len(pieces) > 10 and "".join(piece["piece"] for piece in pieces) == expected
    assert last["outputs"][0][0]["text"] == expected


def test_sixty_clients_get_their_own_answers_in_common_batches(server, translator):
    port, batcher = server
    texts = sentences(300, 11)
    before = batches(batcher)
    answers = asyncio.run(closed_loop(port, texts, translator.translate(texts), 60, 0.5))
    count, total = (after - first for after, first in zip(batches(batcher), before, strict=True))
    assert total == answers >= 60
    assert total / count > 5


def batches(batcher):
    """Return the numbers of batches and texts so far."""
    values = {sample.name: sample.value for sample in next(iter(batcher.metrics.batch_texts.collect())).samples}
    return values["tfm_batch_texts_count"], values["tfm_batch_texts_sum"]


@pytest.mark.parametrize(
    ("path", "body", "status", "rule"),
    [
        ("/translate", {"texts": ["Haus"], "beam": 17}, 413, "beam must be at most 16"),
        ("/translate", {"texts": ["Haus"] * 65}, 413, "number of texts must be at most 64"),
        ("/translate", {"texts": ["Haus"], "max_tokens": 2000}, 413, "max_tokens must be at most 1024"),
        ("/translate", {"texts": ["Haus " * 1100]}, 413, "the maximum is 1024"),
        ("/translate", {"texts": ["x" * 100_000]}, 413, "body must have at most 100000 bytes"),
        ("/translate", {"texts": ["Haus"], "nbest": 2}, 422, "nbest must be at most the beam, 1, but is 2"),
        ("/translate", {"texts": [["Haus", "am"]]}, 422, "sentence 1 has 2 texts, but the model reads src"),
        ("/translate", {"texts": ["Haus"], "beem": 2}, 422, "beem Extra inputs"),
        ("/translate", {"texts": []}, 422, "texts List should have at least 1 item"),
        ("/translate", b'{"texts": ["Haus"', 422, "JSON decode error"),
        ("/generate", {"prompts": ["Haus"]}, 422, "translates and cannot continue text"),
        ("/translate", b'{"\\ud800": 1, "texts": ["Haus"]}', 422, "unable to parse raw data as a unicode string"),
        ("/translate", b'{"texts": [{"\\ud800": "Haus"}]}', 422, "sentence 1 has \\ud800, but the model reads src"),
        ("/translate", {"texts": ["Haus"], "beam": 2, "coverage": 1e308}, 422, "coverage must be from 0 to 1000"),
        ("/etc/passwd", {}, 404, "Not Found"),
        ("/translate/", {"texts": ["Haus"]}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_a_wrong_request_is_refused_with_address_and_rule(server, path, body, status, rule):
    code, reply = asyncio.run(Client(server[0]).post(path, body))
    assert code == status
    assert set(reply) == {"error"}
    assert rule in f"{reply['error']['address']} {reply['error']['rule']}"
    assert reply["error"]["help"]


@pytest.mark.parametrize(
    ("path", "body", "status", "rule"),
    [
        ("/generate", {"prompts": ["am", "Haus " * 1100]}, 413, "the maximum is 1024"),
        ("/generate", {"prompts": ["am"], "beam": 2, "coverage": 0.2}, 422, "needs cross-attention"),
        ("/translate", {"texts": ["am"], "beam": 2, "coverage": 0.2}, 422, "needs cross-attention"),
    ],
)
def test_a_request_beyond_a_model_without_sources_is_refused(continuing, path, body, status, rule):
    response = post(continuing[0], path, body)
    assert response.status_code == status and rule in response.json()["error"]["rule"]


def test_json_without_its_header_is_refused_with_the_header(server):
    response = httpx.post(f"http://127.0.0.1:{server[0]}/translate", content='{"texts": ["Haus"]}')
    assert response.status_code == 422
    assert response.json()["error"]["help"] == "send the header Content-Type: application/json"


def test_requests_above_the_limit_get_429_and_the_others_their_answers(translator):
    texts = sentences(12, 3)

    async def all_at_once(port):
        return await asyncio.gather(*(Client(port).post("/translate", {"texts": [text]}) for text in texts))

    with serving(translator, requests=4, wait=2.0) as (port, _):
        replies = asyncio.run(all_at_once(port))
    expected = translator.translate(texts)
    assert sorted(status for status, _ in replies) == [200] * 4 + [429] * 8
    for (status, reply), text in zip(replies, expected, strict=True):
        assert status == 429 or reply["outputs"][0][0]["text"] == text


def test_a_client_that_leaves_cancels_its_request_and_no_other(continuing, monkeypatch):
    _, _, own = continuing
    steps, expected = [], own.generate(["am Haus"], 60, Search(sampling=Sampling()))[0][0].text
    run = own.run

    def counted(tasks, search, *, batch_tokens, watch):
        def count(task, ids):
            steps.append(task.place)
            if len(steps) == 10:
                leaver.close()
                wait_until(lambda: any(job.outputs.cancelled() for job in batcher.running))
            return watch(task, ids)

        return run(tasks, search, batch_tokens=batch_tokens, watch=count)

    monkeypatch.setattr(own, "run", counted)
    with serving(own, wait=1.0) as (port, batcher):  # long enough for both requests to be in one batch
        leaver = socket.create_connection(("127.0.0.1", port))
        leaver.sendall(request("/generate", {"prompts": ["am Fluss"], "tokens": 60, "sampling": {}}))
        stays = post(port, "/generate", {"prompts": ["am Haus"], "tokens": 60, "sampling": {}})
        assert texts_of(stays) == [[expected]]
        assert batcher.metrics.cancelled._value.get() == 1
    assert min(steps.count(place) for place in set(steps)) <= 10 and len(steps) < 100


def wait_until(holds):
    while not holds():
        time.sleep(0.01)


@pytest.mark.grid
def test_a_slow_client_delays_no_other(server, translator):
    data = request("/translate", {"texts": ["am Fluss"]})
    with socket.create_connection(("127.0.0.1", server[0])) as slow:
        slow.sendall(data[:-5])
        assert texts_of(post(server[0], "/translate", {"texts": ["Haus"]})) == [translator.translate(["Haus"])]
        slow.sendall(data[-5:])
        reply = slow.recv(10_000) + slow.recv(10_000) * (not slow.recv(0))
    assert reply.startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_arrive_gets_408(server, monkeypatch):
    monkeypatch.setattr("tfm_blocks.serving.server.BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", server[0])) as slow:
        slow.sendall(request("/translate", {"texts": ["am Fluss"]})[:-5])
        assert slow.recv(10_000).startswith(b"HTTP/1.1 408")


def test_health_and_metrics_describe_the_server(server):
    url = f"http://127.0.0.1:{server[0]}"
    assert texts_of(post(server[0], "/translate", {"texts": ["Haus"]}))
    assert httpx.get(f"{url}/health").json()["sources"] == ["src"]
    text = httpx.get(f"{url}/metrics").text
    assert re.search(r'^tfm_requests_total\{path="/translate",status="200"\} [1-9]', text, re.MULTILINE)
    assert re.search(r"^tfm_requests_running 0\.0$", text, re.MULTILINE)


def test_a_foreign_name_of_this_machine_is_refused(server):
    response = httpx.get(f"http://127.0.0.1:{server[0]}/health", headers={"Host": "foreign.example"})
    assert response.status_code == 400 and "must be one of 127.0.0.1" in response.json()["error"]["rule"]


def test_a_loopback_address_and_the_name_of_host_are_accepted():
    with serving(continuing_model(published_words()), address="127.0.1.1", host="My-Host") as (port, _):
        names = ("127.0.1.1:8000", "my-host", "localhost", "foreign.example")
        responses = [httpx.get(f"http://127.0.0.1:{port}/health", headers={"Host": name}) for name in names]
    assert [response.status_code for response in responses] == [200, 200, 200, 400]


def test_a_failed_batch_gets_500_without_a_traceback_and_the_next_one_runs(translator, monkeypatch):
    with serving(translator) as (port, _):
        with monkeypatch.context() as broken:
            broken.setattr(translator.network, "head", lambda x: (_ for _ in ()).throw(RuntimeError(str(ROOT))))
            response = post(port, "/translate", {"texts": ["Haus"]})
        assert response.status_code == 500 and response.json()["error"]["rule"] == "the server failed"
        assert texts_of(post(port, "/translate", {"texts": ["Haus"]})) == [translator.translate(["Haus"])]


VALUES = [None, True, -1, 0, 2**70, 10**400, 1e308, float("nan"), "", "a", "\ud800", "\x00", [], [[]], {}, {"": 0}, [None], ["a", "b"], [["a"]]]  # fmt: skip
KEYS = ["texts", "prompts", "prefixes", "beam", "nbest", "alpha", "penalty", "patient", "coverage", "sampling", "max_tokens", "tokens", "stream", "temperature", "top_k", "top_p", "seed", "x", "\ud800"]  # fmt: skip


def malformed(draw):
    """Return a path and a request body: JSON with wrong values, truncated or changed JSON, nested lists, or noise."""
    path = draw.choice(["/translate", "/translate", "/generate", "/health", "/metrics", "/", "/%00"])
    body = {draw.choice(KEYS): draw.choice(VALUES) for _ in range(draw.randrange(5))}
    if draw.random() < 0.5:
        body = {"texts": ["am Fluss"], "prompts": ["Haus"]} | body
        del body["prompts" if path == "/translate" else "texts"]
    if draw.random() < 0.3:
        body["sampling"] = {draw.choice(KEYS[-5:]): draw.choice(VALUES) for _ in range(2)}
    data = json.dumps(body).encode()
    kind = draw.randrange(6)
    if kind == 0:
        data = data[: draw.randrange(len(data))]
    elif kind == 1:
        place = draw.randrange(len(data))
        data = data[:place] + draw.randbytes(3) + data[place + 1 :]
    elif kind == 2:
        data = draw.choice([b"[" * 50_000, b'{"texts":' * 9_000, b"9" * 9_000, b'"\xff"', draw.randbytes(50)])
    return path, data


async def send_malformed(port, count, seed):
    """Return the statuses of malformed requests, sent by eight clients."""
    draws = random.Random(seed)
    statuses = []

    async def use(draw):
        client = Client(port)
        for _ in range(count // 8):
            path, data = malformed(draw)
            status, reply = await client.post(path, data)
            assert status < 500, (path, data, reply)
            statuses.append(status)

    await asyncio.gather(*(use(random.Random(draws.random())) for _ in range(8)))
    return statuses


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_get_no_500_and_leave_the_server_whole(server, translator, count):
    statuses = asyncio.run(send_malformed(server[0], count, seed=1))
    assert len(statuses) == count and sum(400 <= status < 500 for status in statuses) > count / 2
    assert texts_of(post(server[0], "/translate", {"texts": ["Haus"]})) == [translator.translate(["Haus"])]


@pytest.mark.parametrize(
    "noise", [b"\x00" * 500, b"GET\r\n\r\n", b"POST /translate HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
)
def test_bytes_that_are_not_http_get_400(server, noise):
    with socket.create_connection(("127.0.0.1", server[0])) as client:
        client.sendall(noise + b"\r\n\r\n")
        reply = b"".join(iter(lambda: client.recv(10_000), b""))
    head, body = reply.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["rule"]


@pytest.mark.slow
def test_two_hundred_clients_have_three_times_the_throughput_of_one(translator):
    """The first server does not wait for further requests, which would only slow its single client down."""
    texts = sentences(2000, 13)
    expected = translator.translate(texts)
    with serving(translator, wait=0) as (port, _):
        alone = asyncio.run(closed_loop(port, texts, expected, 1, 20)) / 20
    with serving(translator) as (port, _):
        together = asyncio.run(closed_loop(port, texts, expected, 200, 60)) / 60
    print(f"{alone:.0f} requests/s by one client, {together:.0f} by 200")
    assert together > 3 * alone


@pytest.mark.grid
def test_an_address_in_use_is_one_error_with_status_2(translator, tmp_path):
    save(translator, tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        command = [sys.executable, "-m", "tfm_blocks", "serve", tmp_path / "run", "--port", port, "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and f"127.0.0.1, port {port}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.grid
def test_sigterm_finishes_what_runs_and_no_new_request_is_accepted(translator, tmp_path):
    save(translator, tmp_path / "run")
    command = [sys.executable, "-m", "tfm_blocks", "serve", "run", "--port", "0", "--wait", "1000", "--device", "cpu"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        port = int(re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[1])
        url = f"http://127.0.0.1:{port}/health"
        assert httpx.get(url, timeout=60).json()["status"] == "ok"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request("/translate", {"texts": ["am Fluss"]}))
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            reply = b"".join(iter(lambda: client.recv(10_000), b""))
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        assert process.wait() == -signal.SIGTERM
    assert json.loads(reply.split(b"\r\n\r\n")[1])["outputs"][0][0]["text"] == translator.translate(["am Fluss"])[0]
