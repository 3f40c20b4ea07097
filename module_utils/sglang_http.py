# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang's HTTP API, as far as the fleet asks it. Needs ``requests``, which SGLang itself brings into its venv."""

from __future__ import annotations

import re

try:
    import requests
except ImportError:
    requests = None

MISSING_REQUESTS = (
    "Python {python} has no module requests, which the engine's own Python has:"
    " run this with ansible_python_interpreter set to the engine's python, or install requests there"
)
# A sample of Prometheus' text format, and one label of it.
SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PROMPT = "The quick brown fox"
PROMPT_TOKENS = 4


class Silent(Exception):
    """No answer: refused, reset or too late; the text says which."""


class Client:
    """Asks one server. Each call has its own time limit: some of SGLang's endpoints hang when a process behind is dead."""

    def __init__(self, host, port, api_key=None):
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.base = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy of the environment has no business between us and loopback
        if api_key:
            self.session.headers["Authorization"] = f"Bearer {api_key}"

    def _ask(self, method, path, timeout, **more):
        try:
            return self.session.request(method, self.base + path, timeout=timeout, **more)
        except requests.exceptions.Timeout:
            raise Silent(f"no answer from {path} within {timeout} s") from None
        except requests.exceptions.ConnectionError as error:
            refused = "refused" in str(error).lower()
            raise Silent("connection refused" if refused else f"connection to {path} was cut") from None
        except requests.exceptions.RequestException as error:
            raise Silent(f"{path}: {error}") from None

    def status(self, path, timeout):
        """The HTTP status of a path."""
        return self._ask("GET", path, timeout).status_code

    def json(self, path, timeout):
        """The JSON of a path, or None when it answers with another status than 200 or with something else."""
        answer = self._ask("GET", path, timeout)
        if answer.status_code != 200:
            return None
        try:
            body = answer.json()
        except ValueError:
            return None
        return body if isinstance(body, dict) else None

    def ask(self, method, path, timeout, body=None):
        """``(status, answer)`` of any request: the answer as JSON, or as text where it is none."""
        answer = self._ask(method, path, timeout, json=body)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, answer.text

    def text(self, path, timeout):
        """The text of a path, or None when it answers with another status than 200."""
        answer = self._ask("GET", path, timeout)
        return answer.text if answer.status_code == 200 else None

    def generate(self, timeout):
        """One real generation; None when it came, else what was wrong. Some faults show only here."""
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": PROMPT_TOKENS, "temperature": 0, "ignore_eos": True}}
        answer = self._ask("POST", "/generate", timeout, json=body)
        if answer.status_code != 200:
            return f"/generate answered {answer.status_code}: {answer.text[:300]}"
        try:
            text = answer.json()["text"]
        except (ValueError, KeyError, TypeError):
            return f"/generate answered 200 without a text: {answer.text[:300]}"
        return None if isinstance(text, str) else f"/generate answered with {type(text).__name__} for a text"


def metric(text, name, **labels):
    """The sum of a metric's samples in the text of /metrics that have these labels; None where there is none."""
    values = []
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found and found["name"] == name and labels.items() <= dict(LABEL.findall(found["labels"] or "")).items():
            values.append(float(found["value"]))
    return sum(values) if values else None


def loads(client, timeout):
    """The server's counters under one set of names, whatever the release calls them; None where it has no such endpoint."""
    body = client.json("/v1/loads?include=all", timeout)
    entries = (body or {}).get("loads") or []
    if not entries:
        return None

    def total(name):
        return sum(entry.get(name) or 0 for entry in entries)

    speculative = next((entry["speculative"] for entry in entries if entry.get("speculative")), {})
    return {
        "release": body.get("version"),
        "running": total("num_running_reqs"),
        "waiting": total("num_waiting_reqs"),
        "token_usage": max(entry.get("token_usage") or 0.0 for entry in entries),
        "output_tok_s": round(total("gen_throughput"), 1),
        "cap": total("max_running_requests") or None,
        "kv_tokens": total("max_total_num_tokens") or None,
        "accept_length": speculative.get("accept_length"),
    }


def server_info(client, timeout):
    """What /server_info (older: /get_server_info) adds: the cap in force and the acceptance length since the start."""
    body = client.json("/server_info", timeout) or client.json("/get_server_info", timeout)
    if not body:
        return {}
    state = (body.get("internal_states") or [{}])[0]
    return {
        "release": body.get("version"),
        "model_path": body.get("model_path"),
        "served_model_name": body.get("served_model_name"),
        "cap": state.get("effective_max_running_requests_per_dp"),
        "kv_tokens": body.get("max_total_num_tokens"),
        "accept_length": state.get("avg_spec_accept_length"),
    }
