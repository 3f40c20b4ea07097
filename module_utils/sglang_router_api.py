# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The router's HTTP API, as far as the fleet asks it, and what a server says to the router's node."""

from __future__ import annotations

from urllib.parse import urlsplit

from ansible.module_utils.sglang_http import Client, Silent

# A label that every worker carries which the fleet has registered; its value is the server's name.
LABEL = "sglang_fleet_server"
DRAINING = "draining"
READY = "ready"


class Unanswered(Exception):
    """The router did not tell its workers, in one sentence. ``refused``: nothing listens there."""

    def __init__(self, sentence, refused=False):
        super().__init__(sentence)
        self.refused = refused


def workers_of(client, router, timeout):
    """The router's workers, a mapping each: ``id``, ``url``, ``status``, ``is_healthy``, ``load``, ``labels`` and more."""
    where = f"{router} at {client.base}"
    try:
        status, answer = client.ask("GET", "/workers", timeout)
    except Silent as silent:
        raise Unanswered(
            f"{where} gives no answer ({silent}): `ansible-playbook router.yml` starts it, status.yml tells its state",
            refused=str(silent) == "connection refused",
        ) from None
    if status == 401:
        raise Unanswered(
            f"{where} refuses the key: it was started with another sglang_router_api_key;"
            " router.yml -e replace=true restarts it"
        )
    if status != 200 or not isinstance(answer, dict) or not isinstance(answer.get("workers"), list):
        raise Unanswered(f"{where} answered GET /workers with {status}: {str(answer)[:200]}: is it SGLang's router?")
    return [{**entry, "labels": entry.get("labels") or {}} for entry in answer["workers"]]


def of_server(workers, name):
    """Those that the fleet has registered for a server."""
    return [entry for entry in workers if entry["labels"].get(LABEL) == name]


def routable(entry):
    """Does the router send new requests there?"""
    return entry["status"] == READY and bool(entry.get("is_healthy"))


def server_client(worker):
    """A client for a server by its ``url`` and, where it has one, its ``api_key``."""
    parts = urlsplit(worker["url"])
    return Client(parts.hostname, parts.port, worker.get("api_key"))


def reach(worker, timeout):
    """None when a server answers this node that it is healthy, else what it says instead."""
    try:
        status = server_client(worker).status("/health", timeout)
    except Silent as silent:
        return str(silent)
    return None if status == 200 else f"/health answers {status}"
