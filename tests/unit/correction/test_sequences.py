"""Chunks hold every row once, as far as its response reaches, and there is always one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.correction import SequenceContext, compute_rollout_correction
from verl_rc.correction.sequences import LogProbs, newest_version, sequence_chunks


@pytest.mark.parametrize(
    ("reach", "width", "sizes"),
    [
        ([4, 4, 4, 4, 4], 4, [(2, 4), (2, 4), (1, 4)]),
        ([9, 30, 100], 100, [(1, 100), (1, 30), (1, 9)]),
        ([1, 4, 2, 1, 0], 4, [(2, 4), (3, 1)]),
        ([0, 0], 4, [(2, 1)]),
        ([], 4, [(0, 4)]),
        ([0, 0, 0], 0, [(3, 0)]),
    ],
)
def test_sizes(
    reach: list[int], width: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_rc.correction.sequences.chunk_positions", lambda _: 9)
    mask = torch.zeros(len(reach), width, dtype=torch.bool)
    for row, last in enumerate(reach):
        mask[row, last // 2 : last] = True
    chunks = sequence_chunks(mask)
    numbered = torch.arange(len(reach) * width).view(len(reach), width)
    parts = [chunk.take(numbered) for chunk in chunks]
    assert [part.shape for part in parts] == sizes
    rows = torch.cat([chunk.take(torch.arange(len(reach))) for chunk in chunks])
    assert rows.tolist() == torch.cat([chunk.rows for chunk in chunks]).tolist()
    assert sorted(rows.tolist()) == list(range(len(reach)))
    copied = torch.zeros_like(numbered)
    for chunk, part in zip(chunks, parts, strict=True):
        chunk.write(part, copied)
    assert copied[mask].tolist() == numbered[mask].tolist()


def test_without_numbers_to_read_rows_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_rc.correction.sequences.chunk_positions", lambda _: 9)
    with FakeTensorMode():
        chunks = sequence_chunks(torch.zeros(5, 4, dtype=torch.bool))
    assert [(chunk.rows.shape, chunk.width) for chunk in chunks] == [((2,), 4), ((2,), 4), ((1,), 4)]


def test_ages_count_from_the_newest_version_or_the_given_one() -> None:
    versions, mask = (
        torch.tensor([[5, 4, 9], [3, 3, 3]]),
        torch.tensor([[True, True, False], [True, True, True]]),
    )
    newest = newest_version(versions, mask)
    assert newest == 5
    for current, expected in ((newest, [[0, 1, 0], [2, 2, 2]]), (6, [[1, 2, 0], [3, 3, 3]])):
        ages = SequenceContext(policy_versions=versions, current_version=current).ages(mask)
        assert ages is not None
        assert ages.tolist() == expected
    ages = SequenceContext(policy_versions=torch.tensor([5, 3]), current_version=5).ages(mask)
    assert ages is not None
    assert ages.tolist() == [[0, 0, 0], [2, 2, 2]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advantages", torch.zeros(3)),
        ("policy_versions", torch.zeros(4, dtype=torch.int64)),
        ("scores", torch.zeros(3, 3)),
        ("group_ids", ["a", "b"]),
    ],
)
def test_facts_must_fit_the_rows(name: str, value: object) -> None:
    square = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        compute_rollout_correction(square, square, square, {"diagnostics": "full"}, **{name: value})


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 4\] and \[2, 3\]"):
        LogProbs(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3))
