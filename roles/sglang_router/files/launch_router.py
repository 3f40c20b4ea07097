# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts smg with its options, and with keys from a file: smg itself takes them on its command line only.

python launch_router.py [--secrets FILE] OPTION…     FILE: one `flag: "value"` a line, the value as JSON
"""

import json
import sys

import setproctitle
from smg import launch_router


def main(words):
    if words[:1] == ["--secrets"]:
        with open(words[1], encoding="utf-8") as stream:
            keys = dict(line.split(": ", 1) for line in stream if line.strip())
        words = [*words[2:], *(f"--{flag}={json.loads(value)}" for flag, value in keys.items())]
    # Another title would overwrite the memory where the kernel keeps the environment, by which the fleet knows its own.
    setproctitle.setproctitle = lambda title: None
    launch_router.launch_router(launch_router.parse_router_args(words))


if __name__ == "__main__":
    main(sys.argv[1:])
