# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Seconds from each fault's cause to its verdict, and what it leaves behind; renews the table in docs/faults.md.

Faults that can be made on this machine are made on real SGLang for the CPU. The others are played by the replay of a
recorded log, and the table says so. Up to four servers are made to fail at once: what is measured then is a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import ansible.module_utils
import ansible_runner
from common import ROOT, Failed, moment, playbook_env, print_machine, print_table, renew, write_inventory
from helpers.replay import make_replay_venv
from helpers.runner import kill_controller, start_playbook

ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

from ansible.module_utils.sglang_process import command, listeners, members, shared_memory_files, unused  # noqa: E402
from ansible.module_utils.sglang_state import read_state  # noqa: E402

PAGE = ROOT / "docs" / "faults.md"
HEADERS = ["fault", "on", "times", "verdict", "s to the verdict", "s to the deploy's end", "left behind", "measured", "load"]
AT_ONCE = 4
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 400
DISK_MIB = 96

VALIDATE = "Work out what the server is started with"
CHECK = "Look on the node whether the server can be started"
WAIT = "Wait until the server serves"
LOADING = "Load weight begin|Init torch distributed"


def until(condition, what, seconds=PATIENCE_SECONDS):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(POLL_SECONDS)
    raise Failed(f"{what}: not within {seconds} s")


class Server:
    """One server of a fleet, as this machine shows it."""

    def __init__(self, fleet, number):
        self.root, self.model, self.name = fleet.root, fleet.model, f"here-{fleet.kind}{number}"
        self.path = fleet.root / "run" / f"sglang_{fleet.kind}{number}.json"
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]

    @property
    def state(self):
        return read_state(str(self.path))

    def log(self):
        with contextlib.suppress(OSError, KeyError):
            return Path(self.state["log"]).read_text(encoding="utf-8", errors="replace")
        return ""

    def logs(self, pattern):
        return until(lambda: re.search(pattern, self.log()), f"{self.name}: the line {pattern!r}")

    def members(self):
        return members(str(self.root), self.name, (self.state.get("identity") or {}).get("sid"))

    def process(self, title):
        if title == "main":
            return self.state["identity"]["pid"]
        found = (stat for stat in self.members() if f"::{title}" in command(stat.pid).split(" ")[0])
        return next((stat.pid for stat in sorted(found, key=lambda stat: stat.start_ticks)), None)  # and not what it started

    def left(self):
        """What is left of it: processes, its port (strangers aside), temporary files."""
        found = [f"process {command(stat.pid)[:40]}" for stat in self.members()]
        found += ["port" for listener in listeners(self.port) if listener.pid != os.getpid()]
        temporary = self.state.get("temporary")
        return found + ([temporary] if temporary and os.path.exists(temporary) else [])


class Fleet:
    """Some servers with a root of their own, of real SGLang or of the replay."""

    def __init__(self, folder, args, replay, count):
        self.folder, self.kind, self.count = folder, "gpu" if replay else "cpu", count
        self.root, self.inventory = folder / "root", folder / "fleet.yml"
        self.venv, self.device = (args.replay_venv, "cuda") if replay else (args.venv.absolute(), "cpu")
        self.model = folder / "model"
        shutil.copytree(args.model, self.model)
        self.servers = [Server(self, number) for number in range(count)]
        self.options = {
            "sglang_root": str(self.root),
            "sglang_artifacts": str(folder / "artifacts"),
            "sglang_models": {"m": {"path": str(self.model), "served_name": "m"}},
            "benchmark": False,
            "plan": "warn",
        }
        self.before = shared_memory_files()

    def write(self, flags, env):
        servers = [
            {"port": server.port, "args": flags, "env": env, **({"gpus": [number]} if self.kind == "gpu" else {})}
            for number, server in enumerate(self.servers)
        ]
        node = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "servers": servers,
            "model": "m",
            "sglang_engine_device": self.device,
            "sglang_engine_venv": str(self.venv),
        }
        write_inventory(self.inventory, {"here": node})

    def play(self, playbook, **options):
        """Run a playbook to its end, whatever that is: its events, its exit status and the moment when it ended."""
        with tempfile.TemporaryDirectory(prefix="sgf-bench-run-") as private:
            run = ansible_runner.run(
                private_data_dir=private,
                project_dir=str(ROOT),
                playbook=f"{playbook}.yml",
                inventory=str(self.inventory),
                extravars={**self.options, **options},
                envvars=playbook_env(Path(private) / "home"),
                quiet=True,
            )
            return list(run.events), run.rc, time.time()

    def left(self):
        return sorted(unused(shared_memory_files() - self.before))


