"""A server in a thread, and a client with less overhead than the server."""

import asyncio
import contextlib
import json
import threading
import time

import tfm_blocks as tfm
from tfm_blocks.serving import Limits
from tfm_blocks.serving.batcher import Batcher, Metrics
from tfm_blocks.serving.server import create_server, listen
from tfm_blocks.translation.translator import Translator


def continuing_model(tokenizer):
    """Return the translator of an untrained model without sources."""
    network = tfm.build("decoder_only", layers=1, d_model=32, d_ff=32, heads=2, vocab=tokenizer.size, seed=3)
    return Translator(network.eval(), tokenizer)


@contextlib.contextmanager
def serving(translator, address="127.0.0.1", host="localhost", **limits):
    """Yield the port of a server and its batcher. Leaving the context finishes the requests.

    The server listens on 127.0.0.1, and is named by `address` and `host`.
    """
    batcher = Batcher(translator, Limits(**limits), Metrics(), contextlib.nullcontext)
    with listen("127.0.0.1", 0) as listening:
        server = create_server(batcher, address, host)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1], batcher
        finally:
            server.should_exit = True
            thread.join()
    assert not batcher.thread.is_alive()


class Client:
    """A persistent connection for sequential requests."""

    def __init__(self, port):
        self.port, self.reader, self.writer = port, None, None

    async def post(self, path, body):
        """Return the status and body of the response; `body` is bytes, or is sent as JSON."""
        if self.writer is None or self.writer.is_closing():
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(request(path, body))
        head = await self.reader.readuntil(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        content = await self.reader.readexactly(int(headers[b"content-length"]))
        if headers.get(b"connection") == b"close":
            self.writer.close()
        return int(head.split()[1]), json.loads(content)


def request(path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


async def closed_loop(port, texts, expected, clients, seconds):
    """Return the number of answers to `clients`, each of which compares an answer and sends its next text."""
    answers, end = 0, time.perf_counter() + seconds

    async def use(first):
        nonlocal answers
        client, place = Client(port), first
        while time.perf_counter() < end:
            text = place % len(texts)
            status, reply = await client.post("/translate", {"texts": [texts[text]]})
            assert (status, reply["outputs"][0][0]["text"]) == (200, expected[text]), (texts[text], reply)
            answers, place = answers + 1, place + clients
        client.writer.close()

    await asyncio.gather(*(use(first) for first in range(clients)))
    return answers
