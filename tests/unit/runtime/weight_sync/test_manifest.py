"""Manifests cut into buckets; digests see any change of bytes or places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec, tensor_digest

SPECS = tuple(TensorSpec(f"layer.{i}", "float32", (i + 1, 4)) for i in range(5))


def test_buckets_keep_order_and_limit() -> None:
    manifest = Manifest(SPECS)
    buckets = list(manifest.buckets(max_bytes=100))
    assert [[spec.name for spec in bucket] for bucket in buckets] == [
        ["layer.0", "layer.1", "layer.2"],
        ["layer.3"],
        ["layer.4"],
    ]
    assert manifest.num_bytes == 4 * 4 * (1 + 2 + 3 + 4 + 5)


def test_a_bucket_holds_one_dtype() -> None:
    mixed = Manifest((TensorSpec("a", "float32", (1,)), TensorSpec("b", "bfloat16", (1,))))
    assert [len(bucket) for bucket in mixed.buckets(1 << 20)] == [1, 1]


@given(
    size=st.integers(1, 40), place=st.integers(0, 39), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_any_changed_element_changes_the_digest(size: int, place: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(size).to(dtype)
    changed = tensor.clone()
    changed[place % size] += 1
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
    assert tensor_digest(tensor) != tensor_digest(changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("places", [(3, 11), (0, 1), (7, 31), (1, 3, 5, 7)])
def test_changed_signs_do_not_cancel(places: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 33, dtype=dtype)
    changed = tensor.clone()
    changed[list(places)] *= -1
    assert tensor_digest(tensor) != tensor_digest(changed)


def test_swapping_words_changes_the_digest_and_views_do_not() -> None:
    tensor = torch.arange(64, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[0, 1, 40, 41]] = tensor[[40, 41, 0, 1]]
    assert tensor_digest(tensor) != tensor_digest(swapped)
    assert tensor_digest(tensor[1:33]) == tensor_digest(tensor[1:33].clone())
