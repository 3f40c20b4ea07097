# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a playbook of the project and look at what each task answered, without reading its printed output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import ansible_runner

OUTCOMES = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_skipped": "skipped",
    "runner_on_unreachable": "unreachable",
}


@dataclass
class Result:
    rc: int
    status: str
    stats: dict
    stdout: str
    tasks: dict = field(default_factory=dict)
    outcomes: dict = field(default_factory=dict)

    def changed(self, host):
        """How many tasks changed that host."""
        return self._count("changed", host)

    def failed(self, host):
        return self._count("failures", host)

    def unreachable(self, host):
        return self._count("dark", host)

    def _count(self, kind, host):
        return (self.stats.get(kind) or {}).get(host, 0)


def run_playbook(root, playbook, inventory, extravars=None, cmdline="", envvars=None, timeout=120):
    """Run a playbook in `root` and return its Result.

    `inventory` is a path or an inventory as a dictionary. The settings are those of root/ansible.cfg unless `envvars`
    names another ANSIBLE_CONFIG. `tasks` maps task name -> host -> the result (of a loop: with all its `results`),
    `outcomes` likewise to ok, failed, skipped or unreachable; of tasks with one name the last that was not skipped stands.
    Past `timeout` seconds the status is `timeout`.
    """
    root = Path(root).resolve()
    with tempfile.TemporaryDirectory(prefix="sgf-run-") as private:
        environ = {
            "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
            "ANSIBLE_HOME": str(Path(private) / "home"),
            "ANSIBLE_NOCOLOR": "1",
            # The ansible-playbook of this Python, not whichever comes first on the machine.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }
        run = ansible_runner.run(
            private_data_dir=private,
            project_dir=str(root),
            playbook=str(playbook),
            inventory=inventory if isinstance(inventory, dict) else str(inventory),
            extravars=extravars or {},
            cmdline=cmdline or None,
            envvars=environ | {name: str(value) for name, value in (envvars or {}).items()},
            timeout=timeout,
            quiet=True,
        )
        result = Result(run.rc, run.status, run.stats or {}, run.stdout.read())
        for event in run.events:
            outcome = OUTCOMES.get(event["event"])
            if outcome:
                data = event["event_data"]
                if outcome == "skipped" and data["host"] in result.tasks.get(data["task"], {}):
                    continue
                result.tasks.setdefault(data["task"], {})[data["host"]] = data.get("res", {})
                result.outcomes.setdefault(data["task"], {})[data["host"]] = outcome
    return result


def start_playbook(root, playbook, inventory, extravars, home, *arguments):
    """Run a playbook as a person does, in the background and with no word of it: what kill_controller ends."""
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), playbook, "-e", json.dumps(extravars)]
    environ = {**os.environ, "ANSIBLE_CONFIG": str(Path(root) / "ansible.cfg"), "ANSIBLE_HOME": str(home)}
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen([*argv, *arguments], cwd=root, env=environ, start_new_session=True, **quiet)


def kill_controller(process):
    """SIGKILL to ansible-playbook and its workers. They lead sessions of their own, so its process group is not all of them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    doomed, size = {process.pid}, 0
    while size != len(doomed):
        size = len(doomed)
        doomed |= {pid for pid, parent in parents.items() if parent in doomed}
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)
