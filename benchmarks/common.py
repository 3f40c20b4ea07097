# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the measurements share: a quiet machine, a timed command, a playbook's events, a table, a page that keeps one."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import ansible_runner
import tabulate
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

QUIET_LOAD = 1.0
# What a page has around a table that a measurement renews.
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
RESULTS = ("runner_on_ok", "runner_on_failed", "runner_on_skipped", "runner_on_unreachable")


class Failed(Exception):
    """A command of a measurement failed; the text ends with what it printed."""


def wait_for_quiet(seconds=240):
    """Wait until the machine's load of one minute is low, but not for ever; returns the load."""
    deadline = time.monotonic() + seconds
    while os.getloadavg()[0] >= QUIET_LOAD and time.monotonic() < deadline:
        time.sleep(5)
    return os.getloadavg()[0]


def print_machine():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, {memory:.0f} GiB,"
        f" {platform.system()} {platform.release()}, Python {platform.python_version()},"
        f" ansible-core {version('ansible-core')}, load {os.getloadavg()[0]:.2f}"
    )


@dataclass
class Cost:
    wall: float
    cpu: float
    output: str


def timed(argv, env=None):
    """Run a command; seconds of wall clock, and of CPU for it and those of its children that it waited for."""
    before, began = _children_cpu(), time.monotonic()
    done = subprocess.run(
        [str(part) for part in argv],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    cost = Cost(time.monotonic() - began, _children_cpu() - before, done.stdout)
    if done.returncode:
        raise Failed(f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return cost


def _children_cpu():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def playbook_env(home):
    """Environment in which this Python's Ansible runs the project's playbooks."""
    return {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_HOME": str(home),
        "ANSIBLE_NOCOLOR": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    }


def playbook_events(playbook, inventory, options):
    """Run a playbook; its events, each with `created`, the moment when the controller had it."""
    with tempfile.TemporaryDirectory(prefix="sgf-bench-run-") as private:
        run = ansible_runner.run(
            private_data_dir=private,
            project_dir=str(ROOT),
            playbook=f"{playbook}.yml",
            inventory=str(inventory),
            extravars=options,
            envvars=playbook_env(Path(private) / "home"),
            quiet=True,
        )
        if run.rc:
            raise Failed(f"{playbook}.yml ended with {run.rc}:\n{run.stdout.read()[-3000:]}")
        return list(run.events)


def task_results(events):
    """Events that are the result of a task on a host."""
    return [event for event in events if event["event"] in RESULTS]


def moment(event):
    return datetime.fromisoformat(event["created"]).timestamp()


def write_inventory(path, nodes):
    path.write_text(yaml.safe_dump({"plugin": "sglang_fleet", "nodes": nodes}, sort_keys=False), encoding="utf-8")
    return path


def spread(values, digits=2):
    """Median, least and greatest."""
    return [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]


def print_table(rows, headers):
    print()
    print(tabulate.tabulate(rows, headers=headers, disable_numparse=True, stralign="right"))


def renew(page, headers, rows, order, keys=1):
    """Write rows into the table between the marks of a page; rows of others, by their first ``keys`` cells, stay as they are.

    ``order``: the keys of all rows that there can be, in the order of the table. What is not among them comes last.
    """
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, _, tail = rest.partition(END)
    kept = [[cell.strip() for cell in text.strip("|").split(" | ")] for text in table.splitlines() if text.startswith("| ")][2:]
    merged = {tuple(cells[:keys]): cells for cells in kept}
    merged.update((tuple(cells[:keys]), cells) for cells in rows)
    place = {key: number for number, key in enumerate(order)}
    ordered = sorted(merged.values(), key=lambda cells: place.get(tuple(cells[:keys]), len(place)))
    lines = ["| " + " | ".join(cells) + " |" for cells in [headers, ["---"] * len(headers), *ordered]]
    page.write_text("\n".join([head + BEGIN, "", *lines, "", END + tail]), encoding="utf-8")
