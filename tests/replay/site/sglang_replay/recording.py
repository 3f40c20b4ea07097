# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a recording: timed lines, how it ended, and the HTTP answers taken from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
LINE = re.compile(r"\+ *(\d+\.\d+) (.*)")
# Requests of the client that made the recording; the replay writes a line for each request of its own clients instead.
CLIENT = re.compile(
    r'INFO: +\S+ - "(GET /(?!model_info)|POST /generate)|Health check request received|Endpoint .* is deprecated'
)
CAPACITY = re.compile(r"max_total_num_tokens=(\d+),.* max_running_requests=(\d+)")


class Recording:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.name = self.folder.name
        self.meta = json.loads((self.folder / "recording.json").read_text(encoding="utf-8"))
        self.lines = _lines((self.folder / "server.tlog").read_bytes().decode())

    @classmethod
    def find(cls, wanted, args):
        """The recording of that folder or name, or the one that fits the flags."""
        if not wanted:
            if args.enable_hierarchical_cache:
                wanted = "e96_mtp_hicache"
            else:
                wanted = "q27_mtp" if args.speculative_algorithm else "e96_nomtp"
        for folder in (Path(wanted), RECORDINGS / wanted):
            if (folder / "recording.json").is_file():
                return cls(folder)
        known = ", ".join(sorted(path.parent.name for path in RECORDINGS.glob("*/recording.json")))
        raise SystemExit(f"SGLANG_REPLAY is {wanted!r}, expected the folder of a recording or one of: {known}.")

    def adapt(self, text, host, port):
        """The recorded text with the host and port that this replay was asked for."""
        argv = self.meta["argv"]
        was_host, was_port = (argv[argv.index(flag) + 1] for flag in ("--host", "--port"))
        return (
            text.replace(f"http://{was_host}:{was_port}", f"http://{host}:{port}")
            .replace(f"('{was_host}', {was_port})", f"('{host}', {port})")
            .replace(f"host='{was_host}', port={was_port},", f"host='{host}', port={port},")
        )

    def json(self, name):
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def text(self, name):
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def capacity(self):
        """KV tokens and the running requests in force, as the log gave them."""
        for _seconds, text in self.lines:
            found = CAPACITY.search(text)
            if found:
                return int(found[1]), int(found[2])
        return None, None


def _lines(text):
    """(seconds, text to write) pairs.

    A line of progress bars is cut at its carriage returns, and the pieces are spread from the line before to its time.
    """
    pairs, before = [], 0.0
    for line in text.split("\n"):
        found = LINE.fullmatch(line)
        if not found:
            continue
        at, body = float(found[1]), found[2]
        if not CLIENT.search(body):
            first, *bars = body.split("\r")
            pieces = ([first] if first else []) + ["\r" + bar for bar in bars]
            step = (at - before) / len(pieces) if bars else 0.0
            for index, piece in enumerate(pieces or [""]):
                pairs.append((before + step * (index + 1) if bars else at, piece))
            pairs[-1] = (at, pairs[-1][1] + "\n")
        before = at
    return pairs