# -- causes: each is made on one server, and returns the moment of it -----------------------------------------------------
def line(pattern):
    """The engine itself finds it out: the moment when the line is in the log."""

    def make(server, _undo):
        server.logs(pattern)
        return time.time()

    return make


def strike(title, after, number=signal.SIGKILL):
    """A process is killed or halted after a line of the log."""

    def make(server, _undo):
        server.logs(after)
        pid = until(lambda: server.process(title), f"{server.name}: its {title}")
        time.sleep(0.5)
        os.kill(pid, number)
        return time.time()

    return make


def spoil(pattern, how):
    """The model's folder is not what it should be."""

    def make(server, _undo):
        for path in server.model.glob(pattern) if pattern else [server.model]:
            how(path)
        return time.time()

    return make


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def listen(server, undo):
    """A stranger takes the port."""
    stranger = undo.enter_context(socket.socket())
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    stranger.bind(("127.0.0.1", server.port))
    stranger.listen()
    return time.time()


def listen_late(server, undo):
    server.logs(LOADING)
    return listen(server, undo)


def fill_disk(server, _undo):
    server.logs(LOADING)
    with open(server.root / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(64 << 10))
    return time.time()


@dataclass
class Fault:
    what: str
    make: object = None
    flags: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    replay: str = ""  # a recording; empty on real SGLang
    speed: float = 10  # of the replay
    play_fault: str = ""  # a fault that the replay makes
    racy: bool = False
    first: bool = False  # the cause is there before the deploy
    again: bool = False  # it is the second deploy on this node that counts
    limit_s: float = 0  # of a hang: it counts from here
    task: str = WAIT
    disk: bool = False  # a small disk of its own

    def env(self):
        if not self.replay:
            return {}
        return {
            "SGLANG_REPLAY": self.replay, "SGLANG_REPLAY_SPEED": str(self.speed), "SGLANG_REPLAY_FAULT": self.play_fault,
        }  # fmt: skip


LIMITS = {"sglang_stage_limits": {"import": 240, "weights": 6, "KV pool": 6, "warm-up": 6}}
HALT = signal.SIGSTOP
FAULTS = [
    Fault("unknown flag, where this engine was never asked for its flags", flags={"no-such-flag": 1}, task=CHECK),
    Fault("unknown flag", flags={"no-such-flag": 1}, task=CHECK, again=True),
    Fault("bad choice of a flag", flags={"attention-backend": "nosuch"}, task=CHECK, again=True),
    Fault("impossible number", flags={"max-total-tokens": -5}, task=VALIDATE),
    Fault("model path wrong", spoil("", shutil.rmtree), first=True, task=VALIDATE),
    Fault("no config.json", spoil("config.json", Path.unlink), first=True, task=VALIDATE),
    Fault("no weights", spoil("*.safetensors*", Path.unlink), first=True, task=VALIDATE),
    Fault("a shard is missing", spoil("model-00002*", Path.unlink), first=True, task=VALIDATE),
    Fault("a shard is cut short", spoil("model-00001*", cut), first=True, task=VALIDATE),
    Fault("port in use before the start", listen, first=True, task=CHECK),
    Fault("context longer than the model's", line("ValueError: .*User-specified"), {"context-length": 999999}),
    Fault("no memory for the KV cache", line("Loaded weights leave no"), {"mem-fraction-static": 0.0001}),
    Fault("port taken during the start", listen_late, racy=True),
    Fault("main killed while loading", strike("main", LOADING), racy=True),
    Fault("scheduler killed while loading", strike("scheduler", LOADING), racy=True),
    Fault("detokenizer killed while loading", strike("detokenizer", LOADING), racy=True),
    Fault("hang in the warm-up (scheduler halted)", strike("scheduler", "Uvicorn running", HALT), options=LIMITS, limit_s=6),
    Fault("disk full during the start", fill_disk, disk=True),
    Fault("disk full during the start", fill_disk, disk=True, replay="e96_nomtp", speed=3),
    Fault("model path wrong", line("OSError: Repo id"), replay="f_bad_model", speed=4),
    Fault("no memory for the state pool", line("Not enough GPU memory for hybrid"), replay="f_mem_small"),
    Fault("host pool refused", line("Not enough host memory"), replay="f_hicache_200"),
    Fault("scheduler killed, log tells", line("scheduler died during init"), replay="f_kill_sched_loading", speed=4),
    Fault("hang in a stage", line("Load weight begin"), replay="e96_nomtp", options=LIMITS, limit_s=6,
          play_fault="hang:Load weight begin"),
    Fault("ready in the log, not on HTTP", line("ready to roll"), replay="e96_nomtp", play_fault="no_http"),
    Fault("HTTP up, generation broken", line("ready to roll"), replay="e96_nomtp", play_fault="bad_generate"),
    Fault("port taken during the start", listen_late, replay="e96_nomtp", speed=4, racy=True),
    Fault("main killed while loading", strike("main", LOADING), replay="e96_nomtp", speed=4, racy=True),
    Fault("scheduler killed while loading", strike("scheduler", LOADING), replay="e96_nomtp", speed=4, racy=True),
    Fault("detokenizer killed while loading", strike("detokenizer", LOADING), replay="e96_nomtp", speed=4, racy=True),
]  # fmt: skip
ORDER = [(fault.what, "replay" if fault.replay else "SGLang") for fault in FAULTS]


