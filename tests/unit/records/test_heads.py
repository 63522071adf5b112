"""Heads of different sizes come back as they were recorded."""

import numpy as np
import torch

from verl_rc.records.heads import head_column, heads
from verl_rc.records.ragged_column import RaggedColumn

IDS = np.array([[7, 3, 9], [4, 1, 2], [5, 6, 8]])
LOGS = np.array([[-0.1, -2.5, -30.0], [-0.7, -0.7, -np.inf], [0.0, -np.inf, -np.inf]], dtype=np.float32)


def test_a_head_lists_its_tokens_and_then_the_bits_of_their_log_probs() -> None:
    column = head_column(IDS, LOGS)
    assert column.counts.tolist() == [6, 4, 2]
    assert column.values.dtype == np.int32
    assert column.values[:3].tolist() == [7, 3, 9]
    assert column.values[3:6].view(np.float32).tolist() == LOGS[0].tolist()
    assert column[1:].values.tolist() == column.values[6:].tolist()


def test_a_padded_batch_has_the_heads_at_their_places() -> None:
    """The second row has a token without a head between two with one, and another row is wider."""
    whole = head_column(IDS, LOGS)
    rows = [[whole[0:1], whole[1:2]], [whole[2:3], RaggedColumn.empty(1), whole[0:1]]]
    counts = torch.zeros(2, 3, dtype=torch.int64)
    values = torch.zeros(2, 10, dtype=torch.int32)
    for row, columns in enumerate(rows):
        counts[row, : len(columns)] = torch.tensor([int(column.counts[0]) for column in columns])
        flat = np.concatenate([column.values.astype(np.int32) for column in columns])
        values[row, : len(flat)] = torch.from_numpy(flat)
    ids, logs = heads(counts, values)
    nothing = [-1, -1, -1]
    assert ids.tolist() == [[[7, 3, 9], [4, 1, -1], nothing], [[5, -1, -1], nothing, [7, 3, 9]]]
    assert logs[0, 0].tolist() == LOGS[0].tolist()
    assert logs[0, 1].tolist() == LOGS[1].tolist()
    assert logs[1, 0].tolist() == LOGS[2].tolist()
    assert logs[1, 1].tolist() == [-torch.inf] * 3
    assert logs[1, 2].tolist() == LOGS[0].tolist()
    assert (ids.dtype, logs.dtype) == (torch.int64, torch.float32)


def test_a_batch_without_any_head_is_one_token_wide() -> None:
    ids, logs = heads(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int32))
    assert ids.tolist() == [[[-1], [-1]]]
    assert bool((logs == -torch.inf).all())
