"""From samples to the batch: alignment, masks, columns about tools, and refusal of what must not reach the
loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conversing import tool_reply
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import answer, part
from ragged_rows import whole

from verl_rc.records import rollout_batch
from verl_rc.records.batches import RolloutBatch
from verl_rc.records.fingerprints import TokensChangedError, fingerprints, require_sampled_tokens
from verl_rc.records.parts import Answer, Part, Sample
from verl_rc.records.ragged import Column, Ragged
from verl_rc.records.ragged_column import RaggedColumn
from verl_rc.records.rollout_batch import build_rollout_batch, check_versions

SHORT = Sample(0, [part([7, 2], 4, [-0.5, -0.25])], finished=True)
CUT_AND_ANSWERED = Sample(
    1,
    [part([11, 12], 3), answer([90]), part([13], 3), part([14, 15], 5)],
    finished=True,
    replies=[tool_reply()],
)
"""An update has cut its second turn, which follows a tool's answer."""


def rows_of_samples(*samples: Sample, with_tools: bool = False) -> Ragged[RolloutBatch]:
    prompts = [[1], [1, 3]][: len(samples)]
    return build_rollout_batch(prompts, [0] * len(samples), samples, with_tools=with_tools)


def build(*samples: Sample, with_tools: bool = False) -> RolloutBatch:
    """Padded with 0."""
    return whole(rows_of_samples(*samples, with_tools=with_tools))


def test_rows_hold_what_was_sampled_and_prompts_are_padded_on_the_left() -> None:
    rollouts = build(SHORT, CUT_AND_ANSWERED)
    assert rollouts.tokens.prompts.tolist() == [[0, 1], [1, 3]]
    assert rollouts.tokens.responses.tolist() == [[7, 2, 0, 0, 0, 0], [11, 12, 90, 13, 14, 15]]
    assert rollouts.tokens.response_lengths.tolist() == [2, 6]
    assert rollouts.policy_versions.tolist() == [[4, 4, 0, 0, 0, 0], [3, 3, -1, 3, 5, 5]]
    assert rollouts.rollout_log_probs.tolist() == [
        [-0.5, -0.25, 0, 0, 0, 0],
        [-0.5, -0.5, 0, -0.5, -0.5, -0.5],
    ]
    assert rollouts.response_mask.int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1]]
    assert rollouts.finished.tolist() == [True, True]
    assert build(SHORT).tokens.responses.shape == (1, 2)


def test_a_conversation_that_begins_in_a_response_is_marked_at_its_first_token() -> None:
    restarted = Sample(0, [part([11], 4), replace(answer([90, 91]), restarts=True), part([12], 4)])
    restarts = build(SHORT, restarted).tokens.restarts
    assert restarts is not None
    assert restarts.int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    assert build(SHORT, CUT_AND_ANSWERED).tokens.restarts is None


def test_the_columns_about_tools_are_there_where_the_run_has_tools() -> None:
    rollouts = build(SHORT, CUT_AND_ANSWERED, with_tools=True)
    assert rollouts.num_turns is not None
    assert rollouts.tool_calls is not None
    assert (rollouts.num_turns.tolist(), rollouts.tool_calls.tolist()) == ([2, 4], [0, 1])
    without = build(SHORT)
    assert without.num_turns is without.tool_calls is without.engines is None


def test_the_reward_of_a_turn_lies_on_its_last_sampled_token() -> None:
    """An update has cut the second turn into two parts, whose last token gets the reward of both."""
    unanswered = Sample(0, [part([7, 2], 4), answer([90]), part([5], 4)])
    ended_by_answer = Sample(1, [part([11], 4), answer([90, 91])], finished=False)

    def rewards(samples: list[Sample], *by_turn: list[float]) -> list[list[float]]:
        rollouts = whole(build_rollout_batch([[1]] * 2, [0] * 2, samples, turn_rewards=by_turn))
        assert rollouts.turn_rewards is not None
        return rollouts.turn_rewards.tolist()

    assert rewards([SHORT, CUT_AND_ANSWERED], [2.0], [0.5, -1.0]) == [
        [0, 2, 0, 0, 0, 0],
        [0, 0.5, 0, 0, 0, -1],
    ]
    assert rewards([unanswered, ended_by_answer], [3.0], [0.25]) == [[0, 3, 0, 0], [0.25, 0, 0, 0]]
    assert build(SHORT).turn_rewards is None
    with pytest.raises(ValueError, match="row 1 has 3 rewards for 2 turns"):
        rewards([SHORT, CUT_AND_ANSWERED], [], [1.0, 1.0, 1.0])


