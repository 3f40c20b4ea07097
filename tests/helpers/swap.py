# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of a swap, as module sglang_swap keeps it on a node."""

from __future__ import annotations

BOOT = {
    "profile": "nomtp",
    "argv": ["/v/bin/python", "-m", "sglang.launch_server"],
    "env": {},
    "port": 1,
    "record": {},
    "launch_sha256": "0" * 64,
    "script": "/srv/sglang/scripts/s.sh",
    "script_text": "#!/bin/sh\n",
    "previous": None,
}


def begun(before=BOOT, secrets=(), **more):
    """A swap of ``before`` to mtp that bob began and nobody brought to an end."""
    return {
        "schema": 1,
        "name": "n-gpu0",
        "run": "r2",
        "who": "bob@desk",
        "begun_at": "2026-01-01T00:00:00Z",
        "out_epoch": 1767225600.0,
        "from": {"profile": before["profile"]},
        "to": {"profile": "mtp"},
        "before": {**before, "secrets": dict(secrets)},
        "outcome": None,
        **more,
    }
