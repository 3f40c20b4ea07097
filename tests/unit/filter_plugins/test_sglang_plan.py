# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of a fleet: where its figures come from, what is summed, what earlier boots teach, and what a boot showed."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from ansible.errors import AnsibleError, AnsibleFilterError, AnsibleTypeError
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_memory_model import read_model
from sglang_memory_sizes import shown
from sglang_memory_weights import beside_weights
from sglang_plan import ASSUMED_CONTEXT_GIB, FilterModule, _weights, boot_record, compare_boot, fleet_plan, plan_request

GIB = 1 << 30
DATA = Path(__file__).resolve().parents[2] / "data" / "memory"
Q27 = json.loads((DATA / "models.json").read_text())["Qwen/Qwen3.6-27B"]
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
MTP = {
    "mem-fraction-static": 0.92, "mamba-radix-cache-strategy": "extra_buffer", "speculative-algorithm": "EAGLE",
    "speculative-num-steps": 3, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4, "max-running-requests": 48,
    "max-mamba-cache-size": 24,
}  # fmt: skip
HICACHE = {**MTP, "max-mamba-cache-size": 48, "enable-hierarchical-cache": True, "hicache-size": 150}
POOLS_GB = 155.28  # of one server with HICACHE
# Of the model's files, so that a boot counts 51.05 GiB with rotary tables and what the allocator rounds up.
BESIDE = beside_weights(read_model(Q27), Q27)
FILES = int(51.05 * GIB) - BESIDE
STATED = {"gpu_free_gib": 94.97, "host_free_gb": 900}
CARD = "NVIDIA H200"
KIND = {"model": "q27", "gpu": CARD, "release": "0.5.17", "profile": "mtp_hicache"}


def known(name="n-gpu0", gpus=(0,), args=None, **more):
    """What the role knows of one server."""
    return {
        "spec": {
            "name": name, "node": name.split("-")[0], "gpus": list(gpus), "args": HICACHE if args is None else args,
            "model": "q27", "model_path": "/m/q27", "release": "0.5.17", "profile": "mtp_hicache", "device": "cuda",
        },
        "found": {}, "declared": {}, "model": {"path": "/m/q27", "config": Q27}, "checked": {},
        **more,
    }  # fmt: skip


def found(free=(94.97,) * 4, processes=None, available_gb=900.0, limit_gb=None, model=None):
    """A node's answer; `processes` by GPU index."""
    return {
        "gpus": [
            {"index": index, "name": CARD, "free_gib": gib, "processes": (processes or {}).get(index, [])}
            for index, gib in enumerate(free)
        ],
        "host_memory": {"available_gb": available_gb, "cgroup_limit_gb": limit_gb},
        "models": {"/m/q27": {"config": Q27, "weight_bytes": FILES, **(model or {})}},
    }


def request(*args, **more):
    return plan_request(known(*args, **more))


def planned(*servers, **more):
    return fleet_plan(list(servers), **more)


def four(**more):
    return [request(f"n-gpu{gpu}", [gpu], **more) for gpu in range(4)]


def record(context=None, graphs=None, **kind):
    return {**KIND, "context_gib": context, "graphs_gib": graphs, **kind}


# -- where figures come from ------------------------------------------------------------------------------------------
def test_a_request_of_a_node_that_was_asked():
    asked = request(gpus=[2], found=found((10.0, 20.0, 94.5, 40.0), limit_gb=500.0, model={"draft_bytes": 849}))
    assert asked["cards"] == [{"index": 2, "free_gib": 94.5}]
    assert asked["host"] == {"available_gb": 900.0, "cgroup_limit_gb": 500.0, "held_gb": 0.0, "runs": False}
    assert (asked["weight_bytes"], asked["draft_bytes"], asked["config"]) == (FILES, 849, Q27)
    assert asked["kind"] == KIND
    assert (asked["name"], asked["node"], asked["gpus"], asked["args"]) == ("n-gpu0", "n", [2], HICACHE)
    assert asked["counted"] is True


def test_what_was_found_wins_over_what_is_stated():
    declared = {"gpu_free_gib": 1, "host_free_gb": 2, "gpu": "another"}
    asked = request(found=found(), declared=declared, model={"config": {"architectures": ["Other"]}})
    assert asked["cards"] == [{"index": 0, "free_gib": 94.97}]
    assert (asked["host"]["available_gb"], asked["kind"]["gpu"], asked["config"]) == (900.0, CARD, Q27)


def test_a_request_of_stated_memory():
    stated = request(gpus=[0, 1], declared={**STATED, "cgroup_limit_gb": 700, "gpu": CARD})
    assert stated["cards"] == [{"index": 0, "free_gib": 94.97}, {"index": 1, "free_gib": 94.97}]
    assert stated["host"] == {"available_gb": 900, "cgroup_limit_gb": 700, "held_gb": 0.0, "runs": False}
    assert (stated["kind"]["gpu"], stated["config"], stated["weight_bytes"], stated["held_gib"]) == (CARD, Q27, None, {})


@pytest.mark.parametrize("name", ["gpu_free_gib", "host_free_gb", "cgroup_limit_gb"])
@pytest.mark.parametrize("value", [0, -1, True, "94", [], float("-inf"), 1e308, 10**400])
def test_stated_memory_is_a_number_above_0(name, value):
    with pytest.raises(AnsibleFilterError) as caught:
        request(declared={**STATED, name: value})
    assert caught.value.message == f"n-gpu0: sglang_node_memory of n: {name} is {shown(value)}: expected a number above 0"


