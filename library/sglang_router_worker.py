#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Put servers behind a router, or take them out, by the router's HTTP API."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_router_worker
short_description: Put servers behind the router, or take them out
description:
  - Asks the router (C(smg)) over HTTP. A server is known by its URL and by a label with its name, so that one whose port
    changed is found again.
  - V(present) ends when the router routes to every server, V(absent) when it routes no new request to any. Requests in
    flight are not cut. They end on the server, which is to be drained next.
  - A server that is just leaving is waited for before it is put back. A router forgets a server five seconds after it was
    taken out.
options:
  router:
    description: The router's name in messages.
    type: str
    default: router
  host:
    description: Address that the router listens on.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the router listens on.
    type: int
    required: true
  api_key:
    description: The router's key, when it has one.
    type: str
    default: ""
  workers:
    description: The servers.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {description: Name in the inventory., type: str, required: true}
      url: {description: Where the router reaches it., type: str, required: true}
      api_key: {description: The server's own key., type: str, default: ""}
  state:
    description: Whether the router routes to the servers.
    type: str
    choices: [present, absent]
    default: present
  ready_only:
    description:
      - With V(present), leave out servers whose C(/health) does not answer 200 to this node. They are in RV(skipped).
    type: bool
    default: false
  keep:
    description:
      - With V(absent), what must be left. Nothing is taken out unless the router routes to as many of these servers, and to
        each that is needed, and each of those generates when this node asks it. An entry that is gone already needs nothing.
    type: dict
    default: {}
    suboptions:
      among: {description: Names of the servers that count., type: list, elements: str, default: []}
      least: {description: How many of them., type: int, default: 0}
      needed: {description: Names of those of which each is needed., type: list, elements: str, default: []}
      api_keys: {description: "Keys of the servers by name, to see each generate within a second.", type: dict, default: {}}
  wait:
    description: Wait until the router has done it. Otherwise come back when it has accepted.
    type: bool
    default: true
  timeout:
    description: Seconds to wait.
    type: int
    default: 60
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
  platform: {support: full, platforms: linux}
notes:
  - Run it on the router's node under a Python that has C(requests), such as that of the router's venv.
  - Where nothing listens on O(port), nothing is routed. V(absent) then changes nothing and warns, and fails where O(keep)
    wants servers to be left.
seealso:
  - module: sglang_router
  - module: sglang_router_info
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Put a server behind the router and wait until it is routed to
  sglang_router_worker:
    port: 30080
    workers:
      - {name: node1-gpu0, url: "http://127.0.0.1:30000"}
  vars:
    ansible_python_interpreter: /srv/sglang/router/bin/python

- name: Take it out and wait until no new request is routed to it
  sglang_router_worker:
    port: 30080
    workers:
      - {name: node1-gpu0, url: "http://127.0.0.1:30000"}
    state: absent
  vars:
    ansible_python_interpreter: /srv/sglang/router/bin/python
"""

RETURN = r"""
added:
  description: Names of the servers that were, or in check mode would be, put behind the router.
  returned: success
  type: list
  elements: str
removed:
  description: Names of the servers that were, or in check mode would be, taken out.
  returned: success
  type: list
  elements: str
skipped:
  description: Servers that were left out for O(ready_only), as C(name) and C(detail).
  returned: success
  type: list
  elements: dict
in_flight:
  description: Requests that the router still waits for at the servers that were taken out.
  returned: for absent
  type: int
routable:
  description: URLs that the router routes to after the task.
  returned: success
  type: list
  elements: str
elapsed:
  description: Seconds that it took.
  returned: success
  type: float
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_http import MISSING_REQUESTS, Client, Silent, requests
from ansible.module_utils.sglang_router_api import (
    DRAINING,
    LABEL,
    READY,
    Unanswered,
    of_server,
    reach,
    routable,
    server_client,
    workers_of,
)

POLL_SECONDS = 0.1
ASK_SECONDS = 10
GENERATE_SECONDS = 1
# SGLang's own limit for a generation of /health is 20 s.
HEALTH_SECONDS = 25


class Refused(Exception):
    """Why a server can't be put in or taken out, in one sentence."""


class Asked:
    """What was asked for, and the router that it was asked of."""

    def __init__(self, params):
        self.params = params
        self.router = params["router"]
        self.client = Client(params["host"], params["port"], params["api_key"])
        self.deadline = time.monotonic() + params["timeout"]

    def listed(self):
        """What the router has, a mapping a worker."""
        return workers_of(self.client, self.router, ASK_SECONDS)

    def tell(self, method, path, body=None):
        """Ask the router to change something; what it answered."""
        try:
            return self.client.ask(method, path, ASK_SECONDS, body)
        except Silent as silent:
            raise Refused(f"{self.router} at {self.client.base} was asked to {method} {path}: {silent}") from None

    def see_that_enough_are_left(self, before):
        """Refuse to take anything out when too few would be left, or one that is needed is not there."""
        keep = self.params["keep"]
        entries = {name: next(iter(of_server(before, name)), None) for name in {*keep["among"], *keep["needed"]}}
        with ThreadPoolExecutor(max_workers=max(1, len(entries))) as pool:
            problems = dict(zip(entries, pool.map(self.problem, entries, entries.values())))
        bad = next((name for name in keep["needed"] if problems[name]), None)
        if bad:
            raise Refused(f"{bad} is needed meanwhile, and {problems[bad]}: status.yml tells more")
        left = [name for name in keep["among"] if not problems[name]]
        if len(left) < keep["least"]:
            others = [f"{name}: {problems[name]}" for name in keep["among"] if problems[name]]
            raise Refused(
                f"{self.router} would be left with {len(left)} of {len(keep['among'])} other servers"
                f"{' (' + '; '.join(others[:4]) + ')' if others else ''} and sglang_min_ready is {keep['least']}:"
                " status.yml tells more, router.yml puts back who serves; or lower sglang_min_ready"
            )

    def problem(self, name, entry):
        """Why a server is none of those that serve behind the router, or None."""
        if entry is None or not routable(entry):
            told = "does not have it" if entry is None else f"calls it {entry['status']}"
            return f"{self.router} {told}{', and not healthy' if entry and entry['status'] == READY else ''}"
        worker = {"url": entry["url"], "api_key": self.params["keep"]["api_keys"].get(name)}
        try:
            if server_client(worker).generate(GENERATE_SECONDS) is None:
                return None
        except Silent:
            pass
        # Ours may wait behind others' requests: /health is content with any token, and takes a second.
        problem = reach(worker, HEALTH_SECONDS)
        return f"it does not generate: {problem}" if problem else None

    def late(self):
        return time.monotonic() >= self.deadline

    def remove(self, entry):
        """Take out one entry of the router's list. It being gone already is what was wanted."""
        status, answer = self.tell("DELETE", f"/workers/{entry['id']}")
        if status not in (202, 404):
            raise Refused(f"{self.router} did not take out {entry['url']}: it answered {status}: {_told(answer)}")

    def add(self, worker):
        """Register a server; the id of its registration, None where the router is still busy with an earlier one."""
        # Told what it is, the router asks /health once and not twice, and that takes SGLang a second.
        body = {"url": worker["url"], "runtime_type": "sglang", "labels": {LABEL: worker["name"]}}
        if worker["api_key"]:
            body["api_key"] = worker["api_key"]
        status, answer = self.tell("POST", "/workers", body)
        if status == 202:
            return answer["worker_id"]
        if status == 409:  # it leaves, or an earlier registration is under way
            return None
        raise Refused(f"{self.router} did not take {worker['name']} ({worker['url']}): it answered {status}: {_told(answer)}")

    def bring(self, worker):
        """Put one server behind the router and, unless told not to, wait until it is routed to."""
        registration = None
        while True:
            entry = next((entry for entry in self.listed() if entry["url"] == worker["url"]), None)
            if entry is not None and routable(entry):
                return
            if entry is None and (registration is None or self.tell("GET", f"/workers/{registration}")[0] == 404):
                registration = self.add(worker)
                if registration and not self.params["wait"]:
                    return
            if self.late():
                raise Refused(
                    f"{self.router} does not route to {worker['name']} ({worker['url']}) after {self.params['timeout']} s:"
                    f" {why_not(worker, entry)}"
                )
            time.sleep(POLL_SECONDS)

    def take_out(self, entries):
        """Take entries out and, unless told not to, wait until they get no new requests; requests still in flight."""
        for entry in entries:
            self.remove(entry)
        ids = {entry["id"] for entry in entries}
        while True:
            left = [entry for entry in self.listed() if entry["id"] in ids]
            if not self.params["wait"] or all(entry["status"] == DRAINING for entry in left):
                return sum(entry.get("load") or 0 for entry in left)
            if self.late():
                raise Refused(
                    f"{self.router} still routes to {left[0]['url']} after {self.params['timeout']} s:"
                    f" it is {left[0]['status']}; look at the router's log"
                )
            time.sleep(POLL_SECONDS)


def _told(answer):
    return str(answer.get("error", answer) if isinstance(answer, dict) else answer)[:300]


def why_not(worker, entry):
    """Why a router may not want a server: what the server says to us, or what the router says of it."""
    client = server_client(worker)
    try:
        status = client.status("/v1/models", ASK_SECONDS)
    except Silent as silent:
        return f"from this node it gives no answer either: {silent}"
    if status == 401:
        return "it refuses the key that it was registered with: sglang_api_key is not the one that it was started with"
    health = reach(worker, HEALTH_SECONDS)
    return health or (f"the router calls it {entry['status']}" if entry else "the router's log has the reason")


def ensure_present(module, asked):
    """State present."""
    wanted, skipped = module.params["workers"], []
    if module.params["ready_only"]:
        with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
            problems = list(pool.map(lambda worker: reach(worker, HEALTH_SECONDS), wanted))
        skipped = [{"name": worker["name"], "detail": problem} for worker, problem in zip(wanted, problems) if problem]
        wanted = [worker for worker, problem in zip(wanted, problems) if not problem]
    before = asked.listed()
    there = {entry["url"] for entry in before if entry["status"] != DRAINING}
    moved = [
        entry
        for worker in wanted
        for entry in of_server(before, worker["name"])
        if entry["url"] != worker["url"] and entry["status"] != DRAINING
    ]
    missing = [worker for worker in wanted if worker["url"] not in there]
    result = {
        "changed": bool(missing or moved),
        "added": [worker["name"] for worker in missing],
        "removed": [entry["labels"][LABEL] for entry in moved],
        "skipped": skipped,
    }
    after = sorted((there | {worker["url"] for worker in wanted}) - {entry["url"] for entry in moved})
    if module.check_mode:
        return result, before, after
    if moved:
        asked.take_out(moved)
    with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
        list(pool.map(asked.bring, wanted))
    return result, before, after


def ensure_absent(module, asked):
    """State absent."""
    result = {"changed": False, "added": [], "removed": [], "skipped": [], "in_flight": 0}
    try:
        before = asked.listed()
    except Unanswered as silent:
        keep = module.params["keep"]
        if not silent.refused or keep["least"] or keep["needed"]:
            raise
        module.warn(f"{silent}: nothing is routed, so nothing was taken out")
        return result, [], []
    leaving = [
        (worker["name"], entry)
        for worker in module.params["workers"]
        for entry in before
        if entry["status"] != DRAINING and (entry["url"] == worker["url"] or entry in of_server(before, worker["name"]))
    ]
    entries = [entry for _name, entry in leaving]
    if entries:
        asked.see_that_enough_are_left(before)
    result.update(changed=bool(leaving), removed=list(dict.fromkeys(name for name, _entry in leaving)))
    if entries and not module.check_mode:
        result["in_flight"] = asked.take_out(entries)
    return result, before, sorted(entry["url"] for entry in before if entry not in entries and entry["status"] != DRAINING)


def main():
    module = AnsibleModule(
        argument_spec={
            "router": {"type": "str", "default": "router"},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "workers": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "url": {"type": "str", "required": True},
                    "api_key": {"type": "str", "default": "", "no_log": True},
                },
            },
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "ready_only": {"type": "bool", "default": False},
            "keep": {
                "type": "dict",
                "default": {},
                "options": {
                    "among": {"type": "list", "elements": "str", "default": []},
                    "least": {"type": "int", "default": 0},
                    "needed": {"type": "list", "elements": "str", "default": []},
                    "api_keys": {"type": "dict", "default": {}, "no_log": True},
                },
            },
            "wait": {"type": "bool", "default": True},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    if requests is None:
        module.fail_json(msg=MISSING_REQUESTS.format(python=sys.executable))
    started = time.monotonic()
    asked = Asked(module.params)
    act = ensure_present if module.params["state"] == "present" else ensure_absent
    try:
        result, before, after = act(module, asked)
        now = [] if not before and module.params["state"] == "absent" else asked.listed()
    except (Refused, Unanswered) as problem:
        module.fail_json(msg=str(problem))
    result["routable"] = sorted(entry["url"] for entry in now if routable(entry))
    result["elapsed"] = round(time.monotonic() - started, 1)
    if module._diff:
        was = sorted(entry["url"] for entry in before if entry["status"] != DRAINING)
        header = f"{asked.router}: workers"
        result["diff"] = {
            "before_header": header,
            "after_header": header,
            "before": "".join(f"{url}\n" for url in was),
            "after": "".join(f"{url}\n" for url in after),
        }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