def made_at_once(fault, fleet, undo):
    """Make a fault on all servers of a fleet by one deploy: for each ``(s to verdict, s to the end, verdict, left)``."""
    fleet.write(fault.flags, fault.env())
    if fault.first:
        for server in fleet.servers:
            fault.make(server, undo)
    if fault.again:
        fleet.play("deploy", **fault.options)
    caused, threads = {}, []

    def cause(server):
        until(lambda: server.state.get("identity"), f"{server.name}: the launch")
        caused[server.name] = fault.make(server, undo)

    for server in fleet.servers if fault.make and not fault.first else []:
        threads.append(threading.Thread(target=cause, args=(server,), daemon=True))
        threads[-1].start()
    events, _rc, ended = fleet.play("deploy", **fault.options)
    for thread in threads:
        thread.join(10)
    of_task = [event for event in events if event.get("event_data", {}).get("task") == fault.task]
    asked = {event["event_data"]["host"]: moment(event) for event in of_task if event["event"] == "runner_on_start"}
    failed = {event["event_data"]["host"]: event for event in of_task if event["event"] == "runner_on_failed"}
    found = []
    for server in fleet.servers:
        if server.name not in failed or (threads and server.name not in caused):
            said = [event["event_data"]["res"].get("msg") for event in events if event["event"] == "runner_on_failed"]
            raise Failed(f"{fault.what}: {server.name} has no verdict, or its cause was never made; failed: {said}")
        answer = failed[server.name]["event_data"]["res"]
        since = caused.get(server.name, asked.get(server.name)) + fault.limit_s
        verdict = answer.get("cause_id") or answer.get("cause") or "refused"
        found.append((moment(failed[server.name]) - since, ended - since, verdict, server.left() + fleet.left()))
    return found


@contextlib.contextmanager
def small_disk(root):
    """A small file system below a fleet's root."""
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(root)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def measure(fault, args):
    """A row of the table."""
    wanted, found = args.runs if not fault.racy else args.replayed if fault.replay else args.racy, []
    while len(found) < wanted:
        with tempfile.TemporaryDirectory(prefix="sgf-faults-") as folder, contextlib.ExitStack() as undo:
            fleet = Fleet(Path(folder), args, bool(fault.replay), min(AT_ONCE, wanted - len(found)))
            if fault.disk:
                undo.enter_context(small_disk(fleet.root))
            try:
                found += made_at_once(fault, fleet, undo)
            finally:
                fleet.play("stop", sglang_stop_timeout=1)
    return row(fault.what, "replay" if fault.replay else "SGLang", found)


