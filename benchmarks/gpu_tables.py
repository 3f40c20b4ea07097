# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tables of docs/gpu.md, from records that deploys left: boots planned and observed, their stages, benchmarks.

Usage: gpu_tables.py ARTIFACTS    the folder `sglang_artifacts` of a fleet, with boots/ and benchmarks/ in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COUNTS = ("kv_tokens", "mamba_slots", "max_running_requests")
POOLS = ("kv_gib", "mamba_conv_gib", "mamba_ssm_gib", "host_kv_gb", "host_mamba_gb")
STAGES = ("import", "weights", "state pool", "KV pool", "host pools", "graph capture", "warm-up")


def records(folder):
    """Records below a folder, oldest first."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/*.json"), key=lambda path: path.name)
    ]


def table(headers, rows):
    """A Markdown table; nothing at all without rows, so that no empty table passes for a result."""
    if not rows:
        return "(no record)\n"
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |\n" for line in lines)


def beside(figures, name):
    """``planned / observed (off)`` of one figure, as far as a boot has it."""
    row = figures.get(name)
    if row is None:
        return None
    both = f"{row['planned']:,} / {row['observed']:,}"
    return f"{both} ({row['off']:+.2%})" if row["planned"] != row["observed"] else both


def planned_and_observed(boots, names):
    rows = []
    for boot in boots:
        figures = {row["figure"]: row for row in boot["compared"]}
        rows.append([boot["server"], boot["profile"], *(beside(figures, name) for name in names)])
    return table(["server", "profile", *names], rows)


def stages(boots):
    rows = []
    for boot in boots:
        seconds = boot["stage_seconds"] or {}
        unnamed = [f"{name} {value}" for name, value in seconds.items() if name not in STAGES]
        rows.append(
            [
                boot["server"],
                boot["profile"],
                boot["elapsed"],
                *(seconds.get(name) for name in STAGES),
                ", ".join(unnamed) or None,
            ]
        )
    return table(["server", "profile", "ready", *STAGES, "other"], rows)


def memory(boots):
    rows = []
    for boot in boots:
        seen = boot["observed"]
        rows.append(
            [
                boot["server"],
                boot["profile"],
                *(seen.get(name) for name in ("free_gpu_gib", "weights_gib", "draft_weights_gib")),
                boot["graphs_gib"],
                seen.get("available_gib"),
                boot["context_gib"],
            ]
        )
    return table(["server", "profile", "free before weights", "weights", "draft", "graphs", "left at ready", "contexts"], rows)


def measured(benchmarks):
    rows = []
    for record in benchmarks:
        for run in record["runs"]:
            if run["output_tok_s"] is not None:
                rows.append(
                    [
                        record["server"],
                        record["labels"]["profile"],
                        run["concurrency"],
                        run["output_tok_s"],
                        run["ttft_ms"]["median"],
                        run["tpot_ms"]["median"],
                        run["accept_length"],
                        run["requests"],
                        record["measured_at"],
                    ]
                )
    headers = ["server", "profile", "at once", "tok/s", "TTFT ms", "TPOT ms", "accepted", "requests", "measured"]
    return table(headers, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", type=Path)
    folder = parser.parse_args().artifacts
    boots = [boot for boot in records(folder / "boots") if boot["outcome"] == "ready"]
    print("Counts, planned / observed\n\n" + planned_and_observed(boots, COUNTS))
    print("Pools, planned / observed (GiB on the card, GB on the host)\n\n" + planned_and_observed(boots, POOLS))
    print("Seconds\n\n" + stages(boots))
    print("GiB\n\n" + memory(boots))
    print("Benchmarks (medians)\n\n" + measured(records(folder / "benchmarks")))


if __name__ == "__main__":
    main()
