# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real SGLang for the CPU, installed once and shared with `make demo`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import yaml
from helpers.runner import run_playbook

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / ".demo" / "engine"
MODEL = ROOT / ".demo" / "models" / "tiny"
INSTALL_SECONDS = 1200
PLAY_SECONDS = 600


@pytest.fixture(scope="session")
def engine():
    """The venv of real SGLang and the folder of the tiny model."""
    result = run_playbook(
        ROOT,
        "tests/integration/playbooks/engine.yml",
        "localhost,",
        extravars={
            "ansible_python_interpreter": sys.executable,
            "sglang_engine_device": "cpu",
            "sglang_engine_venv": str(ENGINE),
            "sglang_engine_tiny_model": str(MODEL),
        },
        timeout=INSTALL_SECONDS,
    )
    assert result.rc == 0, result.stdout
    return ENGINE, MODEL


def free_ports(count):
    """Ports of loopback that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Fleet:
    """Servers of a test, with a root, an inventory file and playbooks to run on them."""

    def __init__(self, folder, nodes, options=None):
        self.root = folder / "root"
        self.artifacts = folder / "artifacts"
        self.inventory = folder / "fleet.yml"
        self.options = options or {}
        self.write(nodes)

    def write(self, nodes):
        self.nodes = nodes
        self.inventory.write_text(yaml.safe_dump({"plugin": "sglang_fleet", "nodes": nodes}, sort_keys=False))

    def run(self, playbook, cmdline="", envvars=None, **options):
        """Run one of the project's playbooks."""
        given = {"sglang_artifacts": str(self.artifacts), **self.options, **options}
        return run_playbook(
            ROOT, f"{playbook}.yml", self.inventory, extravars=given, cmdline=cmdline, envvars=envvars, timeout=PLAY_SECONDS
        )


@pytest.fixture(scope="module")
def local_fleet(engine, tmp_path_factory):
    """Two servers of real SGLang on this machine, stopped at the end whatever happened."""
    venv, model = engine
    first, second = free_ports(2)
    fleet = Fleet(
        tmp_path_factory.mktemp("fleet"),
        {
            "here": {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "servers": [{"port": first}, {"port": second}],
                "model": "tiny",
                "sglang_engine_device": "cpu",
                "sglang_engine_release": "0.5.23",
                "sglang_engine_venv": str(venv),
                "sglang_benchmark_concurrencies": [1, 4],
                "sglang_benchmark_input_tokens": 16,
                "sglang_benchmark_output_tokens": 16,
            }
        },
    )
    fleet.ports = (first, second)
    fleet.options = {
        "sglang_root": str(fleet.root),
        "sglang_models": {"tiny": {"path": str(model), "served_name": "tiny"}},
        "sglang_api_key": "key of the test",
    }
    yield fleet
    stopped = fleet.run("stop", sglang_stop_timeout=5)
    assert stopped.rc == 0, stopped.stdout