@pytest.mark.parametrize("more", [{}, {"found": {"gpus": [], "host_memory": {}}}, {"found": found((None,))}])
def test_a_gpu_of_which_nothing_is_known_is_named(more):
    with pytest.raises(AnsibleFilterError) as caught:
        planned(request(**more))
    assert caught.value.message == (
        "n-gpu0: the free memory of its GPU is not known: let the node be asked, or state it in the inventory as"
        " sglang_node_memory: {gpu_free_gib: …, host_free_gb: …}"
    )


def test_a_model_of_which_nothing_is_known_is_named():
    with pytest.raises(AnsibleFilterError) as caught:
        planned(request(declared=STATED, model={"path": "/m"}))
    assert caught.value.message == (
        "n-gpu0: nothing is known of the shape of model q27: let the node be asked, or put its config.json into models.yml"
        " as config"
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"architectures": ["NewForCausalLM"]}, "model class NewForCausalLM is not one whose memory is known here"),
        ("config.json", "the model config is text; expected the mapping of a config.json"),
        (["x"], "the model config is a list; expected the mapping of a config.json"),
    ],
)
def test_what_the_arithmetic_refuses_has_the_servers_name(config, text):
    with pytest.raises(AnsibleError) as caught:
        planned(request(declared=STATED, model={"config": config}))
    assert caught.value.message.startswith(f"n-gpu0: {text}")


def test_weights_are_those_of_the_files_else_of_the_config():
    of_files = planned(request(found=found()))["servers"]["n-gpu0"]
    of_config = planned(request(declared=STATED))["servers"]["n-gpu0"]
    assert (of_files["weights_gib"], of_files["weights_source"]) == (51.05, "its files")
    assert (of_config["weights_gib"], of_config["weights_source"]) == (51.046, "its config")
    assert of_files["kv_tokens"] < of_config["kv_tokens"]


def test_every_rank_has_its_share_of_the_weights_and_the_worst_card_counts():
    plan = planned(request(gpus=[0, 1], args={**HICACHE, "tp-size": 2}, found=found((94.97, 90.0))))["servers"]["n-gpu0"]
    assert (plan["ranks"], plan["weights_gib"], plan["free_gpu_gib"]) == (2, round((FILES / 2 + BESIDE) / GIB, 3), 87.82)
    assert plan["free_source"] == "90.00 free less 2.18 assumed for contexts"


def test_the_draft_of_a_quantised_checkpoint_is_that_of_its_files_with_the_tensors_it_shares():
    config = {**Q27, "quantization_config": {"quant_method": "fp8"}}
    asked = request(found=found(model={"config": config, "draft_bytes": 400_000_000}))
    plan = planned(asked)["servers"]["n-gpu0"]
    shared = 2 * 248320 * 5120 * 2  # embedding and output layer in bfloat16
    assert plan["draft_weights_gib"] == round((400_000_000 + shared) / GIB, 3)
    unquantised = planned(request(found=found(model={"draft_bytes": 400_000_000})))["servers"]["n-gpu0"]
    assert unquantised["draft_weights_gib"] == pytest.approx(5.53, abs=0.01)


@pytest.mark.parametrize(("config", "kind"), [(Q27, "multimodal"), (DENSE, "text")])
def test_contexts_are_assumed_until_a_boot_has_told(config, kind):
    asked = request(args={"mem-fraction-static": 0.9}, declared=STATED, model={"config": config})
    plan = planned(asked)["servers"]["n-gpu0"]
    assert plan["free_gpu_gib"] == round(94.97 - ASSUMED_CONTEXT_GIB[kind], 2)
    assert plan["free_source"] == f"94.97 free less {ASSUMED_CONTEXT_GIB[kind]:.2f} assumed for contexts"


# -- earlier boots ----------------------------------------------------------------------------------------------------
def test_contexts_are_the_median_of_boots_of_the_model_gpu_and_release():
    others = [record(9.9, release="0.5.18"), record(9.9, gpu="A100"), record(9.9, model="other"), record(None)]
    records = [record(2.0), record(2.5, profile="nomtp"), record(2.2), *others]
    plan = planned(request(found=found()), records=records)["servers"]["n-gpu0"]
    assert plan["free_gpu_gib"] == round(94.97 - 2.2, 2)
    assert plan["free_source"] == "94.97 free less 2.20 for contexts as in 3 earlier boots"
    one = planned(request(found=found()), records=records[:1])["servers"]["n-gpu0"]
    assert one["free_source"] == "94.97 free less 2.00 for contexts as in 1 earlier boot"


def test_graphs_are_the_median_of_boots_of_the_profile_too():
    others = [record(graphs=9.9, profile="mtp"), record(graphs=9.9, gpu="A100"), record(2.18)]
    records = [record(graphs=3.0), record(graphs=1.0), record(graphs=1.51), record(graphs=1.5), *others]
    plan = planned(request(found=found()), records=records)["servers"]["n-gpu0"]
    assert (plan["graphs_gib"], plan["graphs_boots"]) == (1.5, 4)
    none = planned(request(found=found()), records=others)["servers"]["n-gpu0"]
    assert (none["graphs_gib"], none["graphs_boots"]) == (None, 0)


def test_a_stated_gpu_lets_boots_teach_where_no_node_is_asked():
    records = [record(2.0)]
    assert planned(request(declared=STATED), records=records)["servers"]["n-gpu0"]["free_gpu_gib"] == 92.79
    named = request(declared={**STATED, "gpu": CARD})
    assert planned(named, records=records)["servers"]["n-gpu0"]["free_gpu_gib"] == 92.97


