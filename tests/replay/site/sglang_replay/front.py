# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoints: recorded answers under the asked names, and a fixed generation. Each says that it is a replay."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import urlsplit

HEALTH_SECONDS = 0.05  # a healthy engine takes a second
WORD = "replay "
OPEN_WITHOUT_KEY = ("/health", "/health_generate", "/metrics", "/ping")
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Front:
    """What a client sees of the server; the replay moves it from opened to ready, stopping or crashed."""

    def __init__(self, recording, args, fault, log):
        self.recording, self.args, self.fault, self.log = recording, args, fault, log
        self.opened = False
        self.ready, self.stopping, self.crashed = threading.Event(), threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.running = 0

    def open(self):
        server = Server((self.args.host, self.args.port), Handler)
        server.front = self
        self.opened = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    # -- answers ------------------------------------------------------------------------------------------------------
    def server_info(self):
        kv_tokens, running = self.recording.capacity()
        info = self.recording.json("server_info.json") or {
            "status": "ready",
            "version": self.recording.meta["engine"],
            "max_total_num_tokens": kv_tokens,
            "internal_states": [{"effective_max_running_requests_per_dp": running}],
        }
        for part in (info, *info["internal_states"]):
            part.update(self.names())
        return info | {"replay": True}

    def names(self):
        return {
            "model_path": self.args.model_path,
            "tokenizer_path": self.args.tokenizer_path or self.args.model_path,
            "served_model_name": self.args.served_model_name,
            "host": self.args.host,
            "port": self.args.port,
        }

    def model_info(self):
        names = self.names()
        return {
            "model_path": names["model_path"],
            "tokenizer_path": names["tokenizer_path"],
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": True,
            "has_audio_understanding": False,
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "replay": True,
        }

    def models(self):
        name = self.args.served_model_name
        model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "replay", "root": name}
        return {"object": "list", "data": [model | {"parent": None, "max_model_len": 262144}]}

    def loads(self):
        kv_tokens, running = self.recording.capacity()
        loads = self.recording.json("loads.json") or {
            "version": self.recording.meta["engine"],
            "loads": [{"dp_rank": 0, "max_total_num_tokens": kv_tokens, "max_running_requests": running}],
        }
        loads["loads"][0].update(num_running_reqs=self.running, num_waiting_reqs=0)
        return loads | {"replay": True}

    def metrics(self):
        text = re.sub('model_name="[^"]*"', f'model_name="{self.args.served_model_name}"', self.recording.text("metrics.txt"))
        return f"# REPLAY of {self.recording.name}, not SGLang\n{text}"

    def generate(self, body):
        params = body.get("sampling_params") or {}
        tokens = int(params.get("max_new_tokens", 16))
        if isinstance(body.get("text"), str) or "input_ids" not in body:
            prompt = len(str(body.get("text", "")).split())
        else:
            prompt = len(body["input_ids"])
        meta = {
            "id": uuid.uuid4().hex,
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": "default",
            "e2e_latency": 0.01,
            "replay": True,
        }
        if self.args.speculative_algorithm:
            meta |= {"spec_accept_rate": 0.0, "spec_accept_length": 1.0, "spec_verify_ct": tokens}
        return {"text": WORD * tokens, "output_ids": [0] * tokens, "meta_info": meta}

    def complete(self, body, chat):
        tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        text = WORD * tokens
        part = {"message": {"role": "assistant", "content": text, "reasoning_content": None}} if chat else {"text": text}
        return {
            "id": uuid.uuid4().hex,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model", self.args.served_model_name),
            "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": "length", "matched_stop": None}],
            "usage": {"prompt_tokens": 4, "completion_tokens": tokens, "total_tokens": 4 + tokens},
            "metadata": {"weight_version": "default", "replay": True},
        }


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self):
        """Bind without HTTPServer's reverse name look-up, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request, client_address):
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def version_string(self):
        return "sglang-replay"

    def do_GET(self):
        front, path = self.server.front, urlsplit(self.path).path
        if not self.admitted(path):
            return
        if path in ("/health", "/health_generate"):
            self.health(front)
        elif path in ("/server_info", "/get_server_info"):
            self.answer(200, front.server_info())
        elif path in ("/model_info", "/get_model_info"):
            self.answer(200, front.model_info())
        elif path == "/v1/models":
            self.answer(200, front.models())
        elif path == "/v1/loads":
            self.answer(200, front.loads())
        elif path == "/metrics" and front.args.enable_metrics:
            self.answer(200, front.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/ping":
            self.answer(200, "")
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        front, path = self.server.front, urlsplit(self.path).path
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.admitted(path):
            return
        if path not in ("/generate", "/v1/completions", "/v1/chat/completions"):
            return self.answer(404, {"detail": "Not Found"})
        try:
            body = json.loads(raw)
        except ValueError as error:
            return self.answer(400, {"error": {"message": f"The body is not JSON: {error}"}})
        if body.get("stream"):
            return self.answer(400, {"error": {"message": "This is a replay: it does not stream."}})
        if front.fault == "bad_generate":
            return self.answer(500, {"error": {"message": "SGLANG_REPLAY_FAULT is bad_generate."}})
        with front.lock:
            front.running += 1
        try:
            time.sleep(float(body.get("replay_seconds", 0.01)))
            if path == "/generate":
                self.answer(200, front.generate(body))
            else:
                self.answer(200, front.complete(body, chat=path == "/v1/chat/completions"))
        finally:
            with front.lock:
                front.running -= 1

    def health(self, front):
        if front.fault == "health_hang":
            threading.Event().wait()
        if front.stopping.is_set():
            front.log("Health check request received during shutdown. Returning 503.")
        if front.stopping.is_set() or not front.ready.is_set():
            return self.answer(503, "")
        time.sleep(HEALTH_SECONDS)
        self.answer(200, "")

    def admitted(self, path):
        """Hold every request of a crashed engine for ever; refuse those without the key."""
        front = self.server.front
        if front.crashed.is_set():
            threading.Event().wait()
        key = front.args.api_key
        if key and path not in OPEN_WITHOUT_KEY and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer(401, {"error": "Unauthorized"})
            return False
        return True

    def answer(self, status, body, content_type="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status, REASONS[status])
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code="-", size="-"):
        host, port = self.client_address[:2]
        line = f'{host}:{port} - "{self.requestline}" {int(code)} {REASONS[int(code)]}'
        self.server.front.log(f"INFO:     {line}")

    def log_message(self, format, *args):
        self.server.front.log("INFO:     " + format % args)
