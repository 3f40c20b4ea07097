# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What unit tests share: module calls without a connection, children that are surely ended, the project's own data."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible.plugins.loader import filter_loader, init_plugin_loader

ROOT = Path(__file__).resolve().parents[2]

init_plugin_loader()
filter_loader.add_directory(str(ROOT / "filter_plugins"))


@pytest.fixture(scope="session")
def root():
    """The project's folder."""
    return ROOT


@pytest.fixture(scope="session")
def fleet_data():
    """What group_vars/all holds, untemplated: profiles, releases, devices, models."""
    data = {}
    for name in ("profiles", "releases", "devices", "models"):
        data.update(yaml.safe_load((ROOT / "group_vars" / "all" / f"{name}.yml").read_text(encoding="utf-8")))
    return data


@pytest.fixture
def call(capsys):
    """Run a module's main() with arguments; what it answers, with `rc` its exit status."""

    def _call(module, args, check=False, diff=False):
        capsys.readouterr()
        internals = {"_ansible_check_mode": check, "_ansible_diff": diff}
        with patch_module_args({**args, **internals}), pytest.raises(SystemExit) as left:
            module.main()
        return {**json.loads(capsys.readouterr().out), "rc": left.value.code or 0}

    return _call


def free_port():
    """A TCP port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds=8.0):
    """The first true value of `condition()`; an AssertionError when none comes in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {condition}")


@pytest.fixture
def helpers():
    """free_port and until, for tests that are imported by path and not by package."""

    class Helpers:
        pass

    Helpers.free_port = staticmethod(free_port)
    Helpers.until = staticmethod(until)
    return Helpers


@pytest.fixture
def spawn():
    """Start real processes, each in a session of its own unless told; all of a session is killed at the end."""
    started = []

    def _spawn(argv, **options):
        options = {"start_new_session": True, "stdin": subprocess.DEVNULL, **options}
        process = subprocess.Popen([str(word) for word in argv], **options)
        started.append((process, options["start_new_session"]))
        return process

    yield _spawn
    for process, leads in started:
        with contextlib.suppress(ProcessLookupError):
            if leads:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait(5)


@pytest.fixture
def python(spawn):
    """Start this Python with a script that prints one line when it is set up; the process and that line."""

    def _python(script, *args, **options):
        process = spawn([sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True, **options)
        return process, process.stdout.readline().strip()

    return _python
