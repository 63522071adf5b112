"""Tensors that differ are named, whatever the engine fuses, pads and rounds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoints import STEP, write_checkpoint, write_tiny_model
from small_models import small_run_config
from torch import Tensor, nn

from verl_rc.cli import main
from verl_rc.insight.replay.digests import compare_weights, write_digests
from verl_rc.runtime.checkpoint import CheckpointStore

LAYER = "model.layers.0."


class Held(nn.Module):
    """Parameters by names with dots, as an engine lists them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def named_parameters(self, *_: object, **__: object) -> object:  # type: ignore[override]
        return iter(self._tensors.items())


@pytest.fixture
def weights() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": 4,
        "self_attn.k_proj": 2,
        "self_attn.v_proj": 2,
        "mlp.gate_proj": 6,
        "mlp.up_proj": 6,
    }
    shapes |= {"self_attn.o_proj": 4, "mlp.down_proj": 4}
    tensors = {
        f"{LAYER}{name}.weight": torch.randn(rows, 4, generator=chance) for name, rows in shapes.items()
    }
    return tensors | {"model.embed_tokens.weight": torch.randn(5, 4, generator=chance)}


def in_engine(weights: dict[str, Tensor], path: Path) -> Path:
    """In bfloat16, fused and padded by hand."""
    q, k, v, gate, up, down, out = (
        weights[f"{LAYER}{name}_proj.weight"]
        for name in (
            "self_attn.q",
            "self_attn.k",
            "self_attn.v",
            "mlp.gate",
            "mlp.up",
            "mlp.down",
            "self_attn.o",
        )
    )
    embedding = torch.zeros(8, 4)
    embedding[:5] = weights["model.embed_tokens.weight"]
    held = {
        "model.embed_tokens.weight": embedding,
        f"{LAYER}self_attn.qkv_proj.weight": torch.cat([q, k, v]),
        f"{LAYER}self_attn.o_proj.weight": out,
        f"{LAYER}mlp.gate_up_proj.weight": torch.cat([gate, up]),
        f"{LAYER}mlp.down_proj.weight": down,
        "rotary.inv_freq": torch.ones(2),
    }
    write_digests(Held({name: tensor.bfloat16() for name, tensor in held.items()}), str(path))
    return path


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (None, ()),
        ("mlp.down_proj", (f"{LAYER}mlp.down_proj.weight",)),
        ("self_attn.o_proj", (f"{LAYER}self_attn.o_proj.weight",)),
        ("self_attn.k_proj", (f"{LAYER}self_attn.qkv_proj.weight",)),
    ],
)
def test_an_engine_s_tensors(
    tmp_path: Path, weights: dict[str, Tensor], changed: str | None, named: tuple[str, ...]
) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    held = dict(weights)
    if changed is not None:
        held[f"{LAYER}{changed}.weight"] = held[f"{LAYER}{changed}.weight"].flip(0).contiguous()
    found = compare_weights(in_engine(held, tmp_path / "engine.json"), tmp_path)
    assert found.differing == named
    assert len(found.equal) == 5 - len(named)
    assert found.unknown == ("rotary.inv_freq",)


def test_a_checkpoint_beside_the_model_that_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_tiny_model(tmp_path / "base")
    store = CheckpointStore(tmp_path / "run", most=None)
    write_checkpoint(small_run_config(base), store.begin(STEP))
    store.seal(STEP)
    store.commit(STEP)
    checkpoint = tmp_path / "run" / f"global_step_{STEP}"
    assert not compare_weights(checkpoint, checkpoint).differing
    assert main(["diagnose", str(base), "--digests", str(checkpoint)]) == 0
    assert "tensors differ\n  differs: " in capsys.readouterr().out


def test_what_is_no_weights_is_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "engine.json").write_text('{"no": "list"}')
    with pytest.raises(ValueError, match="must be a file that write_digests wrote"):
        compare_weights(tmp_path / "engine.json", tmp_path)