# -- servers that run, and nodes --------------------------------------------------------------------------------------
def running(gpu=0, restarts=True, pids=(70, 71), **more):
    """A server that holds its card and its host pools."""
    holds = {"pids": list(pids), "host_gb": POOLS_GB}
    processes = {gpu: [{"pid": 70, "used_gib": 80.0}, {"pid": 71, "used_gib": 5.0}, {"pid": 99, "used_gib": 1.0}]}
    free = tuple(8.97 if index == gpu else 94.97 for index in range(4))
    told = found(free, processes, **more)
    return request(f"n-gpu{gpu}", [gpu], found=told, checked={"holds": holds, "restarts": restarts})


def test_what_a_running_server_holds_is_given_back():
    asked = running(available_gb=100.0)
    assert asked["held_gib"] == {0: 85.0}
    assert asked["host"]["held_gb"] == POOLS_GB
    fleet = planned(asked)
    assert fleet["servers"]["n-gpu0"]["free_source"].startswith("93.97 free less")  # the stranger's 1 GiB stays
    assert (fleet["nodes"]["n"]["available_gb"], fleet["fits"]) == (255.28, True)


def test_a_stranger_on_the_card_gives_nothing_back():
    assert running(pids=[])["held_gib"] == {0: 0}


def test_whoever_holds_a_card_that_is_too_full_is_named():
    """On an H200 a plan said to take a larger card, and another process held 110 GiB of this one."""
    hog = {0: [{"pid": 25742, "used_gib": 110.5}, {"pid": 99, "used_gib": 0.5}]}
    fleet = planned(request(found=found((29.3,) * 4, hog)))
    assert not fleet["fits"]
    told = "pid 25742 holds 110.50 GiB of GPU 0: it is not this server's, end it if nobody needs it"
    assert fleet["reasons"][-1] == f"n-gpu0: {told}"
    assert fleet["servers"]["n-gpu0"]["reasons"][-1] == told
    both = planned(request(found=found((29.3,) * 4, {0: [*hog[0], {"pid": 7, "used_gib": 3.0}]})))
    assert both["reasons"][-1].endswith(
        "pid 7 holds 3.00 GiB of GPU 0: these are not this server's, end them if nobody needs them"
    )
    assert planned(request(found=found(processes=hog)))["reasons"] == [], "a card with room for both"


def test_a_server_that_runs_unchanged_is_not_summed():
    fleet = planned(running(restarts=False, available_gb=100.0))
    assert fleet["servers"]["n-gpu0"]["counted"] is False
    assert fleet["nodes"]["n"] == {
        "fits": True, "host_total_gb": 0, "host_pools_gb": 0, "reasons": [], "available_gb": 100.0, "cgroup_limit_gb": None,
        "host_processes_gb": 0,
    }  # fmt: skip
    beside = planned(running(restarts=False, available_gb=100.0), request("n-gpu1", [1], found=found(available_gb=100.0)))
    assert beside["nodes"]["n"]["host_pools_gb"] == pytest.approx(POOLS_GB, abs=0.2)
    assert beside["fits"] is False


def test_a_server_that_runs_unchanged_is_no_reason():
    tight = plan_request({**known(found=found((40.0,))), "checked": {"restarts": False}})
    fleet = planned(tight)
    assert fleet["servers"]["n-gpu0"]["fits"] is False
    assert (fleet["fits"], fleet["reasons"]) == (True, [])


def test_servers_of_a_node_share_its_memory():
    fits = fleet_plan(four(declared=STATED))
    assert (fits["fits"], fits["nodes"]["n"]["host_pools_gb"]) == (True, pytest.approx(4 * POOLS_GB, abs=0.01))
    fleet = fleet_plan(four(declared={**STATED, "host_free_gb": 600}))
    assert (fleet["schema"], fleet["fits"]) == (1, False)
    assert fleet["reasons"] == [
        "n: host pools 155.28 + 155.28 + 155.28 + 155.28 GB = 621.12 GB and 22.00 GB of the servers' processes"
        " do not fit into the node's available memory,"
        " 600.00 GB, of which 10.74 GB stay free: hicache-size 136 on each of its 4 servers fits"
    ]
    assert all(plan["fits"] for plan in fleet["servers"].values())


def test_a_node_that_no_host_pool_fits_is_told_so():
    """Before 0.5.15 a host pool has to be larger than the card's."""
    servers = four(declared={**STATED, "host_free_gb": 60})
    (reason,) = fleet_plan([{**server, "kind": {**server["kind"], "release": "0.5.14"}} for server in servers])["reasons"]
    assert reason.endswith(": no hicache-size fits: leave enable-hierarchical-cache out, or deploy fewer servers with it")


def test_one_server_has_no_sum():
    (reason,) = fleet_plan(four(declared={**STATED, "host_free_gb": 60})[:1])["reasons"]
    assert reason == (
        "n: host pools 155.28 GB and 5.50 GB of the servers' processes do not fit into the node's available memory, 60.00 GB,"
        " of which 10.74 GB stay free:"
        " hicache-size 42 fits"
    )


def test_the_limit_of_the_cgroup_counts_where_it_is_lower():
    fleet = fleet_plan(four(declared={**STATED, "cgroup_limit_gb": 350}))
    assert fleet["nodes"]["n"]["cgroup_limit_gb"] == 350
    assert "do not fit into the limit of its cgroup, 350.00 GB" in fleet["reasons"][0]


def test_nodes_are_summed_each_by_itself():
    fleet = planned(request("a-gpu0", declared={**STATED, "host_free_gb": 100}), request("b-gpu0", declared=STATED))
    assert list(fleet["nodes"]) == ["a", "b"]
    assert [reason.split(":")[0] for reason in fleet["reasons"]] == ["a"]


