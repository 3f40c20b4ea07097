# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients of the router at a steady concurrency, and how many servers behind it are out meanwhile."""

from __future__ import annotations

import collections
import random
import socket
import string
import threading

import requests

POLL_SECONDS = 0.2
REQUEST_SECONDS = 120


class Clients:
    """Clients of one port, each with one request after the other, until the end of the block. No request is tried twice.

    `answers` counts outcomes: 200 is a whole answer, "200 cut" one that lacks tokens, a name an error of the connection.
    `wrong` has the end of what was answered instead of 200. Of `servers`, ports, `most_out` is how many at most took no
    connection at one time.
    """

    def __init__(self, port, key="", tokens=40, stream=False, concurrency=4, servers=()):
        self.url, self.tokens, self.stream = f"http://127.0.0.1:{port}/generate", tokens, stream
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.answers, self.wrong, self.over = collections.Counter(), [], threading.Event()
        self.servers, self.most_out = list(servers), 0
        self.threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(concurrency)]
        if self.servers:
            self.threads.append(threading.Thread(target=self._watch, daemon=True))

    @property
    def failed(self):
        return sum(count for outcome, count in self.answers.items() if outcome != 200)

    def _ask(self, number):
        # Texts with nothing in common: the router spreads them, where it would send like to like.
        letters, session = random.Random(number), requests.Session()
        session.trust_env = False
        while not self.over.is_set():
            text = "".join(letters.choices(string.ascii_lowercase, k=40))
            body = {
                "text": text,
                "stream": self.stream,
                "sampling_params": {"max_new_tokens": self.tokens, "ignore_eos": True},
            }
            try:
                answer = session.post(self.url, json=body, headers=self.headers, timeout=REQUEST_SECONDS)
                told = answer.text if self.stream else str(answer.json().get("meta_info", {}).get("completion_tokens"))
                whole = (
                    f'"completion_tokens":{self.tokens}' in told.replace(" ", "") if self.stream else told == str(self.tokens)
                )
                outcome = answer.status_code if whole else f"{answer.status_code} cut"
                told = told if whole else answer.text
            except requests.exceptions.RequestException as error:
                told, outcome = str(error), type(error).__name__
            self.answers[outcome] += 1
            if outcome != 200:
                self.wrong.append(told[-300:])

    def _watch(self):
        while not self.over.wait(POLL_SECONDS):
            self.most_out = max(self.most_out, sum(not takes_connections(port) for port in self.servers))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join(REQUEST_SECONDS + 30)


def takes_connections(port):
    """Does anyone listen there? SGLang opens its port at the end of a start, and closes it at the end of its drain."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20):
            return True
    except ConnectionRefusedError:
        return False
