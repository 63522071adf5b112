"""Replays by real engines: what another vLLM engine sampled behind a prefix cache of old weights is named,
with those weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_tokens import token_record, write_tokens
from small_checkpoints import STEP, write_checkpoint, write_tiny_model
from small_models import small_run_config
from transformers import AutoModelForCausalLM

from verl_rc.checkpoint import CheckpointStore
from verl_rc.config.load import save_resolved_config
from verl_rc.distributed.child_process import ChildProcess
from verl_rc.health.cause_table import STALE_CACHE
from verl_rc.insight.diagnosis import DiagnosisRequest
from verl_rc.insight.replay.diagnosis import diagnose_with_replays
from verl_rc.insight.replay.operations import find_divergence
from verl_rc.workers.environment import engine_environment
from verl_rc.workers.export import export_checkpoint

PROMPTS = [[3 + (7 * row + 5 * place) % 250 for place in range(66 + row)] for row in range(4)]
RESPONSE = 12
KEYS = (
    "data.max_prompt_length=80",
    "data.max_response_length=12",
    "actor_rollout_ref.rollout.kv_cache_megabytes=32",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
)


def train_log_probs(folder: Path, responses: list[list[int]]) -> list[float]:
    model, found = AutoModelForCausalLM.from_pretrained(folder).eval(), list[float]()
    for prompt, response in zip(PROMPTS, responses, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        found += logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 4 was sampled with a cache of its own weights, steps 5 and 6 with one of the weights that the run
    began with."""
    place = tmp_path_factory.mktemp("replayed")
    # Untied: the engine of this test loads weights by vLLM's own ``reload_weights``, which leaves a tied head
    # as it was. A tied model's samples would come from another policy than the one that they name.
    base = write_tiny_model(place / "base", "--no-tie_word_embeddings")
    folder, later = place / "run", place / "later"
    store = CheckpointStore(folder, keep=None)
    write_checkpoint(small_run_config(base), store.begin(STEP))
    store.seal(STEP)
    store.commit(STEP)
    export_checkpoint(folder / f"global_step_{STEP}", later, dtype_name="float32")
    save_resolved_config(small_run_config(base, *KEYS), folder)
    (folder / "metrics.jsonl").write_text('{"step": 4, "actor/grad_norm": 1.0}\n')
    engine = ChildProcess(
        "plain_engine:PlainEngine", engine_environment(1, "cpu", one_node=True), model=str(base), adapter=None
    )
    records = []
    try:
        for step, filled_by in ((4, later), (5, base), (6, base)):
            sampled = engine.call("sample", PROMPTS, RESPONSE, str(later), str(filled_by))
            responses = [ids for ids, _ in sampled]
            records.append(
                token_record(
                    step,
                    [RESPONSE] * len(PROMPTS),
                    prompts=[np.array(prompt) for prompt in PROMPTS],
                    response_ids=np.concatenate([np.array(ids) for ids in responses]),
                    old_log_prob=np.array(train_log_probs(later, responses), "float32"),
                    rollout_log_prob=np.concatenate([np.array(values, "float32") for _, values in sampled]),
                    version=np.full(RESPONSE * len(PROMPTS), STEP),
                    facts={"current_version": STEP},
                )
            )
    finally:
        engine.end()
    write_tokens(folder, records)
    return folder


def test_a_stale_prefix_cache_is_named_and_a_fresh_one_reproduced(run: Path) -> None:
    found = diagnose_with_replays(DiagnosisRequest(run, ("R0", "R3", "R5", "R6", "R7")))
    healthy, *stale = found.replayed
    assert healthy.gap < 1e-3
    assert healthy.numbers["own_cache"] < 1e-4
    for record in found.replayed:
        assert record.numbers["kernels"] < 1e-4
        assert sum(part.share for part in record.parts.values()) == pytest.approx(1.0, abs=1e-6)
        assert set(record.parts) == {"trainer", "versions", "engine", "precision", "decode", "rest"}
    for record in stale:
        assert record.gap > 0.05
        assert record.numbers["stale_cache"] < 1e-4 < record.numbers["own_cache"]
        assert record.numbers["stale_version"] == 0
        assert record.numbers["cached_tokens"] == 2 * 32 * len(PROMPTS)
    first = next(one for one in found.statements if one.level == "fault")
    assert (first.cause, first.confidence, first.steps) == (STALE_CACHE.name, "named", (5, 6))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("", ""),
        pytest.param("rms_norm_eps: 0.01", "model.layers.0.input_layernorm", marks=pytest.mark.slow),
    ],
    ids=["sound", "epsilon"],
)
def test_the_operation_where_an_engine_parts_is_named(overrides: str, named: str, tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base")
    keys = (*KEYS, f"actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides={{{overrides}}}")
    config = small_run_config(base, *keys, "actor_rollout_ref.rollout.dtype=bfloat16")
    found = find_divergence(config, str(base), PROMPTS)
    assert found.first.startswith("model.layers.0.")
    assert found.beyond_rounding == named