def test_the_engine_of_each_row_is_known_where_every_sample_has_one() -> None:
    of_one, of_two = Sample(0, SHORT.parts, engine=1), Sample(1, SHORT.parts, engine=0)
    engines = build(of_one, of_two).engines
    assert engines is not None
    assert engines.tolist() == [1, 0]
    assert build(of_one, SHORT).engines is None


def test_a_missing_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="1 requests, 2 samples"):
        build_rollout_batch([[1]], [0], [SHORT, SHORT])


def test_a_positive_log_prob_names_its_row() -> None:
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        build(SHORT, Sample(1, [part([8, 9], 4, [-1.0, 0.7])]))


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_is_left_to_rollout_correction(broken: float) -> None:
    """``nonfinite_logprob`` says what becomes of it; the run stops where there are too many."""
    assert not build(SHORT, Sample(1, [part([8, 9], 4, [-1.0, broken])])).rollout_log_probs[1, 1].isfinite()


COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@st.composite
def responses(draw: st.DrawFn) -> list[Part | Answer]:
    """Parts and answers in any order; some parts have recorded lists beside their tokens."""
    made: list[Part | Answer] = []
    for _ in range(draw(st.integers(0, 4))):
        counts = np.array(draw(COUNTS))
        ids = draw(st.lists(st.integers(0, 5), min_size=len(counts), max_size=len(counts)))
        if draw(st.booleans()):
            made.append(answer(ids))
            continue
        values = np.arange(counts.sum()) + draw(st.integers(0, 9))
        dtypes = {"support": "int32", "experts": "uint8"}
        recorded = draw(st.sets(st.sampled_from(sorted(dtypes))))
        columns = {name: RaggedColumn.from_counts(counts, values.astype(dtypes[name])) for name in recorded}
        made.append(replace(part(ids, 3), columns=columns))
    return made


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4), responses()), min_size=1))
def test_fingerprints_of_samples_are_those_of_the_batch_that_they_become(
    rows: list[tuple[list[int], list[Part | Answer]]],
) -> None:
    samples = [Sample(number, parts) for number, (_, parts) in enumerate(rows)]
    batch = build_rollout_batch([prompt for prompt, _ in rows], range(len(rows)), samples)
    assert batch.fingerprints is not None
    assert batch.fingerprints.tolist() == fingerprints(batch).tolist()


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("responses", lambda responses: np.roll(responses, 1)),
        ("responses", lambda responses: responses[::-1]),
        ("prompts", lambda prompts: prompts[::-1]),
        ("support_counts", lambda counts: np.roll(counts, 1)),
        ("response_mask", lambda mask: np.roll(mask, 1)),
        ("response_mask", np.ones_like),
    ],
)
def test_a_batch_that_is_built_wrongly_is_not_trained_on(
    monkeypatch: pytest.MonkeyPatch, field: str, spoil: Callable[[Column], Column]
) -> None:
    def make_spoilt(kind: Any, columns: dict[str, Column], *further: Any) -> Any:
        return Ragged(kind, {**columns, field: spoil(columns[field])}, *further)

    monkeypatch.setattr(rollout_batch, "Ragged", make_spoilt)
    column = RaggedColumn.from_counts(np.array([1, 2]), np.array([7, 2, 3]))
    recorded = replace(part([7, 2], 4), columns={"support": column})
    batch = rows_of_samples(Sample(0, [recorded, answer([8])]), Sample(1, [part([7, 3], 4), answer([9, 8])]))
    with pytest.raises(TokensChangedError):
        require_sampled_tokens(batch.fingerprints, batch)


def test_a_token_of_other_weights_is_refused() -> None:
    def of_versions(*versions: int) -> Sample:
        parts: list[Part] = [part([8], version) for version in versions]
        return Sample(1, parts)

    rollouts = rows_of_samples(SHORT, of_versions(4, 3, 3))
    with pytest.raises(
        RuntimeError, match=r"version 4, but 2 tokens come from version \[3\] \(first in row 1\)"
    ):
        check_versions(rollouts, expected_version=4)
    check_versions(rows_of_samples(SHORT, of_versions(4, 4)), expected_version=4)
    assert torch.equal(rollouts.fingerprints, build(SHORT, of_versions(4, 4, 4)).fingerprints)
