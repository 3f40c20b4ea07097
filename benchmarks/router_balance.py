# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How evenly the real router spreads requests over four servers, by its policy and by how prompts begin.

The servers are stand-ins (tests/helpers/balance.py says how they work). The share of their slots that is busy is the router's
own work; nothing here says anything of SGLang's speed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml
from common import ROOT, print_machine, print_table
from helpers.balance import PROMPTS, measure

# What the role starts the router with.
OURS = yaml.safe_load((ROOT / "roles/sglang_router/vars/main.yml").read_text(encoding="utf-8"))["__sglang_router_defaults"]
BALANCE = ("policy", "balance-abs-threshold", "balance-rel-threshold", "load-monitor-interval")
OPTIONS = {
    "cache_aware as smg has it": {"policy": "cache_aware"},
    "the role's own": {key: OURS[key] for key in BALANCE},
    "power_of_two, least_requests": {"policy": "power_of_two", "power-of-two-load-metric": "least_requests"},
    "round_robin": {"policy": "round_robin"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", type=Path, default=ROOT / ".demo" / "router", help="a venv with smg")
    parser.add_argument("--seconds", type=float, default=20, help="for each combination")
    args = parser.parse_args()
    if not (args.router / "bin" / "python").exists():
        sys.exit(f"{args.router} is no venv: run router.yml once, or name another with --router")
    print_machine()
    rows = []
    for title, options in OPTIONS.items():
        for kind, prompt in PROMPTS.items():
            share, inside = measure(args.router, options, prompt, args.seconds)
            rows.append([title, kind, f"{100 * share:.0f} %", " ".join(map(str, inside))])
            print(*rows[-1], sep=" | ", flush=True)
    print_table(rows, ["options", "prompts", "slots busy", "inside each at the end"])


if __name__ == "__main__":
    main()
