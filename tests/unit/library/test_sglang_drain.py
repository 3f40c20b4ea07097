# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting for a server to have no request left, against a real process with real answers."""

from __future__ import annotations

import threading

import pytest
import requests


@pytest.fixture
def module(load, monkeypatch):
    made = load("library", "sglang_drain")
    monkeypatch.setattr(made, "SILENT_SECONDS", 1)
    return made


@pytest.fixture
def drain(module, call):
    def _drain(boot, **more):
        return call(module, {"name": "n-gpu0", "slug": "sglang_gpu0", "root": boot.paths.root, **more})

    return _drain


def ask(started, seconds):
    """A request in flight for so long."""
    body = {"text": "a", "replay_seconds": seconds}
    url = f"http://127.0.0.1:{started.port}/generate"
    thread = threading.Thread(target=lambda: requests.post(url, json=body, timeout=60))
    thread.start()
    return thread


def running(started):
    answer = requests.get(f"http://127.0.0.1:{started.port}/v1/loads", timeout=10).json()
    return answer["loads"][0]["num_running_reqs"]


@pytest.fixture
def ready(boot, helpers):
    started = boot("e96_nomtp")
    helpers.until(lambda: started.logged("ready to roll"))
    return started


def test_an_idle_server_is_drained_at_once(drain, ready):
    answer = drain(ready)
    assert (answer["drained"], answer["left"], answer["detail"], answer["changed"]) == (True, 0, "", False)
    assert answer["elapsed"] < 5


def test_a_busy_server_is_waited_for(drain, ready, helpers):
    thread = ask(ready, 2)
    helpers.until(lambda: running(ready))
    answer = drain(ready, timeout=30)
    assert answer["drained"] and answer["elapsed"] > 0.5 and not thread.join(10)


def test_a_wait_is_bounded_and_tells_what_is_left(drain, ready, helpers):
    thread = ask(ready, 6)
    helpers.until(lambda: running(ready))
    answer = drain(ready, timeout=1)
    assert (answer["drained"], answer["left"]) == (False, 1)
    assert answer["detail"] == "1 requests left after 1 s: they get the time that a stop gives them"
    thread.join(20)


def test_a_server_that_is_gone_or_answers_nothing_does_not_hold_up(drain, ready, boot, helpers):
    ready.kill()
    assert drain(ready)["drained"] is True
    deaf = boot("e96_nomtp", fault="no_http", name="n-gpu0")
    answer = drain(deaf, timeout=20)
    assert answer["drained"] is False and "does not answer" in answer["detail"] and answer["elapsed"] < 15


def test_check_mode_does_not_wait(module, call, ready):
    answer = call(module, {"name": "n-gpu0", "slug": "sglang_gpu0", "root": ready.paths.root}, check=True)
    assert (answer["drained"], answer["elapsed"]) == (True, 0.0)
