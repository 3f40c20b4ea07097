# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real router in front of four stand-ins for servers, which show how evenly it spreads requests.

Each runs 48 requests at a time, each for a fixed time, and queues the rest. As many clients as the four can run send one
request after the other, so a router that spreads evenly keeps every slot busy.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

SLOTS, REQUEST_SECONDS, SERVERS = 48, 2.6, 4
PROMPTS = {
    "unlike each other": lambda client, number: os.urandom(200).hex(),
    "alike": lambda client, number: f"client {client}, question {number}: " + "word " * 40,
    "one system prompt": lambda client, number: "You are a helpful assistant. " * 20 + f"client {client}, question {number}",
}


class Server(ThreadingHTTPServer):
    """A stand-in for one SGLang server."""

    request_queue_size = SERVERS * SLOTS
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.slots, self.guard = threading.Semaphore(SLOTS), threading.Lock()
        self.busy = self.inside = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """The router closes connections when it ends."""

    def enter(self, by):
        with self.guard:
            self.inside += by

    def loads(self):
        entry = {
            "dp_rank": 0, "num_running_reqs": min(self.inside, SLOTS), "num_waiting_reqs": max(0, self.inside - SLOTS),
            "token_usage": min(1.0, self.inside / SLOTS) / 2, "max_running_requests": SLOTS, "gen_throughput": 1000.0,
        }  # fmt: skip
        return {"version": "0.5.23", "loads": [entry]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path.startswith("/v1/loads"):
            self.reply(self.server.loads())
        elif self.path.startswith("/v1/models"):
            self.reply({"object": "list", "data": [{"id": "m", "object": "model"}]})
        else:
            self.reply({"model_path": "m", "served_model_name": "m", "version": "0.5.23", "tp_size": 1, "dp_size": 1})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.enter(1)
        with self.server.slots:
            time.sleep(REQUEST_SECONDS)
        self.server.enter(-1)
        message = {"role": "assistant", "content": "y"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.reply({"id": "x", "object": "chat.completion", "model": "m", "choices": choices, "usage": usage})


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def measure(router, options, prompt, seconds):
    """Share of slots that were busy, sampled each second, and the requests inside each server at the end."""
    servers, port = [Server() for _ in range(SERVERS)], free_port()
    url = f"http://127.0.0.1:{port}"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--disable-tokenizer-autoload"]
    urls = [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(
            [router / "bin" / "python", "-m", "smg.launch_router", *listen, "--worker-urls", *urls, *words],
            stdout=log,
            stderr=log,
        )
        try:
            ready(url, started)
            return drive(url, servers, prompt, seconds)
        finally:
            started.kill()
            started.wait()
            for server in servers:
                server.shutdown()
                server.server_close()


def ready(url, started):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and started.poll() is None:
        try:
            workers = requests.get(f"{url}/workers", timeout=5).json()["workers"]
            if [worker["status"] for worker in workers] == ["ready"] * SERVERS:
                return
        except requests.RequestException:
            pass
        time.sleep(0.3)
    raise AssertionError("the router did not take its four servers within a minute")


def drive(url, servers, prompt, seconds):
    end = time.monotonic() + seconds

    def client(number):
        session, sent = requests.Session(), 0
        while time.monotonic() < end:
            sent += 1
            body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": prompt(number, sent)}]}
            session.post(f"{url}/v1/chat/completions", json=body, timeout=60 + seconds).raise_for_status()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(SERVERS * SLOTS)]
    for one in clients:
        one.start()
    time.sleep(REQUEST_SECONDS)
    shares = []
    while time.monotonic() < end:
        inside = [server.inside for server in servers]
        shares.append(sum(min(each, SLOTS) for each in inside) / (SERVERS * SLOTS))
        time.sleep(1)
    for one in clients:
        one.join()
    return sum(shares) / len(shares), inside
