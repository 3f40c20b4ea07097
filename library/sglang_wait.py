#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Follow one start of an SGLang server until it serves, or say why it does not."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_wait
short_description: Wait until an SGLang server truly serves, or say within seconds why not
description:
  - Follows the log of the server's latest boot (and of no other), watches the process by pid, start time and boot id,
    and asks it over HTTP.
  - Ready means that the log says so, that the port belongs to this very process, and that one real generation came back.
  - A wait never outlives its cause. It ends when the log names a failure, when the process or one of SGLang's own child
    processes is gone, when someone else takes the port, when the disk of the log is full or read-only, when no new stage
    began within the limit of the present one, or at O(timeout).
  - Keys that SGLang writes into its log are overwritten there by stars.
  - In a playbook an action plugin of the same name runs it in slices and prints a line when a server's stage changes
    and every O(every) seconds.
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
  host:
    description: Address that the server listens on.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the server listens on.
    type: int
    required: true
  api_key:
    description: Key for the generation. Without one the server's own is taken, from its file on the node.
    type: str
    default: ""
  timeout:
    description: Seconds from the launch after which the wait gives up whatever is logged.
    type: int
    default: 3600
  stage_limits:
    description:
      - Seconds without a new stage after which a start counts as stuck, by stage. Stages that are not named keep theirs.
    type: dict
    default: {}
  every:
    description: Seconds between two lines of progress while the stage stays the same. Read by the action plugin.
    type: int
    default: 30
  slice:
    description: Seconds after which to come back with C(state=starting). 0 waits to the end. Set by the action plugin.
    type: float
    default: 0
  timeline:
    description: Stages seen by an earlier slice. Come back at once when there is a newer one. Set by the action plugin.
    type: list
    elements: dict
    default: []
  boot:
    description: Log of the boot that an earlier slice watched. Another boot is another run's. Set by the action plugin.
    type: str
    default: ""
  children:
    description: SGLang's processes seen by an earlier slice, since one may die between two slices. Set by the action plugin.
    type: list
    elements: dict
    default: []
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode:
    support: full
    details: Comes back at once and says that it would wait.
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
notes:
  - Runs under the engine's own Python, which has C(requests).
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Wait until it serves
  sglang_wait:
    name: node1-gpu0
    slug: sglang_gpu0
    root: /srv/sglang
    port: 30000
    stage_limits: {weights: 900}
  vars:
    ansible_python_interpreter: /opt/sglang/venv/bin/python
"""

RETURN = r"""
state:
  description: V(ready), or V(starting) at the end of a slice. A start that failed fails the task.
  returned: always
  type: str
outcome:
  description: How the wait ended, V(ready), V(failed), V(died), V(stuck), V(timeout) or V(absent).
  returned: when it ended
  type: str
stage:
  description: Stage that the start has reached.
  returned: always
  type: str
timeline:
  description: Stages in order, as C(stage) and C(at_s), seconds after the launch.
  returned: always
  type: list
  elements: dict
children:
  description: SGLang's own processes that were seen, as C(pid), C(start_ticks) and C(title).
  returned: when it waited
  type: list
  elements: dict
stage_seconds:
  description: Seconds spent in each stage, by its name, in order.
  returned: always
  type: dict
elapsed:
  description: Seconds from the launch.
  returned: always
  type: float
figures:
  description:
    - What the engine said of itself in its log, by name (C(weights_gib), C(kv_tokens), C(max_running_requests) …).
      Only what was logged. C(_gib) is on the card, C(_gb) (1e9 bytes) on the host.
  returned: always
  type: dict
cap:
  description: Requests that the running server takes at once, as it says itself.
  returned: when ready
  type: int
cause:
  description: What went wrong, in one sentence.
  returned: when it failed
  type: str
cause_id:
  description:
    - The failure's entry in C(module_utils/sglang_failures.py), or one of V(died), V(child_gone), V(rebooted), V(stopped),
      V(host_out_of_memory), V(port_taken), V(disk_full), V(read_only), V(no_http), V(generation_broken), V(stuck) and
      V(timeout).
  returned: when it failed
  type: str
advice:
  description: What to do about it.
  returned: when it failed
  type: str
reductions:
  description: What the server got less of than was asked for, one sentence each, as its log says.
  returned: always
  type: list
  elements: str
lines:
  description: The lines of the log that matter, up to the one that names the cause, else the last ones.
  returned: when it failed
  type: list
  elements: str
was_ready:
  description: Whether this start had been ready before. Such a server is not one that failed to start.
  returned: when it failed
  type: bool
log:
  description: The log of this boot.
  returned: always
  type: str
