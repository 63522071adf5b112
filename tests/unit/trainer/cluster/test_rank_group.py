"""Rows are shared out over ranks and named anew there: every one reaches one rank, with its own tokens."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import ray
import torch
from small_models import make_train_batch, ragged

import verl_rc.trainer.cluster.rank_group as rank_group
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.mini_batches import MiniBatch, plan_mini_batches
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.records.batches import Timed, TokenBatch, TrainBatch
from verl_rc.records.microbatch import MicroBatchLimit
from verl_rc.records.ragged import Column, Ragged
from verl_rc.runtime.distributed.child_process import ProcessLostError
from verl_rc.runtime.workers.updates import ActorReport, UpdateRequest
from verl_rc.trainer.cluster import remote
from verl_rc.trainer.cluster.model_groups import ActorGroup
from verl_rc.trainer.cluster.rank_group import RankGroup
from verl_rc.trainer.cluster.rank_processes import RankProcesses
from verl_rc.trainer.cluster.remote import RemoteProcess
from verl_rc.trainer.cluster.watchdog import ProcessIdentity

LENGTHS = [7, 2, 5, 1, 1, 6]
LIMITS = [MicroBatchLimit(max_rows=2), MicroBatchLimit(max_tokens=14)]


class LengthRank:
    """Answers at once: the length of every row it is to score, on each of the row's tokens, and beside it its
    negative; 0 for rows it is not asked about."""

    def call(
        self, method: str, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        lengths = torch.tensor(tokens.lengths["BR"])
        asked = torch.zeros_like(lengths)
        for rows in micro_batches:
            asked[list(rows)] = lengths[list(rows)]
        values = asked.repeat_interleave(lengths).float().numpy()
        return [values, np.stack([values, -values], axis=-1)]


def group_of(ranks: int, sharing: int = 1, balances: bool = True) -> RankGroup:
    group = RankGroup.__new__(RankGroup)
    group._ranks = [LengthRank() for _ in range(ranks)]  # type: ignore[misc]
    group.ranks_per_share, group._shares_prefixes, group._balances = sharing, True, balances
    return group


def mini_batches_of(batch: TrainBatch, rows: int, epochs: int = 1, shuffle: bool = False) -> list[MiniBatch]:
    return plan_mini_batches(
        batch.response_mask.sum(-1),
        batch.loss_mask.sum(-1),
        rows_per_mini_batch=rows,
        epochs=epochs,
        shuffle=shuffle,
        seed=1,
    )


def whole(rows: Ragged[TrainBatch]) -> TrainBatch:
    return rows.padded(range(len(rows.lengths["BR"])))


def test_rows_that_are_not_balanced_go_to_ranks_in_the_order_of_the_mini_batch() -> None:
    batch = make_train_batch(LENGTHS)
    mini_batches = mini_batches_of(batch, 3)
    assigned = group_of(2, balances=False)._assign(
        ragged(batch).tokens, [mini.rows for mini in mini_batches], MicroBatchLimit(max_rows=2)
    )
    for mini, shares in zip(mini_batches, assigned, strict=True):
        assert [row for share in shares for rows in share for row in rows] == list(mini.rows)


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_name_the_rows_they_come_with(ranks: int, limit: MicroBatchLimit) -> None:
    batch = make_train_batch(LENGTHS)
    mini_batches = mini_batches_of(batch, 3, epochs=2, shuffle=True)
    parts = list(group_of(ranks).split(ragged(batch), mini_batches, limit))
    for number, mini_batch in enumerate(mini_batches):
        shares = [(whole(rows), own[number]) for rows, own in parts]
        assert len({len(share.micro_batches) for _, share in shares}) == 1
        for _, share in shares:
            assert (share.num_tokens, share.num_sequences) == (
                mini_batch.num_tokens,
                mini_batch.num_sequences,
            )
        found = [
            [*rows.old_log_probs[row].tolist(), *[0.0] * 7][:7]
            for rows, share in shares
            for part in share.micro_batches
            for row in part
        ]
        assert sorted(found) == sorted(batch.old_log_probs[mini_batch.rows].tolist())


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_scores_come_back_in_the_order_of_the_rows(
    ranks: int, limit: MicroBatchLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "wait_timed", lambda pending: Timed(pending, 0.5))
    batch = make_train_batch(LENGTHS)
    answer = group_of(ranks).score("lengths", ragged(batch.tokens), limit)
    assert answer.result[0].tolist() == [float(length) for length in LENGTHS for _ in range(length)]
    assert torch.equal(answer.result[1], torch.stack([answer.result[0], -answer.result[0]], dim=-1))
    assert answer.busy_seconds == 0.5


def test_a_rank_whose_node_is_gone_is_lost_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine would wait for a place there until the time to become ready is over."""
    ranks = RankProcesses.__new__(RankProcesses)
    ranks._processes = [RemoteProcess.__new__(RemoteProcess) for _ in range(2)]
    for process, node in zip(ranks._processes, ("one", "two"), strict=True):
        process.name = f"actor and reference rank on {node}"
    monkeypatch.setattr(
        remote, "identity_of", lambda process: ProcessIdentity(process.name.split()[-1], 1, 1, "")
    )
    nodes = [{"NodeID": "one", "Alive": True}, {"NodeID": "two", "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    ranks.require_nodes()
    nodes[1]["Alive"] = False
    with pytest.raises(
        ProcessLostError,
        match=r"the node of actor and reference rank on two has left the cluster\. Start Ray",
    ):
        ranks.require_nodes()


class EchoRank:
    """Answers with its number and what it was given."""

    def __init__(self, number: int) -> None:
        self.number = number

    def call(self, method: str, *arguments: object) -> tuple[int, object]:
        return self.number, arguments


def test_ranks_that_share_rows_get_the_same_and_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "shared", lambda rows: rows)  # Ray gives them the value
    answered: list[list[tuple[int, object]]] = []
    monkeypatch.setattr(
        rank_group, "wait_timed", lambda pending: answered.append(pending) or Timed(pending, 0.5)
    )
    batch, group = make_train_batch(LENGTHS), group_of(4, sharing=2)
    lengths = [length for length in LENGTHS for _ in range(length)]
    assert group.score("lengths", ragged(batch.tokens), LIMITS[0]).result[0].tolist() == lengths
    group._ranks = [EchoRank(number) for number in range(4)]  # type: ignore[misc]
    mini_batches = mini_batches_of(batch, 6)
    parts = list(group.split(ragged(batch), mini_batches, MicroBatchLimit(max_tokens=14)))
    assert [number for number, _ in group.call_update(parts).result] == [0, 2]
    assert [given for _, given in answered[-1]] == [parts[0], parts[0], parts[1], parts[1]]
    of_batches = [
        [int(whole(rows).tokens.sequence_lengths[list(part)].sum()) for part in own[0].micro_batches]
        for rows, own in parts
    ]
    assert 14 < max(map(max, of_batches)) <= 28  # tokens of two ranks


def test_a_rank_of_the_actor_gets_what_is_two_fields_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, arrived = make_train_batch(LENGTHS), list[Ragged[TrainBatch]]()
    batch.loss_mask = batch.response_mask  # as where nothing is rejected
    group = ActorGroup.__new__(ActorGroup)
    group._shares_prefixes, group._balances = False, True
    group._ranks, group.ranks_per_share = [EchoRank(0)], 1  # type: ignore[list-item]

    def call_update(arguments: Iterable[tuple[Ragged[TrainBatch], *tuple[object, ...]]]) -> object:
        arrived.extend(rows for rows, *_ in arguments)
        return Timed([ActorReport([], [], [])], 0.5)

    monkeypatch.setattr(group, "call_update", call_update)
    mini_batches = mini_batches_of(batch, 6)
    group.update(
        ragged(batch), mini_batches, LIMITS[0], UpdateRequest(corrector_of(RolloutCorrectionConfig()), 0)
    )
    (rows,) = arrived
    assert rows.columns["loss_mask"] is rows.columns["response_mask"]
