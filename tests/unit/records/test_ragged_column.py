"""Lists beside tokens keep to their tokens on every way that tokens take."""

import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from ragged_rows import whole

from verl_rc.records.batches import RolloutBatch
from verl_rc.records.dataset import PromptRow
from verl_rc.records.fingerprints import TokensChangedError, fingerprints, require_sampled_tokens
from verl_rc.records.groups import Group, GroupSample, pack, unpack
from verl_rc.records.parts import Answer, Part, Sample
from verl_rc.records.ragged import Ragged
from verl_rc.records.ragged_column import RaggedColumn
from verl_rc.records.rollout_batch import build_rollout_batch

SETS = [[5, 7], [6], [], [8, 9, 10]]
"""Of four tokens; nothing is recorded of the third."""
TOKENS = [5, 6, 4, 9]


def column(lists: list[list[int]], dtype: str = "int32") -> RaggedColumn:
    values = np.array([value for one in lists for value in one], dtype=dtype)
    return RaggedColumn.from_counts(np.array([len(one) for one in lists]), values)


def lists(column: RaggedColumn) -> list[list[int]]:
    return [column[token : token + 1].values.tolist() for token in range(len(column))]


def part(first: int = 0, end: int = 4, version: int = 3, recorded: bool = True) -> Part:
    ids = torch.tensor(TOKENS[first:end], dtype=torch.int32)
    return Part(ids, ids / -7, version, {"support": column(SETS[first:end])} if recorded else {})


def test_slices_and_joins_keep_the_lists_and_their_dtype() -> None:
    whole = column(SETS, "uint8")
    assert lists(whole) == SETS
    assert lists(RaggedColumn.joined([whole[1:3], whole[:1]])) == [[6], [], [5, 7]]
    assert whole[1:].values.dtype == np.uint8
    assert lists(RaggedColumn.empty(2)) == [[], []]
    with pytest.raises(ValueError, match="must rise from 0 to its 2 values"):
        RaggedColumn(np.array([0, 1]), np.zeros(2, dtype=np.uint8))
    with pytest.raises(
        ValueError, match=r"Part.columns\['support'\] must have a list for each of 3 tokens, got 4"
    ):
        replace(part(0, 3), columns={"support": column(SETS)})


def test_lists_travel_with_their_part_and_through_a_checkpoint() -> None:
    """In a conversation, where an update has cut a turn, and beside a part without any."""
    arrived = pickle.loads(pickle.dumps(part()))
    assert lists(arrived.columns["support"]) == SETS
    answer = Answer(torch.tensor([90, 91], dtype=torch.int32))
    turns: list[Part | Answer] = [part(0, 2), answer, part(2, 4, 5), part(0, 3, 5, recorded=False)]
    row = PromptRow(0, [1, 2], [], "digits", "3", {})
    responses = [Sample(0, turns), Sample(1, [part()])]
    group = Group(7, row, 0, 4, 3, [GroupSample(7, one.number, [1, 2], one) for one in responses])
    file = io.BytesIO()
    torch.save(pack([group]), file)
    packed = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    (restored,) = unpack(packed, lambda _: row)
    found = [
        [lists(turn.columns["support"]) for turn in sample.response.parts if isinstance(turn, Part)]
        for sample in restored.samples
    ]
    assert found == [[SETS[:2], SETS[2:], [[], [], []]], [SETS]]
    del packed["columns"]  # a checkpoint of an older version
    assert unpack(packed, lambda _: row)[0].samples[1].response.parts[0].columns == {}  # type: ignore[union-attr]


def rollouts() -> Ragged[RolloutBatch]:
    answer = Answer(torch.tensor([90, 91], dtype=torch.int32))
    samples = [Sample(0, [part(0, 2), answer, part(2, 4, 5)]), Sample(1, [part(1, 2)]), Sample(2)]
    return build_rollout_batch([[1], [1, 2], [3]], [0, 1, 2], samples)


def test_a_batch_has_them_behind_each_other_in_every_row_and_a_rank_gets_those_of_its_rows() -> None:
    rows = rollouts().tokens
    tokens = whole(rows)
    assert tokens.support_counts is not None
    assert tokens.support_ids is not None
    assert tokens.support_counts.tolist() == [[2, 1, 0, 0, 0, 3], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert tokens.support_ids.tolist() == [[5, 7, 6, 8, 9, 10], [6, 0, 0, 0, 0, 0], [0] * 6]
    arrived = pickle.loads(pickle.dumps(rows.take([2, 1]))).padded([0, 1])
    assert (arrived.support_counts.tolist(), arrived.support_ids.tolist()) == ([[0], [1]], [[0], [6]])
    every = pickle.loads(pickle.dumps(rows.take([2, 1, 0]))).padded([1, 2, 0])
    assert torch.equal(every.support_counts, tokens.support_counts[[1, 0, 2]])
    assert torch.equal(every.support_ids, tokens.support_ids[[1, 0, 2]])
    assert every.support_ids.dtype == torch.int32


@pytest.mark.parametrize("field", ["support_counts", "support_ids"])
def test_lists_that_changed_on_their_way_are_noticed(field: str) -> None:
    batch = rollouts()
    assert batch.fingerprints is not None
    assert torch.equal(fingerprints(batch), batch.fingerprints)
    getattr(batch, field)[1] += 1
    with pytest.raises(TokensChangedError, match=r"the first are \[0\]"):
        require_sampled_tokens(batch.fingerprints, batch)
