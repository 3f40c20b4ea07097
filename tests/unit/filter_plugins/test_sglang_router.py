# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a router is started with, where it reaches servers, and what is refused in one sentence."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError, AnsibleTypeError
from sglang_router import is_loopback, router_spec, worker_url


def server(**more):
    return {"name": "n1-gpu0", "node": "n1", "host": "127.0.0.1", "port": 30000, "address": "203.0.113.7", "advertise": "",
            "key": "none", **more}  # fmt: skip


def request(**more):
    return {
        "node": "n1", "nodes": ["n1", "n2"], "host": "127.0.0.1", "port": 30080, "metrics_port": "30081", "root": "/srv/sglang",
        "slug": "sglang_router", "venv": "/srv/sglang/router", "key": False, "args": {}, "servers": [server()],
        "defaults": {"policy": "cache_aware", "retry-max-retries": 5}, **more,
    }  # fmt: skip


def test_the_command_line():
    spec = router_spec(request())
    assert spec["argv"] == [
        "/srv/sglang/router/bin/python", "/srv/sglang/router/launch_router.py", "--host", "127.0.0.1", "--port", "30080",
        "--prometheus-port", "30081", "--policy", "cache_aware", "--retry-max-retries", "5",
    ]  # fmt: skip
    assert spec["env"] == {"SGLANG_FLEET_ROOT": "/srv/sglang", "SGLANG_FLEET_SERVER": "router"}
    assert (spec["url"], spec["script"]) == ("http://127.0.0.1:30080", "/srv/sglang/scripts/start_sglang_router.sh")
    assert spec["workers"] == [{"name": "n1-gpu0", "url": "http://127.0.0.1:30000"}]


def test_a_key_is_a_file_and_no_word():
    argv = router_spec(request(key=True, host="0.0.0.0", servers=[server(key="same")]))["argv"]
    assert argv[2:4] == ["--secrets", "/srv/sglang/run/sglang_router.secrets.yml"]
    assert not any("api-key" in word for word in argv)


def test_options_of_the_inventory_win_and_may_leave_one_out():
    args = {"policy": "round_robin", "retry-max-retries": None, "log-json": True, "prometheus-duration-buckets": [1, 2]}
    assert router_spec(request(args=args))["flags"][3:] == [
        ["--log-json"], ["--policy", "round_robin"], ["--prometheus-duration-buckets", "1", "2"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("told", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:30000"),
        ({"host": "::"}, "http://[::1]:30000"),
        ({"host": "10.0.0.5"}, "http://10.0.0.5:30000"),
        ({"advertise": "gpu.example"}, "http://gpu.example:30000"),
        ({"node": "n2", "host": "0.0.0.0"}, "http://203.0.113.7:30000"),
        ({"node": "n2", "host": "::", "address": "fd00::2"}, "http://[fd00::2]:30000"),
        ({"node": "n2", "host": "10.0.0.5"}, "http://10.0.0.5:30000"),
        ({"node": "n2", "advertise": "127.0.0.1"}, "http://127.0.0.1:30000"),
    ],
)
def test_where_the_router_reaches_a_server(told, url):
    assert worker_url(server(**told), "n1") == url


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback(host):
    assert is_loopback(host) and not is_loopback("0.0.0.0")


OTHER_NODE = server(name="n2-gpu0", node="n2")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"node": "n3"}, ["sglang_router_node is 'n3'", "n1, n2"]),
        ({"port": "x"}, ["sglang_router_port is 'x'"]),
        ({"port": True}, ["sglang_router_port is True"]),
        ({"metrics_port": 0}, ["sglang_router_metrics_port is 0"]),
        ({"metrics_port": 30080}, ["both 30080"]),
        ({"port": 30000}, ["sglang_router_port is 30000", "n1-gpu0"]),
        ({"metrics_port": 30000}, ["sglang_router_metrics_port is 30000", "n1-gpu0"]),
        ({"host": "0.0.0.0"}, ["0.0.0.0 without a key", "sglang_router_api_key"]),
        ({"key": True, "servers": [server(key="other")]}, ["n1-gpu0 has another key than the router"]),
        ({"args": {"port": 1}}, ["sglang_router_args sets port", "sglang_router_port"]),
        ({"args": {"api-key": "k"}}, ["sglang_router_api_key"]),
        ({"args": {"control-plane-api-keys": ["k"]}}, ["a secret"]),
        ({"args": {"Policy": "x"}}, ["'Policy'"]),
        ({"args": ["policy"]}, ["expected a mapping"]),
        ({"servers": [OTHER_NODE]}, ["n2-gpu0 listens on 127.0.0.1 of n2 only", "router runs on n1", "sglang_advertise_host"]),
        ({"servers": [{**OTHER_NODE, "host": "0.0.0.0", "address": "127.0.0.1"}]}, ["ansible_host of n2 is 127.0.0.1"]),
    ],
)
def test_what_is_refused(told, words):
    with pytest.raises((AnsibleFilterError, AnsibleTypeError)) as refused:
        router_spec(request(**told))
    said = str(refused.value)
    assert all(word in said for word in words) and "\n" not in said


def test_a_port_of_another_nodes_server_is_free_on_the_routers():
    there = server(name="n2-gpu0", node="n2", host="0.0.0.0", port=30080)
    assert router_spec(request(servers=[there]))["workers"] == [{"name": "n2-gpu0", "url": "http://203.0.113.7:30080"}]


def test_something_else_than_a_mapping():
    with pytest.raises(AnsibleTypeError):
        router_spec([])
