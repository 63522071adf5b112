"""How requests are shared out among engines, and that every sample comes back once, in the order asked
for."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_samples import first_tokens, of_parts, part, sample

from verl_rc.records.parts import Sample
from verl_rc.runtime.rollout.engine import Collected, Interrupted
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.trainer.cluster.engine_work import AssignedRequest, EngineWork, assign, num_unfinished

OPTIONS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=2, stop_token_ids=())


def collected(numbers: list[int], tokens: list[int] | None = None) -> Collected:
    """One token each, its number if not given."""
    return Collected(
        [sample(number, [token]) for number, token in zip(numbers, tokens or numbers, strict=True)]
    )


def groups(*sizes: int) -> list[list[int]]:
    return [[group] for group, size in enumerate(sizes) for _ in range(size)]


def by_engine(engines: list[int], num_engines: int) -> list[list[int]]:
    """The places of each engine's requests."""
    return [
        [place for place, assigned in enumerate(engines) if assigned == engine]
        for engine in range(num_engines)
    ]


def numbers_of(requests: Iterable[AssignedRequest]) -> list[int]:
    return [request.number for request in requests]


def add_eight(work: EngineWork) -> list[AssignedRequest]:
    """Two requests for each of four prompts."""
    requests = [GenerationRequest([seed // 2], seed) for seed in range(8)]
    return work.add(requests, OPTIONS, awaited=False, evenly=True, owners="abcdefgh")


def seeds_by_engine(requests: Iterable[AssignedRequest]) -> dict[int, list[int]]:
    seeds: dict[int, list[int]] = {}
    for request in requests:
        seeds.setdefault(request.engine, []).append(request.queued.request.seed)
    return seeds


@pytest.mark.parametrize(
    ("prompts", "unfinished", "evenly", "placed"),
    [
        (groups(2, 2, 2, 2), [0, 0], True, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (groups(2, 2), [3, 0], False, [[], [0, 1, 2, 3]]),
        (groups(2, 2), [3, 0, 5], False, [[], [0, 1, 2, 3], []]),
        (groups(2, 2, 2), [0, 3], False, [[0, 1, 2, 3], [4, 5]]),
        (groups(4), [0, 0], False, [[0, 1, 2, 3], []]),
        (groups(4), [0, 0], True, [[0, 1], [2, 3]]),
        (groups(3, 3, 3), [0, 0], True, [[0, 1, 2, 6, 7], [3, 4, 5, 8]]),
        (groups(1), [0, 0, 0], True, [[0], [], []]),
        ([[1], [2], [1]], [0, 0], True, [[0, 2], [1]]),
    ],
)
def test_groups_go_to_the_engine_with_the_fewest(
    prompts: list[list[int]], unfinished: list[int], evenly: bool, placed: list[list[int]]
) -> None:
    assert by_engine(assign(prompts, unfinished, evenly), len(unfinished)) == placed


@given(
    sizes=st.lists(st.integers(1, 9), max_size=12),
    unfinished=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    evenly=st.booleans(),
)
def test_everything_is_placed_once_and_as_the_rule_says(
    sizes: list[int], unfinished: list[int], evenly: bool
) -> None:
    prompts = groups(*sizes)
    placed = by_engine(assign(prompts, unfinished, evenly), len(unfinished))
    assert sorted(position for positions in placed for position in positions) == list(range(len(prompts)))
    loads = [before + len(positions) for before, positions in zip(unfinished, placed, strict=True)]
    if evenly:
        share = -(-sum(loads) // len(loads))
        assert all(load <= max(share, before) for load, before in zip(loads, unfinished, strict=True))
    else:
        engines = {(position, engine) for engine, positions in enumerate(placed) for position in positions}
        assert len({(prompts[position][0], engine) for position, engine in engines}) == len(sizes)
        # Graham's bound for taking the least loaded: nobody is ahead of another by more than one group, or by
        # what it had.
        assert max(loads) <= max(min(loads) + max([*sizes, 0]), *unfinished)


def test_what_comes_back_in_any_order_is_taken_once_in_the_order_asked_for_with_its_owner() -> None:
    work = EngineWork(2)
    added = add_eight(work)
    assert numbers_of(added) == list(range(8))
    assert seeds_by_engine(added) == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    assert num_unfinished(added) == {0: 4, 1: 4}
    work.record({1: collected([7, 3]), 0: collected([5])})
    assert num_unfinished(added) == work.num_busy() == {0: 3, 1: 2}
    assert numbers_of(work.unfinished([0])) == [0, 1, 4]
    first = work.take_ended()
    assert [(one.owner, one.sample.engine) for one in first] == [("d", 1), ("f", 0), ("h", 1)]
    assert first_tokens([one.sample for one in first]) == [3, 5, 7]
    assert work.take_ended() == []
    assert numbers_of(work.owned()) == [0, 1, 2, 4, 6]
    work.record({0: collected([0, 1, 4]), 1: collected([2, 6])})
    assert work.num_busy() == {}
    assert numbers_of(work.take_ended()) == [0, 1, 2, 4, 6]
    assert work.owned() == []


def test_what_a_caller_waits_for_is_not_returned_to_owners() -> None:
    work = EngineWork(1)
    awaited = work.add([GenerationRequest([0], 0)], OPTIONS, awaited=True, evenly=True)
    work.record({0: collected([0])})
    assert work.owned() == work.take_ended() == []
    work.take(awaited)
    assert first_tokens([awaited[0].sample]) == [0]


def test_a_single_engine_is_not_named() -> None:
    work = EngineWork(1)
    (request,) = work.add([GenerationRequest([0], 0)], OPTIONS, awaited=True, evenly=True)
    work.record({0: collected([0])})
    assert request.sample.engine is None


def test_new_work_goes_where_the_least_is_left() -> None:
    work = EngineWork(2)
    work.add([GenerationRequest([seed // 2], seed) for seed in range(8)], OPTIONS, awaited=True, evenly=True)
    work.record({1: collected([3, 7])})
    (request,) = work.add([GenerationRequest([9], 9)], OPTIONS, awaited=False, evenly=False)
    assert request.engine == 1


def test_what_every_engine_gets_has_numbers_below_all_others_and_comes_back_by_engine() -> None:
    work = EngineWork(2)
    first = work.add([GenerationRequest([0], 5)], OPTIONS, awaited=False, evenly=False)
    added = work.add_to_each([GenerationRequest([9], 1), GenerationRequest([9], 2)], OPTIONS)
    assert [numbers_of(of_engine) for of_engine in added] == [[-2, -3], [-4, -5]]
    assert max(numbers_of([*added[0], *added[1]])) < first[0].number
    assert seeds_by_engine([*added[0], *added[1]]) == {0: [1, 2], 1: [1, 2]}
    assert not any(request.queued.has_priority for of_engine in added for request in of_engine)
    work.record({1: collected(numbers_of(added[1]), [71, 72])})
    assert first_tokens([request.sample for request in added[1]]) == [71, 72]
    assert num_unfinished(added[0]) == {0: 2}
    assert numbers_of(work.unfinished([0])) == [-3, -2, 0]
    assert list(work.num_busy()) == [0]


def test_what_was_given_up_is_left_out_and_its_number_is_not_used_again() -> None:
    work = EngineWork(1)
    first = work.add(
        [GenerationRequest([0], seed) for seed in range(3)], OPTIONS, awaited=False, evenly=True, owners="abc"
    )
    work.record({0: collected([0])})
    work.cancel(first)
    assert work.num_busy() == {}
    second = work.add([GenerationRequest([0], 33)], OPTIONS, awaited=False, evenly=True, owners="d")
    assert numbers_of(second) == [3]
    work.record({0: collected([1, 3], [1, 33])})
    work.record({0: collected([2])})  # it had ended before it was given up
    assert work.take_ended() == second
    assert first_tokens([second[0].sample]) == [33]


def test_what_an_update_cut_is_continued_by_another_engine_and_what_has_ended_is_not() -> None:
    work = EngineWork(2)
    added = work.add(
        [GenerationRequest([seed // 2], seed) for seed in range(4)], OPTIONS, awaited=False, evenly=False
    )
    work.record({0: collected([0])})
    so_far = [sample(number, [token], version=4) for number, token in ((0, 70), (1, 71), (99, 99))]
    work.record_parts({0: Interrupted(so_far), 1: Interrupted([])})
    (continued,) = work.unfinished([0])
    assert continued is added[1]
    assert of_parts(continued.queued.request.so_far.parts) == [(71, 0.0, 4)]
    assert [request.queued.request.so_far.parts for request in work.unfinished([1])] == [(), ()]
    assert added[0].queued.request.so_far.parts == ()


def test_with_fixed_places_a_sample_goes_to_the_same_engine_whatever_the_others_do() -> None:
    requests = [GenerationRequest([seed // 2], seed) for seed in range(6)]
    whole, resumed = EngineWork(2, by_seed=True), EngineWork(2, by_seed=True)
    added = whole.add(requests, OPTIONS, awaited=False, evenly=False)
    assert seeds_by_engine(added) == {0: [0, 2, 4], 1: [1, 3, 5]}
    added = resumed.add(requests[3:], OPTIONS, awaited=False, evenly=False)
    assert seeds_by_engine(added) == {0: [4], 1: [3, 5]}


TWICE = (
    "rollout engine 1 must return each of its samples once, but sample {} is none of those that it still has"
)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (collected([2, 3]), TWICE.format(2)),  # again
        (collected([3, 3]), TWICE.format(3)),
        (collected([0, 3]), TWICE.format(0)),  # another engine's
        (collected([9, 3]), TWICE.format(9)),  # it was never requested
        (Collected([sample(3, [3])], {2: "the tool failed"}), TWICE.format(2)),
        (Collected([sample(3, [3]), Sample(7, ())]), "engine 1 returned sample 7 without one"),
        (
            Collected([sample(3, [3]), Sample(7, [part([7], 4), part([8], -1)])]),
            "known version of the weights, but rollout engine 1 returned sample 7 with tokens of none",
        ),
    ],
)
def test_an_answer_that_cannot_be_is_refused_and_all_others_are_kept(second: Collected, message: str) -> None:
    work = EngineWork(2)
    added = add_eight(work)
    work.record({1: collected([2])})
    with pytest.raises(RuntimeError, match=message):
        work.record({0: collected([4]), 1: second})
    assert [(one.owner, *first_tokens([one.sample])) for one in work.take_ended()] == [
        ("c", 2),
        ("d", 3),
        ("e", 4),
    ]
    assert num_unfinished(added) == {0: 3, 1: 2}
