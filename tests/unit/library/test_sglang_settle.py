# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Watching a server after it became ready: it lives and answers, or the reason why not is told."""

from __future__ import annotations

import threading
import time

import pytest


@pytest.fixture
def module(load, monkeypatch):
    made = load("library", "sglang_settle")
    monkeypatch.setattr(made, "LAST_WORDS_SECONDS", 1)
    return made


@pytest.fixture
def settle(module, call):
    def _settle(boot, **more):
        return call(module, {"name": "n-gpu0", "slug": "sglang_gpu0", "root": boot.paths.root, **more})

    return _settle


@pytest.fixture
def ready(boot, helpers):
    def _ready(*args, **kwargs):
        started = boot(*args, **kwargs)
        helpers.until(lambda: started.logged("ready to roll"))
        return started

    return _ready


def test_without_seconds_one_generation_is_all(settle, ready):
    answer = settle(ready("e96_nomtp"))
    assert (answer["rc"], answer["changed"], answer["generations"]) == (0, False, 1)


def test_it_is_asked_again_and_again_and_at_the_end(settle, ready):
    answer = settle(ready("e96_nomtp"), seconds=2, every=0.8)
    assert answer["elapsed"] >= 2 and answer["generations"] >= 3


def test_a_server_that_dies_meanwhile_is_told_with_its_answers_so_far(settle, ready):
    started = ready("e96_nomtp")
    threading.Timer(1.5, started.kill).start()
    began = time.monotonic()
    answer = settle(started, seconds=60, every=0.5)
    assert answer["rc"] == 1 and time.monotonic() - began < 20
    assert "n-gpu0 became ready, and died after" in answer["msg"] and answer["generations"] >= 1


def test_a_server_that_answers_badly_is_told(settle, ready):
    answer = settle(ready("e96_nomtp", fault="bad_generate"), seconds=5)
    assert "does not answer (/generate answered 500" in answer["msg"] and answer["generations"] == 0


def test_check_mode_watches_nothing(module, call, ready):
    answer = call(module, {"name": "n-gpu0", "slug": "sglang_gpu0", "root": "/nowhere", "seconds": 60}, check=True)
    assert answer["generations"] == 0
