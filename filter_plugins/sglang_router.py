# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the router of a fleet is started with, and where it reaches each server."""

from __future__ import annotations

import ipaddress

from ansible.errors import AnsibleFilterError, AnsibleTypeError
from ansible.plugins.loader import filter_loader

NAME = "router"
OWNED_FLAGS = {
    "host": "sglang_router_host",
    "port": "sglang_router_port",
    "prometheus-port": "sglang_router_metrics_port",
    "worker-urls": "the inventory",
    "api-key": "sglang_router_api_key",
}
SECRET_FLAGS = ("control-plane-api-keys", "tenant-api-key")
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def _port(what, value):
    try:
        port = int(value)
    except (TypeError, ValueError):
        port = 0
    if isinstance(value, bool) or not 1 <= port <= 65535:
        raise AnsibleFilterError(f"{what} is {value!r}: expected a number from 1 to 65535")
    return port


def is_loopback(host):
    """Is an address reached from its own machine only?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url(host, port):
    """An HTTP URL, with brackets round an IPv6 address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def worker_url(server, node):
    """Where the router on ``node`` reaches a server."""
    host, port = server["host"], _port(f"{server['name']}: its port", server["port"])
    if server.get("advertise"):
        return url(server["advertise"], port)
    if server["node"] == node:
        return url(EVERY_ADDRESS.get(host, host), port)
    if is_loopback(host):
        raise AnsibleFilterError(
            f"{server['name']} listens on {host} of {server['node']} only, and the router runs on {node}: let it listen where"
            f" {node} reaches it (sglang_host, with sglang_api_key), or name the end of a tunnel with sglang_advertise_host"
        )
    address = server["address"] if host in EVERY_ADDRESS else host
    if is_loopback(address):
        raise AnsibleFilterError(
            f"{server['name']}: ansible_host of {server['node']} is {address}, which {node} can't reach it by:"
            " name its address with sglang_advertise_host"
        )
    return url(address, port)


def router_spec(request):
    """What the router is started with and where it reaches the servers, worked out from the inventory."""
    if not isinstance(request, dict):
        raise AnsibleTypeError(f"sglang_router_spec needs a mapping, got {type(request).__name__}")
    node, nodes, host, root = request["node"], request["nodes"], request["host"], request["root"]
    if node not in nodes:
        raise AnsibleFilterError(f"sglang_router_node is {node!r}: nodes of this inventory are {', '.join(nodes)}")
    port = _port("sglang_router_port", request["port"])
    metrics = _port("sglang_router_metrics_port", request["metrics_port"])
    if port == metrics:
        raise AnsibleFilterError(f"sglang_router_port and sglang_router_metrics_port are both {port}: give each its own")
    for server in request["servers"]:
        for what, taken in (("sglang_router_port", port), ("sglang_router_metrics_port", metrics)):
            if server["node"] == node and int(server["port"]) == taken:
                raise AnsibleFilterError(f"{what} is {taken}, which is the port of {server['name']}: give the router another")
        if request["key"] and server["key"] == "other":
            raise AnsibleFilterError(
                f"{server['name']} has another key than the router, which hands the key of its clients on to the servers:"
                " give both the same (sglang_api_key, sglang_router_api_key)"
            )
    if not is_loopback(host) and not request["key"]:
        raise AnsibleFilterError(
            f"the router would listen on {host} without a key, and anyone could add and remove servers: set"
            " sglang_router_api_key (or sglang_api_key), or let it listen on loopback (sglang_router_host)"
        )
    given = request["args"] or {}
    if not isinstance(given, dict):
        raise AnsibleTypeError(f"sglang_router_args is {type(given).__name__} {given!r}: expected a mapping")
    for name in given:
        if name in OWNED_FLAGS:
            raise AnsibleFilterError(f"sglang_router_args sets {name}, which comes from {OWNED_FLAGS[name]}: take it out")
        if name in SECRET_FLAGS:
            raise AnsibleFilterError(
                f"sglang_router_args sets {name}, a secret that would stand in a command line: use sglang_router_api_key"
            )
    flags = filter_loader.get("sglang_flags").j2_function
    own = {"host": host, "port": port, "prometheus-port": metrics}
    lines = [*flags(own), *flags({**request["defaults"], **given})]
    command = [f"{request['venv']}/bin/python", f"{request['venv']}/launch_router.py"]
    if request["key"]:
        command += ["--secrets", f"{root}/run/{request['slug']}.secrets.yml"]
    return {
        "name": NAME,
        "node": node,
        "url": url(EVERY_ADDRESS.get(host, host), port),
        "host": host,
        "port": port,
        "metrics_port": metrics,
        "script": f"{root}/scripts/start_{request['slug']}.sh",
        "command": command,
        "flags": lines,
        "argv": [*command, *(word for line in lines for word in line)],
        "env": {"SGLANG_FLEET_ROOT": root, "SGLANG_FLEET_SERVER": NAME},
        "workers": [{"name": server["name"], "url": worker_url(server, node)} for server in request["servers"]],
    }


class FilterModule:
    """Registers the filter."""

    def filters(self):
        return {"sglang_router_spec": router_spec}
