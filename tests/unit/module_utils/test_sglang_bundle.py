# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a support bundle says of the kernel. What is in it besides is tested where it is made, with module sglang_server."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_bundle import kernel_lines

KILL = "[1.0] Out of memory: Killed process 7 (python) total-vm:1kB"


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (f"echo '{KILL}'; echo '[2.0] usb 1-1: new device'", [KILL]),
        ("echo '[2.0] usb 1-1: new device'", ["(dmesg has no line on memory, GPUs or disks)"]),
        ("echo 'dmesg: Operation not permitted' >&2; exit 1", ["(dmesg could not be read: dmesg: Operation not permitted)"]),
    ],
)
def test_the_kernels_lines_or_why_there_are_none(tmp_path, monkeypatch, script, lines):
    dmesg = tmp_path / "dmesg"
    dmesg.write_text(f"#!/bin/sh\n{script}\n")
    dmesg.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert kernel_lines() == lines


def test_a_node_without_dmesg_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_lines()[0].startswith("(dmesg could not be run: ")
