"""What is exported is what was trained: the same weights to the last bit, the same numbers out of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_checkpoints import STEP, TOKENS, SmallCheckpoint, write_checkpoint, write_tiny_model
from small_models import small_run_config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl_rc.runtime.checkpoint.checksums import FileSum, write_checksums
from verl_rc.runtime.workers import export
from verl_rc.runtime.workers.export import ExportError, export_checkpoint

CRITIC = ("algorithm.adv_estimator=gae", "critic.fsdp_config.dtype=float32")
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=12")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def full(base: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallCheckpoint:
    return write_checkpoint(
        small_run_config(base, *CRITIC), tmp_path_factory.mktemp("full") / f"global_step_{STEP}"
    )


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallCheckpoint:
    return write_checkpoint(
        small_run_config(base, *CRITIC, *LORA), tmp_path_factory.mktemp("lora") / f"global_step_{STEP}"
    )


def logits_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits[0]
    return logits


def test_the_policy_is_the_trained_one(full: SmallCheckpoint, tmp_path: Path) -> None:
    said = export_checkpoint(full.folder, tmp_path / "out")
    assert said == f"{tmp_path / 'out'}: Qwen2ForCausalLM after step {STEP}, float32"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == full.weights["actor"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in full.weights["actor"].items())
    assert "attn_implementation" not in (tmp_path / "out" / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("4=").input_ids
    found = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(found, full.outputs["actor"], atol=1e-5, rtol=1e-5)


def test_the_tokenizer_and_the_generation_settings_are_the_base_models(
    full: SmallCheckpoint, base: Path, tmp_path: Path
) -> None:
    export_checkpoint(full.folder, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_precision_rounds_once(full: SmallCheckpoint, tmp_path: Path, dtype: str) -> None:
    export_checkpoint(full.folder, tmp_path / "out", dtype_name=dtype)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    weights = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in full.weights["actor"].items()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_without_a_precision_it_is_the_base_models(full: SmallCheckpoint, base: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(base, tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert export_checkpoint(full.folder, tmp_path / "out", model_path=str(moved)).endswith("bfloat16")


@pytest.mark.parametrize("run", ["full", "lora"])
def test_the_critic_gives_the_trained_values(
    run: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    checkpoint: SmallCheckpoint = request.getfixturevalue(run)
    export_checkpoint(checkpoint.folder, tmp_path / "out", "critic")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == checkpoint.weights["critic"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in checkpoint.weights["critic"].items())
    values = logits_of(AutoModelForTokenClassification.from_pretrained(tmp_path / "out"))
    assert values.shape == (TOKENS.numel(), 1)
    assert values.std() > 0.01
    torch.testing.assert_close(values, checkpoint.outputs["critic"], atol=1e-5, rtol=1e-5)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", "--tie_word_embeddings")
    checkpoint = write_checkpoint(small_run_config(base), tmp_path / "global_step_3")
    export_checkpoint(checkpoint.folder, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == checkpoint.weights["actor"].keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(model), checkpoint.outputs["actor"], atol=1e-5, rtol=1e-5)


def test_adapters_are_merged_in(lora: SmallCheckpoint, base: Path, tmp_path: Path) -> None:
    export_checkpoint(lora.folder, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(merged), lora.outputs["actor"], atol=1e-5, rtol=1e-5)
    untrained = logits_of(AutoModelForCausalLM.from_pretrained(base))
    assert (untrained - lora.outputs["actor"]).abs().max() > 0.1
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    weights = {
        name.removeprefix(f"{prefix}."): tensor.double() for name, tensor in lora.weights["actor"].items()
    }
    product = weights["lora_B.default.weight"] @ weights["lora_A.default.weight"]
    expected = weights["base_layer.weight"] + 12 / 4 * product
    written = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    torch.testing.assert_close(written.double(), expected, atol=1e-6, rtol=1e-6)


def test_the_adapter_alone_is_one_that_peft_loads(lora: SmallCheckpoint, base: Path, tmp_path: Path) -> None:
    said = export_checkpoint(lora.folder, tmp_path / "out", "adapter")
    assert said.endswith(f"LoRA adapter after step {STEP}, float32")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 12, str(base))
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    trained = {
        name.replace(".default", ""): value
        for name, value in lora.weights["actor"].items()
        if ".lora_" in name
    }
    assert tensors.keys() == trained.keys()
    assert all(torch.equal(tensors[name], value) for name, value in trained.items())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    torch.testing.assert_close(logits_of(model), lora.outputs["actor"], atol=1e-5, rtol=1e-5)


def without_tokenizer(base: Path, folder: Path) -> Path:
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    return folder


def of_other_width(base: Path, folder: Path) -> Path:
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    return folder


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (without_tokenizer, "must hold its tokenizer"),
        (of_other_width, "the two differ in model.layers.0.mlp.down_proj.weight, .* and 3 more"),
        (lambda base, folder: folder, "say where it is with --model"),
    ],
)
def test_a_base_model_that_does_not_fit(
    full: SmallCheckpoint, base: Path, tmp_path: Path, make_model: Callable[[Path, Path], Path], message: str
) -> None:
    model = make_model(base, tmp_path / "model")
    with pytest.raises(ExportError, match=message):
        export_checkpoint(full.folder, tmp_path / "new" / "out", model_path=str(model))
    assert not any((tmp_path / "new").iterdir() if (tmp_path / "new").exists() else ())


def test_a_crash_leaves_no_folder_of_that_name(
    full: SmallCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: object, folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise OSError("No space left on device")

    monkeypatch.setattr(export, "_copy_tokenizer", fail)
    with pytest.raises(ExportError, match="must be writable, but No space left on device"):
        export_checkpoint(full.folder, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_empty_folder_may_exist(full: SmallCheckpoint, tmp_path: Path) -> None:
    export_checkpoint(full.folder, tmp_path)
    assert (tmp_path / "config.json").is_file()


def of_an_attacker(full: SmallCheckpoint, folder: Path, trace: Path) -> Path:
    """A checkpoint whose configuration names a model with code, and trusts it."""
    model, checkpoint = folder / "model", folder / "global_step_1"
    shutil.copytree(full.folder, checkpoint)
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "planted", "auto_map": {"AutoConfig": "planted.Planted"}})
    )
    (model / "planted.py").write_text(
        f"open({str(trace)!r}, 'w')\n"
        "from transformers import PretrainedConfig\n"
        "class Planted(PretrainedConfig):\n    model_type = 'planted'\n"
    )
    state = json.loads((checkpoint / "run_state.json").read_text())
    for part in (state["config"]["actor_rollout_ref"]["model"], state["config"]["critic"]["model"]):
        part |= {"path": str(model), "trust_remote_code": True}
    (checkpoint / "run_state.json").write_text(json.dumps(state))
    names = [path.name for path in checkpoint.glob("*.*") if path.name != "checksums.json"]
    write_checksums(checkpoint, {name: FileSum.of(checkpoint / name) for name in names})
    return checkpoint


def test_code_that_a_checkpoint_trusts_does_not_run(full: SmallCheckpoint, tmp_path: Path) -> None:
    checkpoint, trace = of_an_attacker(full, tmp_path, tmp_path / "trace"), tmp_path / "trace"
    for part in ("policy", "critic", "adapter"):
        with pytest.raises(ExportError):
            export_checkpoint(checkpoint, tmp_path / "out", part)
        assert not trace.exists()
    with pytest.raises((ExportError, ValueError)):  # it has no model
        export_checkpoint(checkpoint, tmp_path / "out", trust_remote_code=True)
    assert trace.exists()


@pytest.mark.parametrize(
    "config", [{}, {"actor_rollout_ref": []}, {"actor_rollout_ref": {"model": {"path": 3}}}]
)
def test_a_checkpoint_without_a_configuration_is_refused(
    full: SmallCheckpoint, tmp_path: Path, config: Any
) -> None:
    checkpoint = of_an_attacker(full, tmp_path, tmp_path / "trace")
    state = json.loads((checkpoint / "run_state.json").read_text()) | {"config": config}
    (checkpoint / "run_state.json").write_text(json.dumps(state))
    write_checksums(checkpoint, {"data.pt": FileSum.of(checkpoint / "data.pt")})
    with pytest.raises(ExportError, match="must hold the configuration of its run"):
        export_checkpoint(checkpoint, tmp_path / "out")


def test_a_part_that_is_a_link_out_of_the_checkpoint_is_refused(
    full: SmallCheckpoint, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "global_step_1"
    shutil.copytree(full.folder, checkpoint)
    shutil.move(checkpoint / "actor", tmp_path / "elsewhere")
    (checkpoint / "actor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="is a link to elsewhere"):
        export_checkpoint(checkpoint, tmp_path / "out")