launched_at:
  description: When it was launched, in UTC.
  returned: when it was ever started
  type: str
profile:
  description: The profile that it was started with.
  returned: when it was ever started
  type: str
pid:
  description: The server's main process.
  returned: always
  type: int
"""

import contextlib
import os
import sys
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_failures import SPECIFIC_IDS
from ansible.module_utils.sglang_http import MISSING_REQUESTS, Client, Silent, loads, requests, server_info
from ansible.module_utils.sglang_log import (
    READY,
    STAGE_LIMITS,
    STAGE_NAMES,
    aftermath,
    cause_of_death,
    died,
    failure,
    figures,
    matter,
    read_startup,
    read_tail,
    redact,
    reductions,
    stages,
    stamp_seconds,
)
from ansible.module_utils.sglang_process import (
    alive,
    boot_id,
    boot_seconds,
    command,
    describe,
    exit_code,
    halted,
    is_stranger,
    listeners,
    members,
    of_session,
    read_stat,
    shared_memory,
    title_of,
)
from ansible.module_utils.sglang_state import (
    Busy,
    Paths,
    disk_verdict,
    load_state,
    lock,
    read_secrets,
    read_state,
    utc_now,
    write_state,
)

POLL_SECONDS = 0.2
# A log line that says only that some process died is followed by the reason, or by the end, within moments.
AFTERMATH_SECONDS = 1
# So long a server that says ready may answer wrongly before it is believed to be broken.
WRONG_SECONDS = 1
GENERATE_SECONDS = 30
ASK_SECONDS = 5
LOCK_SECONDS = 5
NOTE_EVERY = 2  # looks: a scheduler that fails takes its maps along
DEAD_STATES = "ZX"
# A process that multiprocessing has started and that has no title yet: what it is called, and what it is known by.
NEW, SPAWNED = "of multiprocessing", "multiprocessing.spawn"


class Start:
    """One start, as the log, the process and HTTP show it at this moment."""

    def __init__(self, params):
        self.params = params
        self.paths = Paths(params["root"], params["slug"])
        self.state, self.damage = load_state(self.paths.state)
        self.timeline = [dict(entry) for entry in params["timeline"]]
        self.limits = {**STAGE_LIMITS, **{stage: float(limit) for stage, limit in params["stage_limits"].items()}}
        self.secrets = read_secrets(self.paths)
        self.client = Client(params["host"], params["port"], params["api_key"] or self.secrets.get("api-key"))
        self.secrets = [params["api_key"], *self.secrets.values()]
        self.release = (self.state.get("record") or {}).get("release")
        self.http = "not asked yet"
        self.wrong, self.wrong_since = None, None
        self.lines = []
        self.size = None
        self.log_gone = False
        self.aftermath_since = None
        self.children = {child["pid"]: (child["start_ticks"], child["title"]) for child in params["children"]}
        self.gone, self.gone_since = None, None
        if self.state.get("ready_at") and not self.timeline:
            # It was ready before: what was seen then is better than what its log tells by the second.
            self.timeline = [dict(entry) for entry in self.state.get("timeline") or []]

    def elapsed(self):
        """Seconds since the launch, by a clock that nobody sets."""
        return round(max(0.0, boot_seconds() - self.state["launched_boot_seconds"]), 1)

    def look(self):
        """Read the log where it grew, and note when a stage was first seen."""
        try:
            size = os.stat(self.state["log"]).st_size
            if size == self.size and self.timeline:
                return
            with contextlib.suppress(OSError):  # another user's, or a read-only file system: mode 0600 has to do
                redact(self.state["log"], self.secrets)
            self.lines, self.size = read_startup(self.state["log"]), size
        except FileNotFoundError:  # someone removed it: HTTP has to tell
            self.lines, self.log_gone = [], True
        seen = stages(self.lines)
        first_look = not self.timeline
        for stage, line in seen[len(self.timeline) :]:
            now = self.elapsed()
            at = 0.0 if line is None else now
            if first_look and line is not None:
                # Nobody watched when this came: the log's own time, to the second, is the best there is.
                stamp = stamp_seconds(line)
                if stamp is not None:
                    at = min(max(stamp - self.state["launched_epoch"], self.timeline[-1]["at_s"]), now)
            self.timeline.append({"stage": stage, "at_s": round(at, 1)})

    def watch_children(self):
        """Notice SGLang's own processes, by the titles that they give themselves, and one that has gone."""
        for stat in of_session(self.state["identity"]["sid"]):
            if self.children.get(stat.pid, (None, NEW))[1] != NEW:
                continue
            title = title_of(stat.pid)
            # What a scheduler starts (lscpu, say) has its title until it runs, or for good, and may end.
            if "::" in title and title_of(stat.parent) != title:
                self.children[stat.pid] = (stat.start_ticks, title)
            elif stat.parent == self.state["identity"]["pid"] and SPAWNED in command(stat.pid):
                self.children[stat.pid] = (stat.start_ticks, NEW)
        for pid, (start_ticks, title) in self.children.items():
            stat = read_stat(pid)
            gone = stat is None or stat.start_ticks != start_ticks or stat.state in DEAD_STATES
            # Without a title it may have been meant to end, and SGLang itself looks only once it has loaded.
            if self.gone is None and gone and (title != NEW or exit_code(pid)):
                self.gone, self.gone_since = (pid, title), time.monotonic()

    def taken(self):
        """Who has the port, when it is none of ours."""
        found = listeners(self.params["port"])
        if not found:
            return None
        ours = {stat.pid for stat in members(self.params["root"], self.params["name"], self.state["identity"]["sid"])}
        return next((listener for listener in found if is_stranger(listener, ours)), None)

    def disk(self):
        """A verdict on the disk that the log is on, or None. SGLang says nothing more when it can't write."""
        return disk_verdict(os.path.dirname(self.state["log"]))

    @property
    def stage(self):
        return self.timeline[-1]["stage"]

    def stage_seconds(self):
        """Seconds spent in each stage."""
        spent = {}
        ends = [entry["at_s"] for entry in self.timeline[1:]] + [self.elapsed()]
        for entry, end in zip(self.timeline, ends):
            if entry["stage"] != READY:
                spent[entry["stage"]] = round(spent.get(entry["stage"], 0.0) + max(0.0, end - entry["at_s"]), 1)
        return spent

    def told(self, **more):
        """What every exit tells."""
        return {
            "changed": False,
            "stage": self.stage,
            "timeline": self.timeline,
            "children": [{"pid": pid, "start_ticks": ticks, "title": title} for pid, (ticks, title) in self.children.items()],
            "stage_seconds": self.stage_seconds(),
            "elapsed": self.elapsed(),
            "figures": figures(self.lines),
            "reductions": reductions(self.lines, self.release),
            "log": self.state["log"],
            "pid": self.state["identity"]["pid"],
            "profile": self.state.get("profile"),
            "launched_at": self.state.get("launched_at"),
            **more,
        }

    def serves(self):
        """Does it answer, on a port of its own, with a real generation? Notes what was wrong when not."""
        session = self.state["identity"]["sid"]
        ours = {stat.pid for stat in members(self.params["root"], self.params["name"], session)}
        owners = listeners(self.params["port"])
        wrong = None
        if not owners:
            wrong, self.http = "no_http", f"nothing listens on port {self.params['port']}"
        elif all(is_stranger(owner, ours) for owner in owners):
            wrong, self.http = "port_taken", f"port {self.params['port']} belongs to {describe(owners[0])}"
        else:
            try:
                if self.state.get("ready_at") and (loads(self.client, ASK_SECONDS) or {}).get("running"):
                    self.http = None  # at work: a request of ours would only queue behind the others
                else:
                    self.http = self.client.generate(GENERATE_SECONDS)
                    wrong = "generation_broken" if self.http else None
            except Silent as silent:
                self.http = str(silent)
        if wrong != self.wrong or wrong is None:
            self.wrong, self.wrong_since = wrong, time.monotonic()
        return self.http is None

    def in_force(self):
        """The cap in force and the KV tokens, from the server itself; the argument that it echoes is not the cap."""
        try:
            counters = loads(self.client, ASK_SECONDS) or {}
            if not counters.get("cap"):
                counters = {**counters, **server_info(self.client, ASK_SECONDS)}
        except Silent:
            return None
        return counters.get("cap")

    def note_shared_memory(self):
        """Keep the names of the files that SGLang leaves in /dev/shm: after a crash nobody else knows whose they are."""
        pids = [stat.pid for stat in members(self.params["root"], self.params["name"], self.state["identity"]["sid"])]
        self.note(shared_memory=sorted(set(self.state.get("shared_memory") or []) | shared_memory(pids)))

    def note(self, **told):
        """Add to the state file, unless it is by now of another start. A full disk is no reason to fail."""
        if all(self.state.get(key) == value for key, value in told.items()):
            return
        paths = Paths(self.params["root"], self.params["slug"])
        with contextlib.suppress(Busy, OSError), lock(paths.lock, "sglang_wait", LOCK_SECONDS):
            now = read_state(paths.state)
            if now.get("identity") == self.state["identity"]:
                write_state(paths.state, {**now, **told})
                self.state.update(told)

    def verdict(self):
        """How the wait ends: ``(outcome, data)``, or None to go on."""
        living = alive(self.state["identity"]) is not None
        self.watch_children()
        self.look()
        if not living:
            data = self.death()
            return "failed" if data["id"] in SPECIFIC_IDS and self.stage != READY else "died", data
        if self.stage == READY or self.log_gone:
            if self.serves():
                return READY, {"cap": self.in_force()}
            return self.broken() or self.overdue()
        cause = failure(self.lines, self.release, dead=True if self.gone else None)
        if cause:
            return "failed", cause
        stranger = self.taken()
        if stranger:
            # SGLang would find out at the very end of its start, and then hang.
            cause = f"port {self.params['port']} was taken during the start by {describe(stranger)}"
            return "failed", {"id": "port_taken", "cause": cause, "advice": PORT_TAKEN}
        full = self.disk()
        if full:
            return "failed", full
        if self.gone or any(died(line) for line in self.lines):
            self.aftermath_since = self.aftermath_since or self.gone_since or time.monotonic()
            if time.monotonic() - self.aftermath_since > AFTERMATH_SECONDS:
                return "failed", aftermath(self.lines) or self.child_gone()
        return self.overdue()

    def death(self):
        """Why its main process is gone."""
        self.size = None
        self.look()  # what it wrote between our look and its end
        now = read_state(self.paths.state)
        if now and now.get("log") != self.state["log"]:
            return replaced(now)
        if now.get("stopping_at"):
            stopped = f"it was stopped by {now.get('stopping_by')} at {now['stopping_at']}"
            return {"id": "stopped", "cause": stopped, "advice": "ask them, or deploy again"}
        if self.state["identity"]["boot_id"] != boot_id():
            return {"id": "rebooted", "cause": "the node was restarted since its launch", "advice": "deploy again"}
        try:
            cause = cause_of_death(self.state["log"], self.release)[1]
        except OSError:
            cause = None
        return cause or self.disk() or {**UNTOLD, "cause": "its main process is gone without a word"}

    def tail(self):
        """The end of the log, of a server that was ready."""
        try:
            return read_tail(self.state["log"])
        except OSError:
            return []

    def child_gone(self):
        """A child died, and nobody wrote it down: the kernel's way, and the launcher may wait for ever."""
        pid, title = self.gone
        return {**UNTOLD, "id": "child_gone", "cause": f"its process {title} (pid {pid}) is gone without a word"}

    def broken(self):
        """A verdict on a server that says ready and surely is not, or None to be patient."""
        if any(died(line) for line in self.tail()):
            return "failed", cause_of_death(self.state["log"], self.release)[1]
        if self.gone and time.monotonic() - self.gone_since > AFTERMATH_SECONDS:
            return "failed", self.child_gone()
        lasts = self.wrong and time.monotonic() - self.wrong_since >= WRONG_SECONDS
        # One that was ready may be busy, or be stopped by someone just now.
        if lasts and not self.state.get("ready_at") and self.stage == READY:
            return "failed", {"id": self.wrong, "cause": f"its log says ready, but {self.http}", "advice": WRONG[self.wrong]}
        return None

    def overdue(self):
        """A verdict on a start that takes too long, or None."""
        waited = self.elapsed() - self.timeline[-1]["at_s"]
        limit = self.limits[self.stage]
        if waited > limit:
            if self.stage == READY:
                cause = f"its log says ready since {waited:.0f} s, but {self.http}"
            else:
                cause = f"no new stage since {waited:.0f} s in stage {self.stage} (limit {limit:.0f} s)"
            return "stuck", {"id": "stuck", "cause": cause + halted(self.state["identity"]), "advice": STUCK}
        if self.elapsed() > self.params["timeout"]:
            cause = f"not ready {self.elapsed():.0f} s after its launch (limit {self.params['timeout']} s)"
            return "timeout", {"id": "timeout", "cause": cause + halted(self.state["identity"]), "advice": STUCK}
        return None


