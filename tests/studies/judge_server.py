"""A judge to test with: a real server on the loopback interface whose answers a test chooses."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

GOOD = '{"strategy": "Path 1", "m1": true, "m2": true, "m3": true, "m4": true, "m5": false}'


def completion(content: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


@contextmanager
def serving(answer: Any) -> Iterator[SimpleNamespace]:
    """A server whose POSTs are answered by `answer(handler, body)`; `.url`, `.seen` (path, headers, body)."""
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, dict(self.headers), body))
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has gone
                answer(self, body)

        def log_message(self, *parts: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}/v1", seen=seen)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sending(data: bytes, status: int = 200, **headers: str) -> Any:
    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer
