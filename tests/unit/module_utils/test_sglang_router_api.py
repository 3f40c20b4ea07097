# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The router's list of workers as it was recorded, and what can be wrong with it."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_http import Client
from ansible.module_utils.sglang_router_api import Unanswered, of_server, reach, routable, server_client, workers_of
from helpers.router import FIRST, KEY, SECOND, recorded_router


@pytest.fixture
def router():
    with recorded_router() as made:
        yield made


def listed(router, key=KEY):
    return workers_of(Client("127.0.0.1", router.server_port, key), "router", 5)


def test_workers_of_a_real_router(router):
    workers = listed(router)
    assert sorted(worker["url"] for worker in workers) == [FIRST, SECOND]
    assert [worker["url"] for worker in of_server(workers, "here-cpu1")] == [SECOND]
    assert all(routable(worker) for worker in workers) and of_server(workers, "other") == []


def test_a_worker_that_leaves_is_not_routable(router):
    router.drain(router.workers[0]["id"])
    assert [routable(worker) for worker in listed(router)] == [False, True]


def test_a_worker_without_labels_belongs_to_nobody(router):
    router.workers[0]["labels"] = None
    assert of_server(listed(router), "here-cpu1") == []


def test_a_wrong_key(router):
    with pytest.raises(Unanswered, match="refuses the key") as caught:
        listed(router, "wrong")
    assert caught.value.refused is False


@pytest.mark.parametrize("answer", [{"status": 500, "body": "no"}, {"status": 200, "body": []}, {"status": 200, "body": {}}])
def test_something_else_than_a_router(router, answer):
    router.faults["/workers"] = answer
    with pytest.raises(Unanswered, match="is it SGLang's router"):
        listed(router)


def test_nobody_there(helpers):
    with pytest.raises(Unanswered, match="gives no answer") as caught:
        workers_of(Client("127.0.0.1", helpers.free_port()), "router", 5)
    assert caught.value.refused is True


def test_what_a_server_says(router, helpers):
    assert reach({"url": f"http://127.0.0.1:{helpers.free_port()}"}, 5) == "connection refused"
    url = f"http://127.0.0.1:{router.server_port}"
    assert reach({"url": url, "api_key": KEY}, 5) == "/health answers 404"
    router.faults["/health"] = {"status": 200, "body": ""}
    assert reach({"url": url, "api_key": KEY}, 5) is None


def test_where_a_server_is_asked():
    assert server_client({"url": "http://[fd00::2]:30000"}).base == "http://[fd00::2]:30000"