def killed_while_serving(title, args):
    """A process of a server that serves is killed: a row with the seconds until ``status.yml`` has named it."""
    with tempfile.TemporaryDirectory(prefix="sgf-faults-") as folder:
        fleet = Fleet(Path(folder), args, False, 1)
        (server,), path = fleet.servers, Path(folder) / "status.json"
        fleet.write({}, {})
        try:
            _events, rc, _ended = fleet.play("deploy")
            if rc:
                raise Failed("a server to kill a process of did not start")
            os.kill(server.process(title), signal.SIGKILL)
            caused, told = time.time(), {}
            while told.get("state") not in ("dead", "stuck"):
                _events, _rc, ended = fleet.play("status", status_json=str(path))
                (told,) = json.loads(path.read_text(encoding="utf-8"))["servers"]
                if time.time() - caused > 90:
                    raise Failed(f"{title} killed while serving: status says {told['state']}")
            detail = re.sub(r"\(pid \d+\) ", "", told["detail"].partition(":")[0])
        finally:
            fleet.play("stop", sglang_stop_timeout=1)
        left = server.left() + fleet.left()
    return row(f"{title} killed while serving", "SGLang", [(ended - caused, None, f"{told['state']}: {detail}", left)])


def controller_killed(args):
    """ansible-playbook is killed at moments spread over a deploy, and a deploy after it has to converge: a row."""
    found = []
    for number in range(args.replayed):
        with tempfile.TemporaryDirectory(prefix="sgf-faults-") as folder:
            fleet = Fleet(Path(folder), args, True, 1)
            (server,) = fleet.servers
            fleet.write({}, {"SGLANG_REPLAY": "e96_nomtp", "SGLANG_REPLAY_SPEED": "30"})
            run = start_playbook(ROOT, "deploy.yml", fleet.inventory, fleet.options, Path(folder) / "home")
            time.sleep(1 + 12 * number / args.replayed)
            kill_controller(run)
            caused = time.time()
            _events, rc, ended = fleet.play("deploy")
            mains = [stat for stat in server.members() if "sglang.launch_server" in command(stat.pid)]
            logs = list((fleet.root / "logs").glob("*/*.log"))
            verdict = "converged" if (rc, len(mains), len(logs)) == (0, 1, 1) else f"rc {rc}, {len(mains)} of {len(logs)} run"
            fleet.play("stop", sglang_stop_timeout=5)
            found.append((ended - caused, ended - caused, verdict, server.left() + fleet.left()))
    return row("controller killed at any point, deployed again", "replay", found)


def row(what, engine, found):
    """A row: medians, with least and greatest where there are several."""

    def spread(values):
        if None in values:
            return "-"
        middle = f"{statistics.median(values):.1f}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.1f} to {max(values):.1f})"

    seconds, ends, verdicts, left = zip(*found)
    things = sorted({thing for things in left for thing in things})
    told = [what, engine, str(len(found)), ", ".join(sorted(set(verdicts))), spread(seconds), spread(ends)]
    told += [", ".join(things) or "nothing", f"{datetime.now(timezone.utc):%Y-%m-%d}", f"{os.getloadavg()[0]:.0f}"]
    print(" | ".join(told), flush=True)
    renew(PAGE, HEADERS, [told], ORDER, keys=2)  # at once: the next fault may be one that can't be made here
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".demo" / "engine", help="venv of SGLang for the CPU")
    parser.add_argument("--model", type=Path, default=ROOT / ".demo" / "models" / "tiny", help="folder of the tiny model")
    parser.add_argument(
        "--racy", type=int, default=20, help="how often SGLang gets a fault that depends on the moment; 0: none"
    )
    parser.add_argument("--replayed", type=int, default=20, help="how often the replay gets one; 0: none")
    parser.add_argument("--runs", type=int, default=1, help="how often each other fault is made")
    parser.add_argument("--only", default="", help="a regular expression: only faults whose name matches")
    args = parser.parse_args()
    if not (args.venv / "bin" / "python").exists() or not args.model.exists():
        sys.exit(f"faults: no engine in {args.venv} or no model in {args.model}: run make demo, or name others")
    print_machine()
    with tempfile.TemporaryDirectory(prefix="sgf-faults-") as folder:
        args.replay_venv = make_replay_venv(Path(folder) / "venv")
        wanted = re.compile(args.only)
        chosen = (fault for fault in FAULTS if wanted.search(fault.what) and (args.replayed if fault.replay else args.racy))
        rows = [measure(fault, args) for fault in chosen]
        for title in ("main", "scheduler", "detokenizer") if args.racy else ():
            if wanted.search(f"{title} killed while serving"):
                rows.append(killed_while_serving(title, args))
        if wanted.search("controller killed") and args.replayed:
            rows.append(controller_killed(args))
    print_table(rows, HEADERS)


if __name__ == "__main__":
    main()
