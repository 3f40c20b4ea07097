#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record, on the node, of a swap of one server: what ran before, what is put there, and how it ended."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_swap
short_description: Record of a swap of one SGLang server, kept on its node
description:
  - Before a swap stops anything, V(begun) keeps what runs (command line, environment, keys, script) in one file that is
    written whole or not at all. Whoever comes after a swap that was cut finds there what to finish or to go back to.
  - A swap without an outcome is open. One that is begun over an open one keeps the open one's C(before), which is the
    last that was proven to serve.
  - A record that is damaged is taken as absent, which is a warning.
  - It starts and stops nothing. M(sglang_server) does, with C(state=restored) from this record.
options:
  name:
    description: The server's name, for messages.
    type: str
    required: true
  slug:
    description: Stem of the server's files on the node.
    type: str
    required: true
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  state:
    description:
      - V(looked) tells and changes nothing.
      - V(begun) opens a swap to O(wanted).
      - V(noted) adds O(note) to the open swap.
      - V(ended) closes it with O(outcome) and adds a line to the server's history.
    type: str
    choices: [looked, begun, noted, ended]
    default: looked
  wanted:
    description: What the server is to run, as options of M(sglang_server) without its O(secrets). Required for V(begun).
    type: dict
    default: {}
  changes:
    description: What O(wanted) changes, a line each for people, as P(sglang_swap_changes#filter) has it. Kept in the history.
    type: list
    elements: str
    default: []
  secrets:
    description: The keys that it is to run with, as for M(sglang_server).
    type: dict
    default: {}
  seen:
    description:
      - The C(run) of the open swap that was seen when this one was prepared, empty for none. Another one there by now was
        begun by someone else meanwhile, and V(begun) is refused.
    type: str
    default: ""
  note:
    description: What to add, for V(noted).
    type: dict
    default: {}
  outcome:
    description:
      - V(swapped), the server was proven with what was wanted. V(reverted), it was proven with what ran before.
      - V(kept), nothing was stopped. V(lost), it serves neither, or V(unrouted), it serves what was wanted and the router does
        not take it; the swap then counts as open.
    type: str
    choices: [swapped, reverted, kept, lost, unrouted]
  why:
    description: Why it was not swapped, in one sentence.
    type: str
    default: ""
  who:
    description: Who asks, such as V(alice@laptop).
    type: str
    default: ansible
  run:
    description: Name of the run that asks.
    type: str
    default: ""
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode:
    support: full
    details: Writes nothing.
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Look what a swap would find
  sglang_swap:
    name: node1-gpu0
    slug: sglang_gpu0
    root: /srv/sglang
  register: found

- name: Close the swap
  sglang_swap:
    name: node1-gpu0
    slug: sglang_gpu0
    root: /srv/sglang
    state: ended
    outcome: swapped
"""

RETURN = r"""
before:
  description:
    - What a failure would go back to, as the state file has it (C(profile), C(argv), C(env), C(launch_sha256), C(script),
      C(script_text), C(host), C(port), C(record), C(previous)). No keys. Null for a server that was never started.
  returned: always
  type: dict
running:
  description: C(profile), C(launch_sha256), C(ready_at) and C(launched_in) of the process that runs, or null.
  returned: always
  type: dict
previous:
  description: What ran before the last change, as RV(before), or null. A rollback goes there.
  returned: always
  type: dict
brought:
  description:
    - The last change, or the open one, as a rollback finds it on other servers, or null without one. C(run) made it. C(what) is
      equal where the same was brought by another run, be it a profile, a release and a model or, where all three stayed, flags
      and environment apart from a server's own. Where C(what) is null it is known by its run alone.
  returned: always
  type: dict
out:
  description: Seconds since the server went out for the open swap, also if that was in a run that was cut. 0 without one.
  returned: always
  type: float
swap:
  description: The open swap, with C(run), C(who), C(begun_at) (of the first run that began it), C(taken_up_at),
    C(from), C(to) and what was noted; null when none is open.
  returned: always
  type: dict
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_process import MARKERS, alive
from ansible.module_utils.sglang_state import (
    BOOT,
    Busy,
    Paths,
    boot_of,
    launch_sha256,
    load_swap,
    lock,
    read_secrets,
    read_state,
    remember,
    shape_error,
    utc_now,
    write_atomic,
    write_state,
)

LOCK_SECONDS = 10
DESCRIBED = ("release", "model")
# What servers of one change differ in.
OWN_FLAGS = ("--host", "--port")
OWN_ENV = (*MARKERS, "CUDA_VISIBLE_DEVICES")


def described(boot):
    """What a person calls a boot by, and a figure of its flags and environment that its mates on other GPUs share."""
    record, env = boot.get("record") or {}, boot.get("env") or {}
    flags = [flag for flag in record.get("flags") or [] if flag[0] not in OWN_FLAGS]
    shared = {name: value for name, value in env.items() if name not in OWN_ENV}
    return {
        "profile": boot.get("profile"),
        "port": boot.get("port"),
        **{key: record.get(key) for key in DESCRIBED},
        "flags_sha256": launch_sha256([json.dumps(flags)], shared, {}),
    }


def brought(run, before, after):
    """A change, from and to as `described`, by what it is found on other servers."""
    what = None
    if any(before.get(key) != after.get(key) for key in ("profile", *DESCRIBED)):
        what = ", ".join(str(after.get(key)) for key in ("profile", *DESCRIBED))
    elif before.get("flags_sha256") != after.get("flags_sha256"):
        what = after.get("flags_sha256")
    return {"run": run, "what": what}


def is_open(swap):
    """Has a swap not come to an end with a server that serves, behind the router where there is one?"""
    return bool(swap) and swap.get("outcome") in (None, "lost", "unrouted")


def taken_at(swap):
    """Since when it is in the hands of the run that has it."""
    return swap.get("taken_up_at") or swap.get("begun_at")


def told(module, paths):
    """What every exit tells."""
    state, (swap, damage) = read_state(paths.state), load_swap(paths.swap)
    if damage:
        module.warn(f"{module.params['name']}: {damage}")
    process = alive(state.get("identity"))
    unfinished = is_open(swap)
    before = swap.get("before") if unfinished else boot_of(state)
    shown = {key: value for key, value in swap.items() if key not in ("before", "schema")} if unfinished else None
    out = time.time() - swap["out_epoch"] if unfinished and swap.get("out_epoch") else 0
    change = None
    if unfinished:
        change = brought(swap["run"], swap["from"], swap["to"])
    elif state.get("previous"):
        change = brought(state.get("launched_in") or "", described(state["previous"]), described(state))
    running = {key: state.get(key) for key in ("profile", "launch_sha256", "ready_at", "launched_in")}
    return {
        "before": {key: value for key, value in before.items() if key != "secrets"} if before else None,
        "running": running if process else None,
        "previous": state.get("previous"),
        "brought": change,
        "swap": shown,
        "out": round(max(out, 0), 1),
    }


def begin(module, paths):
    """Keep what runs, and its script, before anything is stopped."""
    params, state, swap = module.params, read_state(paths.state), load_swap(paths.swap)[0]
    there = swap.get("run", "") if is_open(swap) else ""
    if there != params["seen"]:
        since = f"{swap.get('who')} began one at {taken_at(swap)}" if there else "the one that was seen has ended"
        module.fail_json(
            msg=f"{params['name']}: another swap of this server is under way, {since}: nothing was stopped; look at status.yml"
        )
    before = swap["before"] if is_open(swap) else boot_of(state)
    lacks = shape_error(before or {}, BOOT)
    if lacks:
        module.fail_json(
            msg=f"{params['name']}: what it runs can't be kept (in {paths.state}, {lacks}), so nothing was stopped:"
            " run deploy.yml -e replace=true"
        )
    if not is_open(swap):
        before = {**before, "secrets": read_secrets(paths)}
    wanted = params["wanted"]
    write_atomic(paths.previous_script, before["script_text"], 0o700)
    write_state(
        paths.swap,
        {
            "name": params["name"],
            "run": params["run"],
            "who": params["who"],
            "begun_at": swap["begun_at"] if is_open(swap) else utc_now(),
            "taken_up_at": utc_now() if is_open(swap) else None,
            "out_epoch": out_since(swap, state),
            "from": described(before),
            "to": {
                **described(wanted),
                "launch_sha256": launch_sha256(wanted["argv"], wanted["env"], params["secrets"]),
            },
            "changes": params["changes"],
            "before": before,
            "benchmark": swap.get("benchmark") if is_open(swap) else None,
            "outcome": None,
        },
    )


def out_since(swap, state):
    """When the server went out, in seconds of this node: of a swap that was cut, at its begin, if it stopped anything."""
    if not is_open(swap) or state.get("launched_at") == swap["before"].get("launched_at") and alive(state.get("identity")):
        return time.time()
    return swap.get("out_epoch") or time.time()


def end(module, paths, swap):
    """Write down the outcome, and a line of history."""
    params = module.params
    outcome, why = params["outcome"], params["why"]
    if outcome == "swapped" and swap["before"]["launch_sha256"] == swap["to"]["launch_sha256"]:
        outcome, why = "reverted", why or "a swap that was cut before went back to what ran"
    write_state(paths.swap, {**swap, "outcome": outcome, "why": why, "ended_at": utc_now()})
    remember(
        paths,
        server=params["name"],
        what=outcome,
        who=swap.get("who"),
        run=swap.get("run"),
        begun_at=swap.get("begun_at"),
        before=swap["from"],
        after=swap["to"],
        changes=swap.get("changes"),
        why=why,
    )


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "slug": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["looked", "begun", "noted", "ended"], "default": "looked"},
            "wanted": {"type": "dict", "default": {}},
            "changes": {"type": "list", "elements": "str", "default": []},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "seen": {"type": "str", "default": ""},
            "note": {"type": "dict", "default": {}},
            "outcome": {"type": "str", "choices": ["swapped", "reverted", "kept", "lost", "unrouted"]},
            "why": {"type": "str", "default": ""},
            "who": {"type": "str", "default": "ansible"},
            "run": {"type": "str", "default": ""},
        },
        required_if=[("state", "begun", ("wanted",)), ("state", "ended", ("outcome",))],
        supports_check_mode=True,
    )
    params = module.params
    paths = Paths(params["root"], params["slug"])
    if params["state"] == "looked" or module.check_mode:
        module.exit_json(changed=False, **told(module, paths))
    try:
        os.makedirs(paths.run, mode=0o755, exist_ok=True)
        with lock(paths.lock, params["who"], LOCK_SECONDS):
            swap = load_swap(paths.swap)[0]
            if params["state"] == "begun":
                begin(module, paths)
            elif not is_open(swap) or swap.get("run") != params["run"]:
                module.fail_json(
                    msg=f"{params['name']}: its swap was taken over by {swap.get('who')} at {taken_at(swap)}: look there"
                )
            elif params["state"] == "noted":
                write_state(paths.swap, {**swap, **params["note"]})
            else:
                end(module, paths, swap)
    except Busy as holder:
        module.fail_json(msg=f"{params['name']} is being worked on by {holder}: wait for it, or look at what it does")
    except OSError as error:
        module.fail_json(
            msg=f"{params['name']}: {error.filename or paths.swap}: {error.strerror or error}: free space there, or give this"
            " user the right to write"
        )
    # The record is no part of what runs: what changes there, the tasks that stop and start tell.
    module.exit_json(changed=False, **told(module, paths))


if __name__ == "__main__":
    main()
