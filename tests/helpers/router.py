# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An HTTP server that answers as smg 1.13.0 was recorded to in front of two real servers (tests/data/http/smg-1.13.0.json)."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECORDED = json.loads((Path(__file__).resolve().parents[1] / "data/http/smg-1.13.0.json").read_text(encoding="utf-8"))
FIRST, SECOND = "http://127.0.0.1:41301", "http://127.0.0.1:41302"
KEY = "of-the-router"


class Handler(BaseHTTPRequestHandler):
    """Keeps what the router keeps, a list of workers, and says the rest as it was recorded."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "null")
        router = self.server
        router.asked.append((self.command, self.path, body))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.say(RECORDED["unauthorized"])
        if self.path in router.faults:
            return self.say(router.faults[self.path])
        if self.command == "GET" and self.path == "/workers":
            router.looks += 1
            router.step()
            return self.say({**RECORDED["two"], "body": {**RECORDED["two"]["body"], "workers": router.workers}})
        if self.command == "GET":
            pending = self.path.rpartition("/")[2] in router.pending
            return self.say(RECORDED["pending"] if pending else RECORDED["not_found"])
        if self.command == "DELETE":
            return self.say(RECORDED["removed"] if router.drain(self.path.rpartition("/")[2]) else RECORDED["not_found"])
        if not body["url"].startswith("http"):
            return self.say(RECORDED["bad_request"])
        if any(worker["url"] == body["url"] for worker in router.workers):
            return self.say(RECORDED["exists"])
        if body["url"] in router.pending.values():
            return self.say(RECORDED["in_progress"])
        return self.say({**RECORDED["added"], "body": {**RECORDED["added"]["body"], "worker_id": router.register(body)}})

    do_GET = do_POST = do_DELETE = answer

    def say(self, recorded):
        data = json.dumps(recorded["body"]).encode()
        self.send_response(recorded["status"])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class RecordedRouter(ThreadingHTTPServer):
    """The router. `looks_to_join` and `looks_to_forget` say after how many looks at its list it has done something."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.workers = [dict(worker) for worker in RECORDED["two"]["body"]["workers"]]
        self.pending, self.asked, self.faults, self.due = {}, [], {}, []
        self.looks, self.looks_to_join, self.looks_to_forget, self.number = 0, 2, 3, 0

    def step(self):
        for what in [what for what in self.due if what[0] <= self.looks]:
            self.due.remove(what)
            what[1]()

    def drain(self, known):
        worker = next((worker for worker in self.workers if worker["id"] == known), None)
        if worker is None:
            return False
        worker.update(status="draining", is_healthy=False)
        self.due.append((self.looks + self.looks_to_forget, lambda: self.workers.remove(worker)))
        return True

    def register(self, body):
        self.number += 1
        known = f"new-{self.number}"
        self.pending[known] = body["url"]

        def done():
            del self.pending[known]
            template = RECORDED["one"]["body"]["workers"][0]
            self.workers.append({**template, "id": known, "url": body["url"], "labels": body.get("labels") or {}})

        if self.looks_to_join is not None:
            self.due.append((self.looks + self.looks_to_join, done))
        return known

    def posted(self):
        return [body for method, _path, body in self.asked if method == "POST"]

    def deleted(self):
        return [path.rpartition("/")[2] for method, path, _body in self.asked if method == "DELETE"]


@contextlib.contextmanager
def recorded_router():
    made = RecordedRouter()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()
