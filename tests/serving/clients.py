"""A server in a thread, and a client that is cheaper than the server that it tries."""

import asyncio
import contextlib
import json
import threading
import time

from tfm_blocks.serving.batcher import Batcher
from tfm_blocks.serving.metrics import Metrics
from tfm_blocks.serving.server import create_server, listen
from tfm_blocks.serving.settings import Limits


@contextlib.contextmanager
def serving(translator, **limits):
    """The port of a server, and its batcher. The end of the context finishes the requests."""
    batcher = Batcher(translator, Limits(**limits), Metrics(), contextlib.nullcontext)
    with listen("127.0.0.1", 0) as listening:
        server = create_server(batcher, "127.0.0.1")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1], batcher
        finally:
            server.should_exit = True
            thread.join()
    assert not batcher.thread.is_alive()


class Client:
    """A connection that is kept, for one request after the other."""

    def __init__(self, port):
        self.port, self.reader, self.writer = port, None, None

    async def post(self, path, body):
        """Status and body of the response; `body` is bytes, or becomes JSON."""
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
    """The number of answers that `clients` get, each sending its next text when it has an answer, which is compared."""
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