def test_a_server_that_does_not_fit_is_named():
    fleet = planned(request(declared={**STATED, "gpu_free_gib": 40}))
    assert fleet["fits"] is False
    assert fleet["reasons"][0].startswith("n-gpu0: weights of 56.62 GiB, with ")
    assert fleet["servers"]["n-gpu0"]["reasons"] == [reason.partition(": ")[2] for reason in fleet["reasons"]]


def test_a_host_of_which_nothing_is_known_matters_where_there_are_pools():
    stated = {"gpu_free_gib": 94.97}
    fleet = planned(request(args=MTP, declared=stated))
    assert (fleet["nodes"], fleet["fits"]) == ({}, True)
    fleet = planned(request(declared=stated))
    assert fleet["fits"] is False and fleet["servers"]["n-gpu0"]["fits"] is True
    assert fleet["reasons"] == [
        "n: its free host memory is not known and a profile takes host pools: let the node be asked, or state it in the"
        " inventory as sglang_node_memory: {gpu_free_gib: …, host_free_gb: …}"
    ]
    assert (fleet["nodes"]["n"]["available_gb"], fleet["nodes"]["n"]["host_pools_gb"]) == (
        None,
        pytest.approx(155.28, abs=0.01),
    )


def test_a_node_that_could_not_be_reached_is_said_so():
    with pytest.raises(AnsibleFilterError) as caught:
        planned(request(found={"unreachable": True, "msg": "no route"}))
    assert caught.value.message == (
        "n-gpu0: n could not be reached: state its memory in the inventory as sglang_node_memory:"
        " {gpu_free_gib: …, host_free_gb: …}"
    )