WITHOUT_A_WORD = "see dmesg whether the kernel killed it for want of memory, or ask who did: kill -9 leaves nothing in a log"
UNTOLD = {"id": "died", "advice": WITHOUT_A_WORD}
PORT_TAKEN = "end that process, or give the server another port in the inventory"
WRONG = {
    "no_http": "look at the log's last lines, and at who else uses the port",
    "port_taken": PORT_TAKEN,
    "generation_broken": "the answer says what is wrong; 401 is another key than it was started with",
}
STUCK = "look at the log's last lines; a slow disk or a first compilation may need a higher sglang_stage_limits"


def out_of_memory(module, pid):
    """The kernel's record of having killed a process for memory, if it may be read."""
    dmesg = module.get_bin_path("dmesg")
    if not dmesg:
        return None
    rc, out, _err = module.run_command([dmesg])
    if rc != 0:
        return None
    return next((line for line in reversed(out.splitlines()) if f"Killed process {pid} " in line), None)


def replaced(now):
    """Another run started the server anew while this one waited for it."""
    who = f"{now.get('launched_by')} started it anew at {now.get('launched_at')}"
    return {"id": "replaced", "cause": who, "advice": "ask them what it is to run, or deploy again"}


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "slug": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "int", "default": 3600},
            "stage_limits": {"type": "dict", "default": {}},
            "every": {"type": "int", "default": 30},
            "slice": {"type": "float", "default": 0},
            "timeline": {"type": "list", "elements": "dict", "default": []},
            "boot": {"type": "str", "default": ""},
            "children": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    name = params["name"]
    unknown = [stage for stage in params["stage_limits"] if stage not in STAGE_LIMITS]
    if unknown:
        module.fail_json(msg=f"stage_limits names '{unknown[0]}': stages are {', '.join(STAGE_NAMES)}")
    if module.check_mode:
        module.exit_json(
            changed=False,
            state="starting",
            stage="import",
            timeline=[],
            stage_seconds={},
            elapsed=0.0,
            figures={},
            log=None,
            pid=None,
            msg=f"would wait until {name} serves",
        )
    if requests is None:
        module.fail_json(msg=f"{name}: " + MISSING_REQUESTS.format(python=sys.executable))
    try:
        start = Start(params)
    except (TypeError, ValueError) as error:
        module.fail_json(msg=f"{name}: stage_limits is {params['stage_limits']!r}: expected seconds by stage ({error})")
    if start.damage:
        module.fail_json(msg=f"{name}: {start.damage}", outcome="absent")
    if not start.state.get("identity"):
        module.fail_json(msg=f"{name} was never started below {params['root']}: run deploy.yml", outcome="absent")
    entered = time.monotonic()
    start.look()
    known, looks = len(start.timeline), 0
    while True:
        ended = start.verdict() if params["boot"] in ("", start.state["log"]) else ("died", replaced(start.state))
        if ended:
            break
        news = len(start.timeline) > max(known, 1)
        looks += 1
        if looks % NOTE_EVERY == 0:
            start.note_shared_memory()
        if params["slice"] and (news or time.monotonic() - entered >= params["slice"]):
            module.exit_json(**start.told(state="starting", waits_for=start.http if start.stage == READY else None))
        time.sleep(POLL_SECONDS)
    outcome, data = ended
    start.note_shared_memory()
    if outcome == READY:
        start.note(ready_at=start.state.get("ready_at") or utc_now(), timeline=start.timeline)
        module.exit_json(**start.told(state=READY, outcome=READY, cap=data["cap"]))
    suspects = [start.state["identity"]["pid"]] if outcome == "died" else []
    suspects += [start.gone[0]] if start.gone else []
    killed = next(filter(None, (out_of_memory(module, pid) for pid in suspects)), None)
    if killed and data["id"] in KILLED:
        data = {"id": "host_out_of_memory", "cause": f"the kernel killed it: {killed.strip()[-200:]}", "advice": HOST_MEMORY}
    was_ready = bool(start.state.get("ready_at"))
    if was_ready and outcome == "stuck":
        data["advice"] = "it was left running: see whether it is at work or hangs (status.yml), then stop.yml and deploy.yml"
    told = "was ready before and does not answer now" if was_ready else "did not become ready"
    module.fail_json(
        msg=(
            f"{name} {told}: {data['cause']} (stage {start.stage}, {start.elapsed():.0f} s after launch);"
            f" {data['advice']}; log: {start.state['log']}"
        ),
        **start.told(
            state="failed",
            outcome=outcome,
            cause=data["cause"],
            cause_id=data["id"],
            advice=data["advice"],
            lines=matter(start.lines if start.stage != READY else start.tail(), data),
            kernel=killed,
            was_ready=was_ready,
        ),
    )


# Verdicts for which the kernel's word is the better one.
KILLED = ("died", "child_gone", "scheduler_died", "child_died", "scheduler_exception", "child_failed", "exception")
HOST_MEMORY = "the node ran out of memory: lower hicache-size, or run fewer servers on it"

if __name__ == "__main__":
    main()
