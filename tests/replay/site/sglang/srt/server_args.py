# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line of SGLang 0.5.17, replayed from its recorded usage text.

flags.json has one entry a flag, in the usage's order: `switch` (takes no value), `nargs`, `choices` and `metavar` as
the usage shows them; `aliases` and `type`, which it does not show, as that release declares them. Flags that the
release hides are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

FLAGS = json.loads(Path(__file__).with_name("flags.json").read_text(encoding="utf-8"))
TYPES = {"int": int, "float": float}


class ServerArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for flag in FLAGS:
            names = [flag["flag"], *flag.get("aliases", [])]
            if flag.get("switch"):
                parser.add_argument(*names, action="store_true")
            elif flag.get("boolean_optional"):
                parser.add_argument(*names, action=argparse.BooleanOptionalAction)
            else:
                parser.add_argument(
                    *names,
                    type=TYPES.get(flag.get("type"), str),
                    choices=_choices(flag),
                    nargs=flag.get("nargs"),
                    metavar=flag.get("metavar"),
                    required=flag["flag"] == "--model-path",
                )


def prepare_server_args(argv: list) -> argparse.Namespace:
    """Parse a server's command line as the engine does: a file named by --config first, the command line over it."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    if "--config" in argv:
        at = argv.index("--config")
        argv = _config_argv(Path(argv[at + 1])) + argv[:at] + argv[at + 2 :]
    args = parser.parse_args(argv)
    args.host = args.host or "127.0.0.1"
    args.port = args.port or 30000
    args.served_model_name = args.served_model_name or args.model_path
    return args


def _choices(flag):
    convert = TYPES.get(flag.get("type"), str)
    return [convert(choice) for choice in flag["choices"]] if "choices" in flag else None


def _config_argv(path):
    """Turn `name: value` lines into flags. A replay has no YAML reader: nested values are not understood."""
    argv = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, separator, value = line.partition(":")
        if not separator or name.lstrip().startswith("#"):
            continue
        value = value.strip().strip("\"'")
        if value.lower() == "true":
            argv.append("--" + name.strip())
        elif value.lower() not in ("false", "null", ""):
            argv += ["--" + name.strip(), value]
    return argv
