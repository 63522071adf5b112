from pathlib import Path

import pytest
import torch

from verl_rc.checkpoint.shards import get_random_state, read_random_state, save_random_state, set_random_state
from verl_rc.checkpoint.store import CheckpointError


def test_the_generator_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(3)
    save_random_state(get_random_state(), tmp_path / "state.pt")
    expected = torch.rand(4)
    torch.manual_seed(4)
    set_random_state(read_random_state(tmp_path / "state.pt"))
    assert torch.equal(torch.rand(4), expected)


def test_no_file_changes_nothing(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    set_random_state(read_random_state(tmp_path / "nowhere.pt"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("content", [b"", b"PK", b"nothing"])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.pt must hold random states"):
        read_random_state(tmp_path / "state.pt")
