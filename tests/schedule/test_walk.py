"""How a rank goes through its actions: what is posted, waited for and released, and no deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import Action, Schedule, build, parse_schedule, stage_ranks
from graphaccel.schedule.walk import Doing, walk

Walk = Callable[[Sequence[Action]], Iterable[Doing]]
Message = tuple[int, int, int, str]  # source stage, destination stage, microbatch, direction


def message_of(action: Action) -> Message:
    return (*action.message, action.microbatch, action.direction)


def said(doings: Iterable[Doing]) -> str:
    return " ".join(f"{d.verb}:{d.action}" for d in doings)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule; neighbours are linked both ways, skip edges are linked one way or both."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    ranks = draw(st.integers(1, 5))
    per_rank = draw(st.integers(1, 3)) if name == "interleaved" else 1
    microbatches = draw(st.integers(1, 9))
    stages = ranks * per_rank
    pairs = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    some = st.sets(st.sampled_from(pairs), max_size=6) if pairs else st.just(set())
    near = {(s, s + 1) for s in range(stages - 1)}
    forward = near | draw(some)
    backward = {(b, a) for a, b in near | draw(some)}
    table = build(name, ranks, per_rank, microbatches)
    return with_communication(table, frozenset(forward), frozenset(backward))


def stuck(schedule: Schedule, going: Walk = walk) -> list[str]:
    """Run all ranks by rendezvous; what those that can not go on are at, in the end.

    A receive is posted and a send is issued at once. A wait ends when the message has been sent.
    The
    release of a send ends when its receive, and those of earlier sends on its channel, are posted:
    the hardest that a library may make it (nothing is buffered, messages of a channel pass in
    order).
    """
    ranks = stage_ranks(schedule)
    queues: list[Iterator[Doing]] = [iter(list(going(actions))) for actions in schedule]
    heads = [next(queue, None) for queue in queues]
    sent: dict[tuple, list[Message]] = defaultdict(list)
    posted: dict[tuple, list[Message]] = defaultdict(list)

    def channel(action: Action) -> tuple:
        source, destination = action.message
        return ranks[source], ranks[destination], action.direction

    def ready(doing: Doing) -> bool:
        if doing.verb not in ("wait", "release"):
            return True
        way, message = channel(doing.action), message_of(doing.action)
        if message not in sent[way]:
            return False
        until = sent[way].index(message) + 1
        return sent[way][:until] == posted[way][:until]

    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while (head := heads[rank]) is not None and ready(head):
                if head.verb in ("post", "send"):
                    table = posted if head.verb == "post" else sent
                    table[channel(head.action)].append(message_of(head.action))
                heads[rank] = next(queue, None)
                moved = True
    return [f"{head.verb}:{head.action}" for head in heads if head is not None]


@given(schedules())
@settings(deadline=None, max_examples=200)
def test_each_action_is_done_once_and_in_order(schedule: Schedule) -> None:
    for actions in schedule:
        doings = list(walk(actions))
        of = {verb: [d.action for d in doings if d.verb == verb] for verb in
              ("post", "wait", "run", "send", "release", "reduce")}  # fmt: skip
        kinds = {"run": ("forward", "backward"), "send": ("send",), "reduce": ("reduce",)}
        for verb, those in kinds.items():
            assert of[verb] == [a for a in actions if a.kind in those]
        receives = [a for a in actions if a.kind == "receive"]
        assert of["post"] == receives, "posted in the order of the channel"
        assert sorted(map(str, of["wait"])) == sorted(map(str, receives))
        assert sorted(map(str, of["release"])) == sorted(map(str, of["send"]))


@given(schedules())
@settings(deadline=None, max_examples=200)
def test_posted_before_waited_for_before_run_and_sent_before_released(schedule: Schedule) -> None:
    for actions in schedule:
        at = {(d.verb, d.action): i for i, d in enumerate(walk(actions))}
        for verb, action in at:
            if verb == "wait":
                user = Action(action.direction or "forward", action.stage, action.microbatch)
                order = [at["post", action], at["wait", action], at["run", user]]
                assert order == sorted(order)
            elif verb == "send":
                maker = Action(action.direction or "forward", action.stage, action.microbatch)
                order = [at["run", maker], at["send", action], at["release", action]]
                assert order == sorted(order)


@given(schedules())
@settings(deadline=None, max_examples=300)
def test_no_schedule_deadlocks_when_nothing_is_buffered(schedule: Schedule) -> None:
    assert stuck(schedule) == []


def test_a_skipping_gradient_is_held_until_the_receiver_had_its_turn() -> None:
    """Three ranks of two stages each; stage 5 also sends to stage 0, which runs after stage 2."""
    forward = frozenset({(s, s + 1) for s in range(5)} | {(0, 5)})
    backward = frozenset((b, a) for a, b in forward)
    schedule = with_communication(build("interleaved", 3, 2, 3), forward, backward)
    assert stuck(schedule) == []
    order = said(walk(schedule[2])).split()
    assert order.index("release:SB5>4.0") < order.index("run:B2.0")
    assert order.index("release:SB5>0.0") > order.index("run:B2.2")


def test_a_receive_is_posted_one_action_ahead() -> None:
    (_, second) = parse_schedule("F0.0 SF0>1.0 F0.1 SF0>1.1\nRF0>1.0 F1.0 RF0>1.1 F1.1")
    assert said(walk(second)) == (
        "post:RF0>1.0 post:RF0>1.1 wait:RF0>1.0 run:F1.0 wait:RF0>1.1 run:F1.1"
    )


def test_what_a_forward_sent_is_held_until_its_backward() -> None:
    (first,) = parse_schedule("F0.0 SF0>1.0 F0.1 SF0>1.1 RB1>0.0 B0.0 RB1>0.1 B0.1 G0")
    assert said(walk(first)) == (
        "run:F0.0 send:SF0>1.0 post:RB1>0.0 run:F0.1 send:SF0>1.1 post:RB1>0.1"
        " wait:RB1>0.0 release:SF0>1.0 run:B0.0 wait:RB1>0.1 release:SF0>1.1 run:B0.1 reduce:G0"
    )


def test_what_a_backward_sent_is_held_until_the_next_backward() -> None:
    (last,) = parse_schedule("F1.0 B1.0 SB1>0.0 F1.1 B1.1 SB1>0.1 G1")
    assert said(walk(last)) == (
        "run:F1.0 run:B1.0 send:SB1>0.0 run:F1.1 run:B1.1 release:SB1>0.0 send:SB1>0.1"
        " reduce:G1 release:SB1>0.1"
    )


def _releasing_at_once(actions: Sequence[Action]) -> Iterator[Doing]:
    """A wrong walk: waits until each send has been taken before it goes on."""
    for doing in walk(actions):
        if doing.verb != "release":
            yield doing
        if doing.verb == "send":
            yield Doing("release", doing.action)


def _posting_late(actions: Sequence[Action]) -> Iterator[Doing]:
    """A wrong walk: posts a receive only when it waits for it, and sends wait to be taken."""
    for doing in _releasing_at_once(actions):
        if doing.verb == "wait":
            yield Doing("post", doing.action)
        if doing.verb != "post":
            yield doing


def test_the_simulation_catches_a_walk_that_deadlocks() -> None:
    """Two ranks that both send before they receive, as in steady 1F1B."""
    table = build("1f1b", 2, 1, 3)
    schedule = with_communication(table, frozenset({(0, 1)}), frozenset({(1, 0)}))
    assert stuck(schedule) == []
    assert stuck(schedule, _posting_late) == ["release:SF0>1.1", "release:SB1>0.0"]
