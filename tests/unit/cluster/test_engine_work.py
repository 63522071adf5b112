"""How requests are shared out among engines, and that every sample comes back once, in the order asked
for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_samples import first_tokens, of_parts, part, sample

from verl_rc.cluster.engine_work import EngineWork, assign
from verl_rc.data.parts import Sample
from verl_rc.rollout.engine import Collected, Interrupted
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions

OPTIONS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=2, stop_token_ids=())


def collected(numbers: list[int], tokens: list[int] | None = None) -> Collected:
    """One token each, its number if not given."""
    return Collected(
        [sample(number, [token]) for number, token in zip(numbers, tokens or numbers, strict=True)]
    )


def groups(*sizes: int) -> list[list[int]]:
    return [[group] for group, size in enumerate(sizes) for _ in range(size)]


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
    assert assign(prompts, unfinished, evenly) == placed


@given(
    sizes=st.lists(st.integers(1, 9), max_size=12),
    unfinished=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    evenly=st.booleans(),
)
def test_everything_is_placed_once_and_as_the_rule_says(
    sizes: list[int], unfinished: list[int], evenly: bool
) -> None:
    prompts = groups(*sizes)
    placed = assign(prompts, unfinished, evenly)
    assert sorted(position for positions in placed for position in positions) == list(range(len(prompts)))
    assert all(positions == sorted(positions) for positions in placed)
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


def test_what_comes_back_in_any_order_is_taken_in_the_order_asked_for() -> None:
    work = EngineWork(2)
    numbers, handed = work.add(
        [GenerationRequest([seed // 2], seed) for seed in range(8)], OPTIONS, awaited=True, evenly=True
    )
    assert numbers == list(range(8))
    assert {engine: [sample.number for sample in samples] for engine, samples in handed.items()} == {
        0: [0, 1, 4, 5],
        1: [2, 3, 6, 7],
    }
    assert work.num_unfinished(numbers) == {0: 4, 1: 4}
    work.record({1: collected([3, 7]), 0: collected([5])})
    assert work.finished() == [3, 5, 7]
    assert work.num_unfinished(numbers) == {0: 3, 1: 2}
    assert [sample.number for sample in work.unfinished(0)] == [0, 1, 4]
    assert first_tokens(work.take([7, 5])) == [7, 5]
    work.record({0: collected([0, 1, 4]), 1: collected([2, 6])})
    assert work.finished() == [0, 1, 2, 3, 4, 6]
    assert work.num_busy() == {}
    first = work.take([0, 1, 2, 3])
    assert first_tokens(first) == [0, 1, 2, 3]
    assert [one.engine for one in first] == [0, 0, 1, 1]
    assert first_tokens(work.take([6, 4])) == [6, 4]
    with pytest.raises(KeyError):
        work.take([6])


def test_a_single_engine_is_not_named() -> None:
    work = EngineWork(1)
    work.add([GenerationRequest([0], 0)], OPTIONS, awaited=True, evenly=True)
    work.record({0: collected([0])})
    assert work.take([0])[0].engine is None


def test_new_work_goes_where_the_least_is_left() -> None:
    work = EngineWork(2)
    work.add([GenerationRequest([seed // 2], seed) for seed in range(8)], OPTIONS, awaited=True, evenly=True)
    work.record({1: collected([3, 7])})
    _, handed = work.add([GenerationRequest([9], 9)], OPTIONS, awaited=False, evenly=False)
    assert list(handed) == [1]


def test_what_every_engine_gets_has_numbers_below_all_others_and_comes_back_by_engine() -> None:
    work = EngineWork(2)
    first, _ = work.add([GenerationRequest([0], 5)], OPTIONS, awaited=False, evenly=False)
    numbers, handed = work.add_to_each([GenerationRequest([9], 1), GenerationRequest([9], 2)], OPTIONS)
    assert sorted(number for of_engine in numbers for number in of_engine) == [-5, -4, -3, -2]
    assert max(number for of_engine in numbers for number in of_engine) < min(first)
    assert {engine: [one.request.seed for one in samples] for engine, samples in handed.items()} == {
        0: [1, 2],
        1: [1, 2],
    }
    assert [[one.number for one in handed[engine]] for engine in (0, 1)] == numbers
    assert not any(one.ahead for samples in handed.values() for one in samples)
    work.record({1: collected(numbers[1], [71, 72])})
    assert first_tokens(work.take(numbers[1])) == [71, 72]
    assert work.num_unfinished(numbers[0]) == {0: 2}
    assert list(work.num_busy()) == [0]


def test_what_was_given_up_is_left_out_and_its_number_is_not_used_again() -> None:
    work = EngineWork(1)
    first, _ = work.add(
        [GenerationRequest([0], seed) for seed in range(3)], OPTIONS, awaited=True, evenly=True
    )
    work.record({0: collected([0])})
    work.discard(first)
    assert work.num_busy() == {}
    second, _ = work.add([GenerationRequest([0], 33)], OPTIONS, awaited=True, evenly=True)
    assert second == [3]
    work.record({0: collected([1, 3], [1, 33])})
    work.record({0: collected([2])})  # it had ended before it was given up
    assert work.finished() == [3]
    assert first_tokens(work.take(second)) == [33]


def test_what_an_update_cut_is_continued_by_another_engine_and_what_has_ended_is_not() -> None:
    work = EngineWork(2)
    numbers, _ = work.add(
        [GenerationRequest([seed // 2], seed) for seed in range(4)], OPTIONS, awaited=False, evenly=False
    )
    work.record({0: collected([0])})
    so_far = [sample(number, [token], version=4) for number, token in ((0, 70), (1, 71), (99, 99))]
    work.record_parts({0: Interrupted(so_far), 1: Interrupted([])})
    (continued,) = work.unfinished(0)
    assert continued.request.seed == 1
    assert of_parts(continued.request.parts) == [(71, 0.0, 4)]
    assert [sample.request.parts for sample in work.unfinished(1)] == [(), ()]
    assert work.parts(1) == (list(continued.request.parts), 0)
    assert work.parts(3) == ([], 0)
    assert numbers == [0, 1, 2, 3]


def test_with_fixed_places_a_sample_goes_to_the_same_engine_whatever_the_others_do() -> None:
    requests = [GenerationRequest([seed // 2], seed) for seed in range(6)]
    whole, resumed = EngineWork(2, by_seed=True), EngineWork(2, by_seed=True)
    _, handed = whole.add(requests, OPTIONS, awaited=False, evenly=False)
    assert {engine: [one.request.seed for one in given] for engine, given in handed.items()} == {
        0: [0, 2, 4],
        1: [1, 3, 5],
    }
    _, handed = resumed.add(requests[3:], OPTIONS, awaited=False, evenly=False)
    assert {engine: [one.request.seed for one in given] for engine, given in handed.items()} == {
        0: [4],
        1: [3, 5],
    }


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
    work.add([GenerationRequest([seed // 2], seed) for seed in range(8)], OPTIONS, awaited=True, evenly=True)
    work.record({1: collected([2])})
    with pytest.raises(RuntimeError, match=message):
        work.record({0: collected([4]), 1: second})
    assert work.finished() == [2, 3, 4]
    assert first_tokens(work.take([3, 2, 4])) == [3, 2, 4]
    assert work.num_unfinished(range(8)) == {0: 3, 1: 2}
