"""A graph is checked when built, has one order, and changes, compares, saves and draws as data."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from initopt.graph import Collective, Edge, Graph, GraphError, OrderError, Step

TRAINER = Graph(
    [
        Step("process_group", lane="comms", stage="process_group_init"),
        Step("reader", needs=("config",), lane="io:data"),
        Step("model", needs=("config",), uses=("rng",)),
        Step("plan", needs=("model",), lane="comms", collectives=(Collective("broadcast", bytes=80),)),
        Step("shard", needs=("model", "plan"), after=("process_group",), uses=("rng", "cuda:0")),
    ],
    name="dlrm",
    inputs=["config"],
)
SECONDS = {"process_group": 4.0, "reader": 3.0, "model": 2.0, "plan": 1.0, "shard": 5.0}


def error(*steps: Step, inputs: tuple[str, ...] = ()) -> GraphError:
    with pytest.raises(GraphError) as caught:
        Graph(steps, inputs=inputs)
    return caught.value


def before(graph: Graph, name: str) -> dict[str, str]:
    return {edge.before: edge.resource or edge.kind for edge in graph.predecessors(name)}


# Errors


def test_an_unknown_need_names_the_step_its_place_and_what_was_meant() -> None:
    raised = error(Step("model"), Step("shard", needs=("modle",), call_site="startup.py:41"))
    assert str(raised) == ("startup.py:41: 'shard' needs 'modle', which no step provides (did you mean 'model'?)")
    assert raised.steps == ("shard",)
    assert raised.call_site == "startup.py:41"


def test_an_unknown_order_is_told_from_an_unknown_need() -> None:
    raised = error(Step("shard", after=("zzz",)), inputs=("config",))
    assert str(raised) == "'shard' comes after 'zzz', which no step provides (inputs of the run: config)"


def test_an_input_may_be_what_was_meant() -> None:
    assert "did you mean 'config'?" in str(error(Step("reader", needs=("confg",)), inputs=("config",)))


def test_a_cycle_is_named_with_the_reason_for_each_wait() -> None:
    raised = error(
        Step("imports"),
        Step("plan", needs=("imports",), after=("shard",), call_site="startup.py:7"),
        Step("shard", needs=("plan",)),
        Step("compile", needs=("shard",)),
    )
    assert str(raised) == (
        "startup.py:7: steps wait on each other: plan -> shard -> plan\n"
        "('shard' needs 'plan', 'plan' comes after 'shard'; take one of these away)"
    )
    assert raised.steps == ("plan", "shard", "plan")


def test_of_two_ways_around_the_shorter_is_named() -> None:
    raised = error(Step("a", needs=("c", "b")), Step("b", needs=("a",)), Step("c", needs=("b",)))
    assert raised.steps == ("a", "b", "a")


def test_a_step_that_waits_on_itself() -> None:
    assert error(Step("plan", needs=("plan",))).steps == ("plan", "plan")


def test_a_duplicate_names_both_places() -> None:
    raised = error(Step("plan", call_site="a.py:1"), Step("plan", call_site="b.py:2"))
    assert str(raised).startswith("b.py:2: 'plan' is declared twice, first at a.py:1")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("plan", stage="pretrain"), "unknown stage 'pretrain' (did you mean 'pre_train'?)"),
        (Step("plan", stage="??"), "unknown stage '??': use one of device_init, "),
        (Step("plan", timeout=-1.0), "timeout -1.0 s: give a positive number, or None"),
        (Step("plan", timeout=0.0), "timeout 0.0 s"),
        (Step("plan", timeout=float("nan")), "timeout nan s"),
        (Step("plan", timeout=float("inf")), "timeout inf s"),
        (Step("plan", lane="disk"), "on 'disk', which is no lane: use main, comms, io:<name>, cuda:<number>"),
        (Step("plan", lane="cuda:first"), "'cuda:first', which is no lane"),
        (Step("plan", lane="io:"), "'io:', which is no lane"),
        (Step("plan", lane="main\n"), "which is no lane"),
        (Step("plan", uses=("comms",)), "uses 'comms' but is on lane 'main'"),
        (Step("plan", lane="io:x", collectives=(Collective("barrier"),)), "holds collectives but is on lane 'io:x'"),
        (Step(""), "is no name for a step"),
        (Step("plan", uses="rng"), "has a string as uses, not a tuple: write ('rng',)"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_step_is_refused_in_its_own_words(step: Step, words: str) -> None:
    assert words in str(error(step))


def test_a_step_may_not_hide_an_input() -> None:
    assert "both a step and an input" in str(error(Step("config"), inputs=("config",)))


def test_errors_survive_the_way_from_a_helper_process() -> None:
    raised = error(Step("plan", needs=("plan",), call_site="a.py:1"))
    copy = pickle.loads(pickle.dumps(raised))
    assert (str(copy), copy.steps, copy.call_site) == (str(raised), raised.steps, raised.call_site)


# Random numbers


def test_draws_of_two_origins_that_nothing_orders_are_refused() -> None:
    raised = error(
        Step("model", uses=("rng",), origin="torchrec", call_site="plugin.py:3"),
        Step("augment", uses=("rng",), origin="user", call_site="train.py:9"),
    )
    assert isinstance(raised, OrderError)
    assert str(raised) == (
        "plugin.py:3 and train.py:9: 'model' and 'augment' both draw random numbers ('rng') and nothing orders them;\n"
        "the weights would depend on which draws first. Add after='model' or before='model' to 'augment'."
    )
    assert raised.steps == ("model", "augment")


def test_draws_of_two_origins_may_be_ordered_through_other_steps_and_draws() -> None:
    graph = Graph(
        [
            Step("augment", after=("model",), uses=("rng",), origin="user"),
            Step("model", uses=("rng",), origin="torchrec"),
            Step("between", after=("augment",)),
            Step("optimizer", needs=("between",), uses=("rng",), origin="torchrec"),
        ]
    )
    assert before(graph, "optimizer") == {"between": "value", "augment": "rng"}
    assert graph.order() == ("model", "augment", "between", "optimizer")


def test_another_resource_does_not_decide_the_order_of_draws() -> None:
    first = Step("model", uses=("cuda:0", "rng"), origin="torchrec")
    second = Step("augment", uses=("cuda:0", "rng"), origin="user")
    assert isinstance(error(first, second), OrderError)


def test_one_draw_too_many_among_ordered_ones_is_named() -> None:
    steps = [
        Step("a", uses=("rng",), origin="x"),
        Step("b", uses=("rng",), origin="y", after=("a",)),
        Step("c", uses=("rng",), origin="x"),
    ]
    assert error(*steps).steps == ("b", "c")


def test_draws_keep_program_order_although_the_first_needs_a_late_step() -> None:
    graph = Graph([Step("model", needs=("late",), uses=("rng",)), Step("reader", uses=("rng",)), Step("late")])
    assert before(graph, "reader") == {"model": "rng"}


def test_draws_follow_values_where_these_contradict_program_order() -> None:
    graph = Graph([Step("model", needs=("table",), uses=("rng",)), Step("table", uses=("rng",))])
    assert graph.edges == (Edge("table", "model", "value"),)


# Edges and order


def test_edges_tell_why_they_exist() -> None:
    assert before(TRAINER, "shard") == {"model": "value", "plan": "value", "process_group": "order"}
    assert before(TRAINER, "plan") == {"model": "value", "process_group": "comms"}
    assert before(TRAINER, "reader") == {}
    assert Edge("process_group", "plan", "resource", "comms") in TRAINER.successors("process_group")


def test_the_edges_are_those_of_every_step() -> None:
    assert TRAINER.edges == tuple(edge for step in TRAINER.order() for edge in TRAINER.predecessors(step))
    assert sorted(map(str, TRAINER.edges)) == sorted(str(e) for step in TRAINER for e in TRAINER.successors(step))


def test_chains_of_two_resources_do_not_close_a_cycle() -> None:
    steps = [
        Step("a", needs=("c",), uses=("r1", "rng")),
        Step("b", uses=("rng",)),
        Step("d", needs=("b",), lane="comms"),
        Step("c", lane="comms"),
    ]
    graph = Graph(steps)
    assert before(graph, "b") == {"a": "rng"}
    assert before(graph, "d") == {"b": "value", "c": "comms"}
    assert graph.order() == ("c", "a", "b", "d")


def test_order_is_program_order_as_far_as_the_edges_allow() -> None:
    assert TRAINER.order() == tuple(TRAINER)
    assert Graph([Step("c", needs=("b",)), Step("a"), Step("b")]).order() == ("a", "b", "c")


def test_lanes_hold_their_steps_in_order() -> None:
    assert TRAINER.lanes() == {
        "comms": ("process_group", "plan"),
        "io:data": ("reader",),
        "main": ("model", "shard"),
    }


def test_a_graph_is_a_mapping_in_program_order() -> None:
    assert list(TRAINER) == ["process_group", "reader", "model", "plan", "shard"]
    assert TRAINER["plan"].needs == ("model",)
    assert TRAINER.name == "dlrm" and TRAINER.inputs == ("config",)
    assert repr(TRAINER) == "<Graph 'dlrm': 5 steps on 3 lanes>"
    with pytest.raises(KeyError):
        TRAINER["modle"]
    with pytest.raises(TypeError):
        TRAINER["plan"] = Step("plan")  # type: ignore[index]


def test_equal_graphs_are_equal_and_hash_alike() -> None:
    same = Graph(TRAINER.values(), name="dlrm", inputs=["config"])
    assert same == TRAINER and hash(same) == hash(TRAINER)
    assert Graph(TRAINER.values(), name="other", inputs=["config"]) != TRAINER
    assert pickle.loads(pickle.dumps(TRAINER)) == TRAINER


def test_nothing_is_a_graph_too() -> None:
    graph = Graph([])
    assert (graph.order(), graph.lanes(), graph.edges) == ((), {}, ())
    assert (graph.longest_chain({}), graph.slack({}), graph.lower_bound({})) == ((), {}, 0.0)
    assert Graph.from_json(graph.to_json()) == graph


# Times


def test_the_longest_chain_and_its_slack() -> None:
    assert TRAINER.longest_chain(SECONDS) == ("process_group", "plan", "shard")
    assert TRAINER.slack(SECONDS) == {"process_group": 0.0, "reader": 7.0, "model": 2.0, "plan": 0.0, "shard": 0.0}


def test_rounding_leaves_no_slack_on_the_longest_chain() -> None:
    graph = Graph([Step("a"), Step("b", needs=("a",)), Step("c", needs=("b",))])
    seconds = {"a": 0.1, "b": 0.2, "c": 0.3}
    assert graph.slack(seconds) == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_the_lower_bound_is_the_chain_or_the_work_of_the_cores() -> None:
    assert TRAINER.lower_bound(SECONDS) == 10.0
    assert TRAINER.lower_bound(SECONDS, cpu_seconds=SECONDS, cores=1) == 15.0
    assert TRAINER.lower_bound(SECONDS, cpu_seconds={"shard": 5.0, "imports": 90.0}, cores=2) == 10.0


@pytest.mark.parametrize("cores", [None, 0])
def test_cpu_seconds_ask_for_cores(cores: int | None) -> None:
    with pytest.raises(ValueError, match="go together"):
        TRAINER.lower_bound(SECONDS, cpu_seconds=SECONDS, cores=cores)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_duration_is_finite_and_not_negative(value: float) -> None:
    with pytest.raises(GraphError, match="step 'plan' can't take"):
        TRAINER.slack({**SECONDS, "plan": value})


def test_a_missing_duration_is_named() -> None:
    with pytest.raises(GraphError, match=r"no duration for step 'plan' \(did you mean 'plam'\?\)"):
        TRAINER.longest_chain({"plam" if name == "plan" else name: took for name, took in SECONDS.items()})


# Changes


def test_without_closes_up_behind_the_step() -> None:
    graph = TRAINER.without("plan")
    assert graph["shard"].needs == ("model",)
    assert graph["shard"].after == ("process_group",)
    assert "plan" not in graph and "plan" in TRAINER


def test_without_hands_the_order_on_to_a_dependant() -> None:
    graph = Graph([Step("a"), Step("barrier", after=("a",), lane="comms"), Step("b", needs=("barrier",))])
    assert graph.without("barrier").edges == (Edge("a", "b", "order"),)


def test_without_lets_a_chain_close_by_itself() -> None:
    graph = Graph([Step("a", lane="comms"), Step("b", lane="comms"), Step("c", lane="comms")]).without("b")
    assert graph["c"].after == ()
    assert graph.edges == (Edge("a", "c", "resource", "comms"),)


def test_without_keeps_waits_that_went_through_a_chain() -> None:
    graph = Graph([Step("a"), Step("b", needs=("a",), lane="comms"), Step("c", lane="comms")])
    assert graph.without("b").edges == (Edge("a", "c", "order"),)


def test_without_keeps_waits_that_went_from_one_chain_to_another() -> None:
    graph = Graph([Step("a", uses=("rng",)), Step("b", uses=("rng",), lane="comms"), Step("c", lane="comms")])
    assert graph.without("b").edges == (Edge("a", "c", "order"),)


def test_without_leaves_the_draws_of_the_rest_in_their_order() -> None:
    graph = Graph([Step("c", needs=("x",), uses=("rng",)), Step("a", uses=("rng",)), Step("x", uses=("rng",))])
    assert graph.order() == ("a", "x", "c")
    assert graph.without("x").order() == ("a", "c")


def test_without_keeps_draws_of_two_origins_ordered() -> None:
    graph = Graph(
        [
            Step("a", uses=("rng", "cuda:0"), origin="p"),
            Step("x", uses=("rng",), origin="p"),
            Step("c", needs=("x",), uses=("rng", "cuda:0"), origin="q"),
        ]
    )
    assert graph.without("x")["c"].after == ("a",)


def test_a_step_is_replaced_at_its_place_and_added_at_the_end() -> None:
    changed = TRAINER.replacing(Step("reader", lane="io:other")).adding(Step("compile", needs=("shard",)))
    assert list(changed) == [*TRAINER, "compile"]
    assert changed["reader"].lane == "io:other"
    assert changed.name == "dlrm" and changed.inputs == ("config",)


def test_a_change_of_an_unknown_step_says_what_was_meant() -> None:
    with pytest.raises(GraphError, match=r"no step is named 'modle' \(did you mean 'model'\?\)"):
        TRAINER.without("modle")
    with pytest.raises(GraphError, match="no step is named 'plam'"):
        TRAINER.replacing(Step("plam"))
    with pytest.raises(GraphError, match="declared twice"):
        TRAINER.adding(Step("plan"))


def test_a_diff_is_readable() -> None:
    new = Graph(
        [
            Step("reader", needs=("config",), lane="io:data", timeout=60),
            Step("process_group", lane="comms", stage="process_group_init"),
            Step("model", needs=("config",), uses=("rng",)),
            Step("shard", needs=("model",), after=("process_group",), uses=("rng", "cuda:0")),
            Step("compile", needs=("shard",)),
        ],
        name="dlrm2",
        inputs=["config"],
    )
    diff = TRAINER.diff(new)
    assert diff
    assert str(diff).splitlines() == [
        "~ graph: name dlrm -> dlrm2",
        "+ compile",
        "- plan",
        "~ reader: timeout none -> 60",
        "~ shard: needs (model, plan) -> (model)",
        "~ process_group: moved in program order",
        "+ shard -> compile (value)",
        "- model -> plan (value)",
        "- process_group -> plan (comms)",
        "- plan -> shard (value)",
    ]


def test_collectives_in_a_diff_are_short() -> None:
    old, new = (Graph([Step("a", lane="comms", collectives=c)]) for c in ((), (Collective("barrier"),)))
    assert str(old.diff(new)) == "~ a: collectives () -> (barrier@world)"


def test_where_a_step_is_declared_is_no_difference() -> None:
    other = TRAINER.replacing(Step("reader", needs=("config",), lane="io:data", call_site="train.py:3"))
    assert not TRAINER.diff(other)
    assert str(TRAINER.diff(other)) == "no difference"
    assert other.digest() == TRAINER.digest() and other != TRAINER


# Text


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "import sys; from initopt.graph import Graph; graph = Graph.from_json(sys.stdin.read()); print(graph.digest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], input=TRAINER.to_json(), capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == TRAINER.digest()


def test_the_digest_sees_what_ranks_must_agree_on() -> None:
    digests = {
        TRAINER.digest(),
        Graph(TRAINER.values(), name="x", inputs=["config"]).digest(),
        Graph(TRAINER.values(), name="dlrm", inputs=["config", "more"]).digest(),
        Graph(reversed(list(TRAINER.values())), name="dlrm", inputs=["config"]).digest(),
        TRAINER.replacing(Step("reader", lane="io:data")).digest(),
    }
    assert len(digests) == 5


def test_a_whole_number_of_seconds_is_the_same_timeout() -> None:
    graphs = [Graph([Step("a", timeout=timeout)]) for timeout in (60, 60.0)]
    assert graphs[0].digest() == graphs[1].digest() == Graph.from_json(graphs[0].to_json()).digest()


def test_json_has_one_step_on_each_line() -> None:
    lines = TRAINER.to_json().splitlines()
    assert lines[0] == '{"version": 1, "name": "dlrm", "inputs": ["config"], "steps": ['
    assert lines[3] == ' {"name": "model", "needs": ["config"], "uses": ["rng"]},'
    assert len(lines) == len(TRAINER) + 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a graph saved by initopt"),
        ("[]", "not a graph saved by initopt"),
        ('{"version": 2, "name": "x", "inputs": [], "steps": []}', "saved in format 2; this initopt reads format 1"),
        ('{"version": 1, "name": "x", "inputs": [], "steps": [{"name": 1}]}', r"\$\.steps\[0\]\.name"),
        ('{"version": 1, "name": "x", "inputs": [], "steps": [{"name": "a", "lane": "x"}]}', "no lane"),
    ],
)
def test_a_file_that_is_no_graph_is_refused(text: str, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        Graph.from_json(text)


def test_mermaid() -> None:
    graph = Graph([Step('a "b"', lane="comms"), Step("c", lane="comms"), Step("d", needs=("c",), after=('a "b"',))])
    assert graph.to_mermaid() == (
        "flowchart LR\n"
        '  subgraph lane0["comms"]\n'
        '    s0["a #34;b#34;"]\n'
        '    s1["c"]\n'
        "  end\n"
        '  subgraph lane1["main"]\n'
        '    s2["d"]\n'
        "  end\n"
        '  s0 -.->|"comms"| s1\n'
        "  s1 --> s2\n"
    )


def test_dot() -> None:
    graph = Graph([Step("a", uses=("rng",)), Step("b\\", uses=("rng",)), Step("d", after=("a",))], name='a "b"')
    assert graph.to_dot() == (
        'digraph "a \\"b\\"" {\n'
        "  rankdir=LR; node [shape=box];\n"
        "  subgraph cluster_0 {\n"
        '    label="main";\n'
        '    "a";\n'
        '    "b\\\\";\n'
        '    "d";\n'
        "  }\n"
        '  "a" -> "b\\\\" [style=dashed, label="rng"];\n'
        '  "a" -> "d" [style=dashed];\n'
        "}\n"
    )


def test_a_value_is_drawn_although_another_path_implies_its_order() -> None:
    graph = Graph([Step("a"), Step("b", needs=("a",)), Step("c", needs=("a", "b"))])
    assert "s0 --> s2" in graph.to_mermaid()


def test_networkx_gets_steps_and_kinds() -> None:
    graph = TRAINER.to_networkx()
    assert tuple(graph) == TRAINER.order()
    assert graph.nodes["reader"] == {"step": TRAINER["reader"], "lane": "io:data"}
    assert graph.edges["process_group", "plan"] == {"kind": "resource", "resource": "comms"}


def test_building_a_graph_imports_no_graph_library() -> None:
    code = (
        "import sys; from initopt.graph import Graph, Step\n"
        "graph = Graph([Step('b', needs=('a',)), Step('a', uses=('rng',))])\n"
        "graph.order(), graph.slack({'a': 1.0, 'b': 1.0}), graph.digest(), graph.to_json()\n"
        "sys.exit(', '.join({'networkx', 'msgspec'} & set(sys.modules)) or None)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
