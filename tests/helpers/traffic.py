# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients at a steady concurrency, and a look at who serves, all through a roll."""

from __future__ import annotations

import socket
import threading
import time
from urllib.parse import urlsplit

import requests

POLL_SECONDS = 0.2


class Traffic:
    """Requests to several servers, `concurrency` at a time, each to the next server that takes it.

    A server that refuses the connection, or says that it is not ready, is out: the request goes to the next one, as a router
    would send it. What counts as failed is a request that a server took and did not answer, or that no server took for a
    minute.
    """

    def __init__(self, urls, concurrency=4, tokens=16, key=None):
        self.urls, self.tokens = list(urls), tokens
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.over = threading.Event()
        self.answered, self.failed, self.most_out = 0, [], 0
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(concurrency)]
        self.threads.append(threading.Thread(target=self._watch, daemon=True))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *failure):
        self.over.set()
        for thread in self.threads:
            thread.join(60)

    def _client(self, number):
        while not self.over.is_set():
            problem = self._one(number)
            with self.lock:
                if problem is None:
                    self.answered += 1
                else:
                    self.failed.append(problem)
            number += 1

    def _one(self, number):
        body = {"text": f"request {number}", "sampling_params": {"max_new_tokens": self.tokens, "ignore_eos": True}}
        deadline = time.monotonic() + 60
        for attempt in range(10_000):
            url = self.urls[(number + attempt) % len(self.urls)]
            try:
                answer = requests.post(f"{url}/generate", json=body, headers=self.headers, timeout=60)
                if answer.status_code == 200:
                    return None
                if answer.status_code != 503:
                    return f"{url}: {answer.status_code} {answer.text[:200]}"
            except requests.exceptions.ConnectionError as error:
                if "refused" not in str(error):
                    return f"{url}: {error}"
            except requests.exceptions.RequestException as error:
                return f"{url}: {error}"
            if time.monotonic() > deadline:
                return f"no server took a request for a minute: {self.urls}"
            time.sleep(0.05)
        return "too many tries"

    def _watch(self):
        while not self.over.wait(POLL_SECONDS):
            out = sum(not takes_connections(url) for url in self.urls)
            self.most_out = max(self.most_out, out)


def takes_connections(url):
    """Does anyone listen there? SGLang opens its port at the end of a start, and closes it at the end of its drain."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname, address.port), timeout=20):
            return True
    except ConnectionRefusedError:
        return False
