# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Does an installed SGLang take these flags?

Its own parser knows, and takes seconds to import: it is asked once for its flags, which are kept as data (``flags-*.json`` of
the cache) for as long as no source file of that SGLang changes. Only values that SGLang converts itself, such as JSON and
``256k``, are put to the engine again, once for each command line.
"""

from __future__ import annotations

import argparse
import json
import os

from ansible.module_utils.sglang_state import launch_sha256, lock, read_state, shape_error, utc_now, write_atomic

# As `python -m sglang.launch_server` reads its command line, without loading a model or touching a GPU. Prints the flags as
# its last line, and then judges what it was given. `type` is null where SGLang converts the value itself, and "whole" where
# its converter takes a whole number for what it is.
ASK = r"""
import argparse, json, os, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang", allow_abbrev=False)
ServerArgs.add_cli_args(parser)
types = {None: "str", str: "str", int: "int", float: "float"}
def whole(convert):
    try:
        return convert("1234") == 1234
    except Exception:
        return False
def entry(action):
    stores = type(action).__name__ == "_StoreAction"
    plain = stores and action.type in types
    switch = action.nargs == 0
    return {
        "names": action.option_strings, "switch": switch, "required": action.required,
        "nargs": None if switch else action.nargs,
        "type": types[action.type] if plain else "whole" if stores and action.choices is None and whole(action.type) else None,
        "choices": list(action.choices) if plain and action.choices is not None else None,
    }
modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "sglang"]
files = {module.__file__: os.stat(module.__file__).st_mtime_ns for module in modules if getattr(module, "__file__", None)}
known = [entry(action) for action in parser._actions if action.option_strings and "--help" not in action.option_strings]
print("\n" + json.dumps({"files": files, "flags": known}), flush=True)
parser.parse_args(sys.argv[1:])
"""
CHECK_SECONDS = 300
ARGPARSE_ERROR = 2
TYPES = {"str": str, "int": int, "float": float}
KEPT = {"files": dict, "flags": list}


class WrongFlags(Exception):
    """What the parser says of the flags."""


class BrokenEngine(Exception):
    """The engine could not read its own flags; ``rc`` and ``lines`` say how it ended."""

    def __init__(self, rc, lines):
        super().__init__((lines or ["no output"])[-1])
        self.rc = rc
        self.lines = lines


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise WrongFlags(message)


def judge(flags, words):
    """Refuse words that an argparse with these flags does not take; False when only the engine knows some value's type."""
    parser = _Parser(prog="sglang", allow_abbrev=False, add_help=False)
    left = []

    def whole(text):
        if not text.isdecimal():
            left.append(text)

    for flag in flags:
        if flag["switch"]:
            parser.add_argument(*flag["names"], action="store_true")
        else:
            parser.add_argument(
                *flag["names"],
                type={**TYPES, "whole": whole}.get(flag["type"], left.append),
                nargs=flag["nargs"],
                choices=flag["choices"],
                required=flag["required"],
            )
    parser.parse_args(words)
    return not left


class Engine:
    """The SGLang of one Python: ``ask(words)`` runs ASK there and gives its exit code, stdout and stderr.

    ``cache`` is a folder, or None where nothing may be written.
    """

    def __init__(self, python, release, ask, cache, who):
        self.python = python
        self.release = release
        self.ask = ask
        self.cache = cache
        self.who = who

    def check(self, words):
        """Raise WrongFlags or BrokenEngine, or be content."""
        if self.cache is None:
            self._ask(words)
            return
        if self._judged(words):
            return
        # The servers of a node start together: the first one asks, the others wait for its answer.
        with lock(os.path.join(self.cache, "flags.lock"), self.who, CHECK_SECONDS):
            if self._judged(words):
                return
            self._ask(words)
            write_atomic(self._path(words), json.dumps({"taken_at": utc_now()}) + "\n", 0o644)

    def _judged(self, words):
        flags = self._flags()
        return bool(flags) and (judge(flags, words) or os.path.exists(self._path(words)))

    def _ask(self, words):
        rc, out, err = self.ask(words)
        answer = out.strip().rpartition("\n")[2]
        if answer.startswith("{") and self.cache is not None:
            write_atomic(self._path(), answer + "\n", 0o644)
        lines = err.strip().splitlines()
        if rc == ARGPARSE_ERROR:
            sentence = next((line for line in reversed(lines) if "error:" in line), err[-400:])
            raise WrongFlags(sentence.partition("error: ")[2] or sentence)
        if rc != 0:
            raise BrokenEngine(rc, lines)

    def _flags(self):
        """The flags that were kept, or none where a source file of this SGLang has changed since."""
        kept = read_state(self._path())
        return kept["flags"] if not shape_error(kept, KEPT) and _unchanged(kept["files"]) else None

    def _path(self, words=()):
        """Of the flags; with words, of their having been taken by the SGLang that has these flags."""
        told = [self.python, str(self.release), *words]
        if words:
            told.append(json.dumps(read_state(self._path()).get("files")))
        return os.path.join(self.cache, f"flags-{launch_sha256(told, {}, {})[:32]}.json")


def _unchanged(files):
    try:
        return all(os.stat(path).st_mtime_ns == changed for path, changed in files.items())
    except OSError:
        return False