@pytest.mark.parametrize("free", [0.5, 2.18, 1e-9])
def test_a_card_without_room_for_contexts_does_not_fit(free):
    fleet = planned(request(declared={**STATED, "gpu_free_gib": free}))
    assert fleet["fits"] is False and fleet["servers"]["n-gpu0"]["free_gpu_gib"] == 0.01
    assert "take a larger card" in fleet["reasons"][0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_refused(value):
    with pytest.raises(AnsibleFilterError, match=f"gpu_free_gib is {value}: expected a number above 0"):
        request(declared={**STATED, "gpu_free_gib": value})


@pytest.mark.parametrize("value", [5, True, ["H200"], {}])
def test_the_name_of_a_gpu_is_text(value):
    with pytest.raises(AnsibleFilterError) as caught:
        request(declared={**STATED, "gpu": value})
    assert (
        caught.value.message
        == f"n-gpu0: sglang_node_memory of n: gpu is {value!r}: expected the GPU's name as the driver tells it"
    )


QUANTISED = {**Q27, "quantization_config": {"quant_method": "fp8"}}


def test_weights_of_a_quantised_model_are_stated_where_its_node_is_not_asked():
    with pytest.raises(AnsibleFilterError, match="quantised checkpoint's size is told by its files alone; state weights_gib"):
        planned(request(declared=STATED, model={"config": QUANTISED}))
    entry = {"config": QUANTISED, "weights_gib": 29.0, "draft_weights_gib": 5.2}
    two = {**HICACHE, "tp-size": 2}
    plan = planned(request(gpus=[0, 1], args=two, declared=STATED, model=entry))["servers"]["n-gpu0"]
    assert (plan["weights_gib"], plan["weights_source"], plan["draft_weights_gib"]) == (14.5, "models.yml", 2.6)
    asked = planned(request(found=found(model={"config": QUANTISED, "draft_bytes": 400_000_000}), model=entry))
    plan = asked["servers"]["n-gpu0"]
    assert (plan["weights_gib"], plan["weights_source"]) == (pytest.approx(51.05, abs=0.04), "its files")
    assert plan["draft_weights_gib"] == pytest.approx(5.11, abs=0.01), "files win over what is stated"


def test_weights_are_rounded_once():
    plan = planned(request(gpus=[0, 1, 2], args={**HICACHE, "tp-size": 1}, found=found(model={"weight_bytes": 10**10})))
    assert plan["servers"]["n-gpu0"]["weights_gib"] == round((10**10 / 3 + BESIDE) / GIB, 3)
    assert _weights({**request(found=found(model={"weight_bytes": 10**10}))}, 3)[0] == 10**10 / GIB / 3 + BESIDE / GIB


@pytest.mark.parametrize(
    ("stored", "flag", "factor"), [("bfloat16", "float32", 2), ("float32", "auto", 0.5), (None, "half", 1)]
)
def test_files_are_weighed_as_they_are_loaded(stored, flag, factor):
    asked = request(args={**MTP, "dtype": flag}, found=found(model={"config": {**Q27, "dtype": stored}}))
    assert _weights(asked, 1)[0] == pytest.approx((factor * FILES + BESIDE) / GIB)


@pytest.mark.parametrize("name", ["sglang_plan_request", "sglang_fleet_plan", "sglang_compare_boot", "sglang_boot_record"])
def test_an_argument_that_a_filter_does_not_have_is_named(name):
    with pytest.raises(AnsibleFilterError, match=f"^{name}: .*; it takes \\w+"):
        FilterModule().filters()[name]([], wanted=1)


def test_a_boot_that_just_fit_fits_the_next_time():
    plan = planned(request(args={**MTP, "mem-fraction-static": 0.97}, found=found()))["servers"]["n-gpu0"]
    back = 2 * 248320 * 5120 * 2 / GIB  # embedding and output layer of the head
    took = round(plan["left_gib"] + back + 0.05, 2)
    assert planned(request(args={**MTP, "mem-fraction-static": 0.97}, found=found()), records=[record(graphs=took)])["fits"]
    more = planned(request(args={**MTP, "mem-fraction-static": 0.97}, found=found()), records=[record(graphs=took + 0.1)])
    assert "are left for graphs, which took" in more["reasons"][0]


def test_graphs_of_earlier_boots_are_part_of_what_has_to_fit():
    fits = planned(request(found=found()), records=[record(graphs=3.0)])
    assert fits["fits"] is True
    tight = planned(request(found=found()), records=[record(graphs=14.0)])
    (reason,) = tight["reasons"]
    assert "GiB are left for graphs, which took 14.00 GiB in earlier boots: mem-fraction-static " in reason
    remedy = tight["servers"]["n-gpu0"]["remedy"]
    again = planned(request(found=found(), args={**HICACHE, **remedy}), records=[record(graphs=14.0)])
    assert again["fits"] is True


def test_an_unset_ratio_shrinks_to_the_node_in_newer_releases():
    args = {name: value for name, value in HICACHE.items() if name != "hicache-size"}
    known_servers = [request(f"n-gpu{gpu}", [gpu], args=args, declared={**STATED, "host_free_gb": 60}) for gpu in range(2)]
    for server in known_servers:
        server["kind"] = {**server["kind"], "release": "0.5.23"}
    one, two = planned(known_servers[0]), planned(*known_servers)
    assert one["fits"] is True and two["fits"] is False, "each engine sees only itself"
    assert two["reasons"][0].endswith("on each of its 2 servers fits")


def test_advice_that_a_node_has_no_memory_for_is_not_told():
    """With a ratio the host's pools follow those of the card: buffers that are freed become KV here and there."""
    args = {**MTP, "enable-hierarchical-cache": True, "hicache-ratio": 3}

    def node(host, **flags):
        here = four(args={**args, **flags}, declared={**STATED, "host_free_gb": host})
        return planned(*({**server, "kind": {**server["kind"], "release": "0.5.12"}} for server in here))

    wide = node(4000)
    advice = wide["servers"]["n-gpu0"]["advice_args"][0]
    today, followed = (fleet["nodes"]["n"]["host_pools_gb"] for fleet in (wide, node(4000, **advice)))
    assert today < followed
    tight = node(round(today + 34, 2))
    assert tight["fits"] is True
    assert advice not in tight["servers"]["n-gpu0"]["advice_args"]
    assert len(tight["servers"]["n-gpu0"]["advice"]) == len(tight["servers"]["n-gpu0"]["advice_args"])


@given(
    host=st.floats(20, 2000), limit=st.none() | st.floats(20, 2000), free=st.floats(60, 141), gpus=st.integers(1, 4),
    running=st.integers(1, 32), context=st.integers(512, 16384),
    release=st.sampled_from(["0.5.12", "0.5.14", "0.5.17", "0.5.23"]),
    args=st.sampled_from([HICACHE, MTP, {**HICACHE, "hicache-size": 20}, {**MTP, "enable-hierarchical-cache": True}]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_figures_told_of_a_node_fit_all_of_its_servers(host, limit, free, gpus, running, context, release, args):
    """The hicache-size of a reason, and what is suggested for each server, planned for the whole node again."""
    declared = {"gpu_free_gib": free, "host_free_gb": host, "cgroup_limit_gb": limit}

    def plan_of(flags, **wishes):
        here = [request(f"n-gpu{gpu}", [gpu], args={**args, **flags}, declared=declared) for gpu in range(gpus)]
        return planned(*({**server, "kind": {**server["kind"], "release": release}} for server in here), **wishes)

    fleet = plan_of({}, want_running=running, want_context=context)
    for reason in fleet["nodes"].get("n", {"reasons": []})["reasons"]:
        told = re.search(r"hicache-size (\d+) ", reason)
        if told:
            assert plan_of({"hicache-size": int(told[1])})["nodes"]["n"]["fits"], reason
    if fleet["fits"]:
        for number, flags in enumerate(fleet["servers"]["n-gpu0"]["advice_args"]):
            assert plan_of(flags)["fits"], fleet["servers"]["n-gpu0"]["advice"][number]
    suggestion = fleet["servers"]["n-gpu0"]["suggestion"]
    found_flags = suggestion if suggestion["possible"] else suggestion["nearest"]
    if found_flags:
        again = plan_of(found_flags["args"])
        assert again["fits"], (again["reasons"], found_flags["args"])
        wanted = running if suggestion["possible"] else found_flags["running"]
        assert again["servers"]["n-gpu0"]["max_running_requests"] >= wanted
        assert again["servers"]["n-gpu0"]["kv_tokens"] >= wanted * context


# -- strict, tolerant, wanted -----------------------------------------------------------------------------------------
def test_a_server_that_cannot_be_planned_is_an_error_or_named():
    new = request("n-gpu0", [0], declared=STATED, model={"config": {"architectures": ["NewForCausalLM"]}})
    old = request("n-gpu1", [1], declared=STATED)
    with pytest.raises(AnsibleFilterError, match="n-gpu0: model class"):
        planned(new, old)
    fleet = planned(new, old, tolerant=True)
    assert list(fleet["servers"]) == ["n-gpu1"]
    assert fleet["unplanned"]["n-gpu0"].startswith("n-gpu0: model class NewForCausalLM")
    assert fleet["nodes"]["n"]["host_pools_gb"] == pytest.approx(POOLS_GB, abs=0.01)
    assert planned(old)["unplanned"] == {}


def test_without_a_wish_there_is_no_suggestion():
    assert planned(request(declared=STATED))["servers"]["n-gpu0"]["suggestion"] is None


def test_wishes_reach_the_suggestion():
    stated = request(args=MTP, declared=STATED)
    of_16 = planned(stated, want_running=16)["servers"]["n-gpu0"]["suggestion"]
    assert of_16["possible"] and of_16["plan"]["max_running_requests"] == 16
    assert of_16["plan"]["kv_tokens"] >= 16 * 8192
    long = planned(stated, want_running=24, want_context=16384)["servers"]["n-gpu0"]["suggestion"]
    assert (long["possible"], long["lossy"]) == (False, [])
    assert any("24 requests x 16384 tokens" in reason for reason in long["reasons"])
    lossy = planned(stated, want_running=24, want_context=16384, allow_lossy=True)["servers"]["n-gpu0"]["suggestion"]
    assert lossy["possible"] and len(lossy["lossy"]) == 2


def test_a_length_without_a_number_of_requests_is_refused():
    with pytest.raises(AnsibleFilterError) as caught:
        planned(request(declared=STATED), want_context=4096)
    assert caught.value.message.startswith("want_context goes with want_running")


@pytest.mark.parametrize("wish", [{"want_running": 0}, {"want_running": True}, {"want_running": 4, "want_context": -1}])
def test_a_wish_that_is_no_count_is_refused(wish):
    with pytest.raises(AnsibleError, match=f"^{list(wish)[-1]} is "):
        planned(request(declared=STATED), **wish)


@pytest.mark.parametrize("servers", [{}, "text", None])
def test_what_is_no_list_of_servers_is_refused(servers):
    with pytest.raises(AnsibleTypeError, match="sglang_fleet_plan needs a list of servers, got"):
        fleet_plan(servers)


def test_no_server_is_an_empty_plan():
    assert fleet_plan([]) == {"schema": 1, "fits": True, "reasons": [], "servers": {}, "nodes": {}, "unplanned": {}}


def test_input_is_left_as_it_is():
    servers, records = four(found=found()), [record(2.0, 1.0)]
    before = copy.deepcopy((servers, records))
    fleet_plan(servers, records, want_running=16)
    assert (servers, records) == before


# -- planned against observed -----------------------------------------------------------------------------------------
def compared(planned_figures, observed, cap=None):
    return {row["figure"]: row for row in compare_boot(planned_figures, observed, cap)}


def test_figures_stand_beside_each_other():
    rows = compared({"kv_tokens": 367751, "mamba_slots": 24}, {"kv_tokens": 365151, "state_slots": 24})
    assert rows["kv_tokens"] == {
        "figure": "kv_tokens", "planned": 367751, "observed": 365151, "off": 0.0071, "rounding": False, "warn": False,
    }  # fmt: skip
    assert (rows["mamba_slots"]["off"], rows["mamba_slots"]["warn"]) == (0.0, False)


def test_what_one_side_lacks_is_left_out():
    assert compare_boot({"kv_tokens": 1, "kv_gib": None}, {"weights_gib": 51.0, "kv_k_gib": 1.0}) == []
    assert compare_boot({}, {}) == []
    assert compare_boot({"mamba_slots": 0, "host_kv_gb": 0.0}, {"state_slots": 0, "host_kv_gb": 0.0}) == []


def test_keys_and_values_are_summed():
    assert compared({"kv_gib": 22.4457}, {"kv_k_gib": 11.14, "kv_v_gib": 11.14})["kv_gib"]["observed"] == 22.28


def test_the_servers_own_word_on_its_cap_wins_over_the_log():
    plan = {"max_running_requests": 4}
    assert compared(plan, {"max_running_requests": 9})["max_running_requests"]["observed"] == 9
    assert compared(plan, {"max_running_requests": 9}, 4)["max_running_requests"] == {
        "figure": "max_running_requests", "planned": 4, "observed": 4, "off": 0.0, "rounding": False, "warn": False,
    }  # fmt: skip
    assert compared(plan, {"max_running_requests": 9}, 0)["max_running_requests"]["observed"] == 0


@pytest.mark.parametrize(
    ("plan", "observed", "off", "warn"),
    [
        ({"kv_tokens": 102}, {"kv_tokens": 100}, 0.02, False),
        ({"kv_tokens": 103}, {"kv_tokens": 100}, 0.03, True),
        ({"kv_tokens": 97}, {"kv_tokens": 100}, -0.03, True),
        ({"kv_tokens": 5}, {"kv_tokens": 0}, 1.0, True),
        ({"kv_tokens": 0}, {"kv_tokens": 5}, -1.0, True),
        # 0.07 is all that a log of two decimals tells of 0.0687; 2 GiB of 40 is no rounding.
        ({"mamba_conv_gib": 0.0687}, {"state_conv_gib": 0.08}, -0.1413, False),
        ({"weights_gib": 40.0}, {"weights_gib": 42.0}, -0.0476, True),
        ({"host_kv_gb": 0.501}, {"host_kv_gb": 0.52}, -0.0365, False),
        ({"host_kv_gb": 0.5}, {"host_kv_gb": 0.53}, -0.0566, True),
        ({"host_mamba_gb": 4.618}, {"host_state_gb": 4.62}, -0.0004, False),
        ({"mamba_slots": 1}, {"state_slots": 1.01}, -0.0099, False),
    ],
)
def test_what_is_far_off_is_marked_and_rounding_is_not(plan, observed, off, warn):
    (row,) = compare_boot(plan, observed)
    assert (row["off"], row["warn"]) == (off, warn)


# -- records ----------------------------------------------------------------------------------------------------------
READY = {
    "state": "ready", "outcome": "ready", "launched_at": "2026-11-29T16:30:56Z", "cap": 9, "elapsed": 61.5,
    "stage_seconds": {"weights": 41.4},
    "figures": {"free_gpu_gib": 92.60, "available_gib": 4.5, "graphs_gib": 2.96, "kv_tokens": 264000, "state_slots": 48},
}  # fmt: skip


def test_a_record_has_the_plan_what_was_seen_and_what_only_a_boot_tells():
    told = {**known(found=found()), "ready": READY}
    plan = planned(plan_request(known(found=found())))["servers"]["n-gpu0"]
    kept = boot_record(told, plan)
    seen = {
        "schema": 1, "server": "n-gpu0", "node": "n", "launched_at": "2026-11-29T16:30:56Z", "outcome": "ready",
        "elapsed": 61.5, "stage_seconds": {"weights": 41.4},
    }  # fmt: skip
    assert {name: kept[name] for name in seen} == seen
    assert {name: kept[name] for name in KIND} == KIND
    assert kept["planned"] == plan
    assert kept["observed"] == {**READY["figures"], "cap": 9}
    assert {row["figure"] for row in kept["compared"]} == {"kv_tokens", "mamba_slots", "max_running_requests"}
    assert kept["context_gib"] == 2.37
    assert kept["graphs_gib"] == 2.96
    assert json.loads(json.dumps(kept)) == kept


def test_a_record_teaches_the_next_plan():
    asked = plan_request(known(found=found()))
    kept = boot_record({**known(found=found()), "ready": READY}, planned(asked)["servers"]["n-gpu0"])
    plan = planned(asked, records=[kept])["servers"]["n-gpu0"]
    assert plan["free_gpu_gib"] == READY["figures"]["free_gpu_gib"]
    assert (plan["graphs_gib"], plan["graphs_boots"]) == (kept["graphs_gib"], 1)


def test_contexts_of_a_server_that_was_replaced_are_counted_from_the_free_card():
    told = found((8.97,), {0: [{"pid": 70, "used_gib": 86.0}]})
    checked = {"holds": {"pids": [70], "host_gb": 0.0}, "restarts": True}
    assert boot_record({**known(found=told, checked=checked), "ready": READY})["context_gib"] == 2.37


@pytest.mark.parametrize(
    "more",
    [
        {"declared": STATED},
        {"found": {"gpus": [], "host_memory": {}}},
        {"found": found((None,))},
        {"found": found(), "ready": {**READY, "figures": {}}},
    ],
)
def test_what_a_boot_does_not_tell_is_null(more):
    kept = boot_record({**known(), "ready": READY, **more})
    assert (kept["context_gib"], kept["compared"], kept["planned"]) == (None, [], {})


# -- what a server's processes take of the host ---------------------------------------------------------------------------
def hosts(host_free_gb, **more):
    return fleet_plan(four(declared={**STATED, "host_free_gb": host_free_gb}), **more)


def test_processes_of_servers_are_counted_beside_their_pools():
    """SGLang compares a pool with what is free when all of the node's processes are up: 26.5 GB for 21.1 GB of pools."""
    args = {**HICACHE, "hicache-size": 20}

    def node(host_free_gb):
        return fleet_plan(four(args=args, declared={**STATED, "host_free_gb": host_free_gb}))

    needs = node(900)["nodes"]["n"]["host_pools_gb"] + 4 * 5.5 + 10.74
    assert node(needs + 1)["fits"] is True
    tight = node(needs - 1)
    assert tight["fits"] is False and "22.00 GB of the servers' processes do not fit" in tight["reasons"][0]
    assert tight["nodes"]["n"]["host_processes_gb"] == 22.0


def test_the_size_told_for_a_node_leaves_room_for_its_processes():
    (reason,) = hosts(200)["reasons"]
    size = int(re.search(r"hicache-size (\d+) on each of its 4 servers fits", reason)[1])
    again = fleet_plan(four(args={**HICACHE, "hicache-size": size}, declared={**STATED, "host_free_gb": 200}))
    node = again["nodes"]["n"]
    assert again["fits"] is True and node["host_pools_gb"] + 4 * 5.5 + 10.74 <= 200
    suggestion = hosts(200, want_running=8, want_context=4096)["servers"]["n-gpu0"]["suggestion"]
    assert suggestion["plan"]["host_total_gb"] * 4 + 4 * 5.5 + 10.74 <= 200


def test_a_server_that_runs_has_its_processes_already():
    fleet = planned(running(available_gb=20.0))
    assert (fleet["nodes"]["n"]["host_processes_gb"], fleet["fits"]) == (0, True)
    assert fleet["nodes"]["n"]["available_gb"] == round(20 + POOLS_GB, 2)


def test_each_further_rank_has_a_process_of_its_own():
    plan = planned(request(gpus=[0, 1], args={**HICACHE, "tp-size": 2}, declared=STATED))["servers"]["n-gpu0"]
    assert plan["host_processes_gb"] == 5.5 + 2.9


# -- what stops one server and no other ------------------------------------------------------------------------------------
def test_flags_that_cannot_be_suggested_are_a_note_of_that_server():
    windowed = {
        "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 64, "hidden_size": 512, "sliding_window": 128, "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    entry = {"path": "/m", "config": windowed, "weights_gib": 1.0}
    args = {"mem-fraction-static": 0.9, "disable-radix-cache": True}
    servers = [request(args=args, declared=STATED, model=entry), request("n-gpu1", [1], declared=STATED)]
    with pytest.raises(AnsibleFilterError, match="chunked-prefill-size"):
        fleet_plan(servers, want_running=4, want_context=512)
    fleet = fleet_plan(servers, want_running=4, want_context=512, tolerant=True)
    assert list(fleet["servers"]) == ["n-gpu0", "n-gpu1"] and fleet["unplanned"] == {}
    assert fleet["servers"]["n-gpu0"]["suggestion"] is None
    assert fleet["servers"]["n-gpu0"]["warnings"][-1].startswith("no flags are suggested: args have no chunked-prefill-size")
    assert fleet["servers"]["n-gpu1"]["suggestion"]["possible"] is True


@pytest.mark.parametrize("context", [-3.0, float("nan"), float("inf"), True])
def test_a_context_that_no_card_can_have_teaches_nothing(context):
    plan = planned(request(found=found()), records=[record(context), record(2.0)])["servers"]["n-gpu0"]
    assert plan["free_source"] == "94.97 free less 2.00 for contexts as in 1 earlier boot"


def test_a_boot_that_found_more_than_was_free_before_tells_no_context():
    """Another process gave its memory back between the look at the card and the boot."""
    known_server = {**known(found=found((60.0,))), "ready": {"figures": {"free_gpu_gib": 92.79}}}
    assert boot_record(known_server)["context_gib"] is None


# -- twelve boots on H200s, most of them made a 96 GB card ------------------------------------------------------------------
H200 = json.loads((DATA / "h200.json").read_text())


def as_known(boot):
    """What the role knew of a boot's server, and what the log told afterwards."""
    spec = {
        "name": boot["server"], "node": "h200", "gpus": [0], "args": boot["args"], "model": "q27", "model_path": "/m",
        "release": "0.5.17", "profile": boot["profile"], "device": "cuda",
    }  # fmt: skip
    card = {"index": 0, "name": CARD, "free_gib": boot["gpu_free_gib"], "processes": []}
    node = {"gpus": [card], "host_memory": {"available_gb": 900.0}, "models": {"/m": {"config": Q27}}}
    ready = {"figures": boot["figures"], "cap": boot["cap"]}
    return {"spec": spec, "found": node, "declared": {}, "model": {}, "checked": {}, "ready": ready}


def as_booted(boot, records=()):
    return fleet_plan([plan_request(as_known(boot))], records=list(records))["servers"][boot["server"]]


def check_against(boot, plan, kv_share):
    seen = boot["figures"]
    assert plan["kv_tokens"] == pytest.approx(seen["kv_tokens"], rel=kv_share)
    assert (plan["mamba_slots"], plan["max_running_requests"]) == (seen["state_slots"], boot["cap"])
    pools = {
        "kv_gib": seen["kv_k_gib"] + seen["kv_v_gib"], "mamba_conv_gib": seen["state_conv_gib"],
        "mamba_ssm_gib": seen["state_ssm_gib"], "weights_gib": seen["weights_gib"],
        "draft_weights_gib": seen.get("draft_weights_gib", 0),
        "mamba_intermediate_gib": seen.get("speculative_ssm_gib", 0) + seen.get("speculative_conv_gib", 0),
    }  # fmt: skip
    for name, gib in pools.items():
        assert plan[name] == pytest.approx(gib, abs=0.02), name
    for name, there in (("host_kv_gb", "host_kv_gb"), ("host_mamba_gb", "host_state_gb")):
        assert plan[name] == pytest.approx(seen.get(there, 0), abs=0.02)


@pytest.mark.parametrize("boot", H200, ids=[f"{boot['server']}-{boot['profile']}" for boot in H200])
def test_the_first_plan_on_a_card_is_that_of_the_boot(boot):
    check_against(boot, as_booted(boot), 0.002)


@pytest.mark.parametrize("boot", H200, ids=[f"{boot['server']}-{boot['profile']}" for boot in H200])
def test_one_boot_of_the_same_weights_makes_the_plan_exact(boot):
    """On a card with other free memory too: what is gone before the pools does not depend on it."""
    loaded = [other for other in H200 if ("draft_weights_gib" in other["figures"]) == ("draft_weights_gib" in boot["figures"])]
    for other in loaded:
        record = boot_record(as_known(other), as_booted(other))
        plan = as_booted(boot, [record])
        check_against(boot, plan, 0.002)
        assert plan["weights_source"] == "1 earlier boot, with all else before the pools"


def test_boots_that_loaded_something_else_teach_nothing_of_the_weights():
    draft = next(boot for boot in H200 if boot["profile"] == "mtp")
    plain = next(boot for boot in H200 if boot["profile"] == "nomtp")
    record = boot_record(as_known(draft), as_booted(draft))
    assert as_booted(plain, [record])["weights_source"] == "its config"
    eight_bits = {**draft, "args": {**draft["args"], "quantization": "fp8", "speculative-draft-model-path": "/d"}}
    assert plan_request(as_known(eight_bits))["args"] != draft["args"]
    assert boot_record(as_known(eight_bits))["loading"] != record["loading"]


def test_weights_of_a_model_that_was_exchanged_are_not_those_of_earlier_boots():
    boot = next(boot for boot in H200 if boot["profile"] == "mtp")
    known_boot = as_known(boot)
    record = boot_record(known_boot, as_booted(boot))
    known_boot["found"]["models"]["/m"]["weight_bytes"] = int(29 * GIB)
    plan = fleet_plan([plan_request(known_boot)], records=[record])["servers"][boot["server"]]
    assert (plan["weights_source"], plan["weights_gib"]) == ("its files", round(29 + BESIDE / GIB, 3))


def test_a_boot_whose_tokens_were_bounded_tells_nothing_of_what_was_gone():
    boot = next(boot for boot in H200 if boot["profile"] == "mtp")
    bounded = {**boot, "args": {**boot["args"], "max-total-tokens": 1000}, "figures": {**boot["figures"], "kv_tokens": 1000}}
    assert boot_record(as_known(bounded), as_booted(bounded))["before_pools_gib"] is None
