# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Flags are judged by what the engine said of them, for as long as it is the same engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ansible.module_utils.sglang_flags import ASK, BrokenEngine, Engine, WrongFlags, judge

# As SGLang declares its flags: types of its own, tuples and sets as choices, actions of its own.
SERVER_ARGS = """
import argparse, json
class Deprecated(argparse.Action):
    def __init__(self, *args, **more):
        super().__init__(*args, nargs=0, **more)
    def __call__(self, *told):
        pass
class Pairs(argparse.Action):
    def __call__(self, parser, namespace, values, name):
        if not all("=" in value for value in values):
            parser.error("pairs are NAME=PATH")
def human(text):
    return int(text[:-1]) * 1000 if text.endswith("k") else int(text)
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--tp", type=int)
        parser.add_argument("--fraction", type=float)
        parser.add_argument("--policy", type=str, choices={"fcfs"})
        parser.add_argument("--sizes", type=int, nargs="+", choices=(8, 16))
        parser.add_argument("--metrics", action="store_true")
        parser.add_argument("--radix", action=argparse.BooleanOptionalAction)
        parser.add_argument("--override", type=json.loads)
        parser.add_argument("--context", type=human)
        parser.add_argument("--old", action=Deprecated)
        parser.add_argument("--lora", nargs="*", action=Pairs)
"""
TAKEN = [
    ["--model", "m", "--tp", "2", "--fraction", "0.5", "--policy", "fcfs", "--sizes", "8", "16", "--metrics", "--no-radix"],
    ["--model-path=m", "--fraction", "-1", "--old"],
    ["--model", "m", "--context", "262144"],
]
REFUSED = {
    "unrecognized arguments: --metric": ["--model", "m", "--metric"],
    "unrecognized arguments: --help": ["--model", "m", "--help"],
    "argument --tp: invalid int value: 'two'": ["--model", "m", "--tp", "two"],
    "argument --policy: invalid choice: 'best'": ["--model", "m", "--policy", "best"],
    "argument --sizes: invalid choice: 9": ["--model", "m", "--sizes", "8", "9"],
    "argument --metrics: ignored explicit argument 'yes'": ["--model", "m", "--metrics=yes"],
    "argument --tp: expected one argument": ["--model", "m", "--tp"],
    "the following arguments are required: --model-path/--model": ["--tp", "2"],
}


class Asked:
    """An engine with the flags above, which counts how often it is asked."""

    def __init__(self, folder):
        self.source = folder / "sglang" / "srt" / "server_args.py"
        self.source.parent.mkdir(parents=True)
        self.source.write_text(SERVER_ARGS)
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.count = 0
        self.engine = Engine(sys.executable, "1.0", self.ask, str(self.cache), "test")

    def ask(self, words):
        self.count += 1
        environment = {**os.environ, "PYTHONPATH": str(self.source.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", ASK, *words], capture_output=True, text=True, env=environment, check=False)
        return done.returncode, done.stdout, done.stderr

    def check(self, *words):
        """How often the engine was asked, and the refusal."""
        before = self.count
        try:
            self.engine.check(list(words))
        except WrongFlags as wrong:
            return self.count - before, str(wrong)
        return self.count - before, None


@pytest.fixture
def asked(tmp_path):
    made = Asked(tmp_path)
    made.check("--model", "m")
    return made


@pytest.mark.parametrize("words", TAKEN)
def test_what_the_engine_takes_is_taken_without_asking_it_again(asked, words):
    assert asked.ask(words)[0] == 0
    assert asked.check(*words) == (0, None)


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_the_engine_refuses_is_refused_in_its_words(asked, sentence):
    words = REFUSED[sentence]
    if "--help" not in words:
        assert sentence in asked.ask(words)[2]
    count, said = asked.check(*words)
    assert (count, said[: len(sentence)]) == (0, sentence)


def test_a_value_that_only_the_engine_can_judge_is_put_to_it_once(asked):
    good, bad, pairs = '{"a": 1}', "{a}", "no pair"
    assert asked.check("--model", "m", "--override", good) == (1, None)
    assert asked.check("--model", "m", "--override", good) == (0, None)
    count, said = asked.check("--model", "m", "--override", bad)
    assert count == 1 and said.startswith("argument --override: invalid loads value")
    assert asked.check("--model", "m", "--lora", pairs) == (1, "pairs are NAME=PATH")
    assert asked.check("--model", "m", "--context", "256k") == (1, None)
    count, said = asked.check("--model", "m", "--context", "256K")
    assert count == 1 and said.startswith("argument --context: invalid human value")


def test_an_engine_that_has_changed_is_asked_again(asked):
    assert asked.check("--model", "m", "--new") == (0, "unrecognized arguments: --new")
    asked.source.write_text(SERVER_ARGS + '        parser.add_argument("--new", action="store_true")\n')
    os.utime(asked.source, ns=(1, 1))
    assert asked.check("--model", "m", "--new") == (1, None)
    assert asked.check("--model", "m", "--new") == (0, None)
    asked.source.unlink()
    with pytest.raises(BrokenEngine, match="ModuleNotFoundError"):
        asked.check("--model", "m")


@pytest.mark.parametrize("garbage", ["{", '{"files": ["a"], "flags": []}', '{"files": {}, "flags": 1}'])
def test_kept_flags_that_are_garbage_are_asked_for_again(asked, garbage):
    (kept,) = [path for path in asked.cache.iterdir() if "files" in path.read_text()]
    kept.write_text(garbage)
    assert asked.check("--model", "m", "--tp", "1") == (1, None)
    assert asked.check("--model", "m", "--tp", "2") == (0, None)


def test_where_nothing_may_be_written_the_engine_is_asked_each_time(asked):
    asked.engine = Engine(sys.executable, "1.0", asked.ask, None, "test")
    assert [asked.check("--model", "m")[0] for _ in range(2)] == [1, 1]


def test_switches_take_no_value_and_a_list_takes_many():
    flags = [{"names": ["--on"], "switch": True, "required": False, "nargs": None, "type": None, "choices": None}]
    assert judge(flags, ["--on"]) is True
    with pytest.raises(WrongFlags):
        judge(flags, ["--on", "1"])
