"""The output layer in float32 on both sides: a real engine and the trainer, whose gap is wider when one side
alone has it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import small_run_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_rc.records.batches import TokenBatch
from verl_rc.records.parts import token_ids
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.vllm.options import engine_options
from verl_rc.runtime.weight_sync.sender import every_name
from verl_rc.runtime.workers.environment import engine_environment
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import Products, load_causal_lm

PROMPTS = [[3 + (7 * row + 5 * place) % 250 for place in range(12)] for row in range(16)]
RESPONSE = 24


@pytest.fixture(scope="module", params=["float32", pytest.param(None, marks=pytest.mark.slow)])
def head(request: pytest.FixtureRequest) -> str | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engine(task: dict[str, Path], head: str | None) -> Iterator[ChildProcess]:
    given = f"actor_rollout_ref.model.head_dtype={'null' if head is None else head}"
    config = small_run_config(
        task["model"],
        given,
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.rollout.kv_cache_megabytes=32",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    )
    options = replace(engine_options(config, "cpu"), max_model_len=64)
    environment = engine_environment(1, "cpu", one_node=True)
    process = ChildProcess("loaded_engine:LoadedEngine", environment, options=options)
    yield process
    process.end()


def sampled(engine: ChildProcess) -> tuple[TokenBatch, Tensor]:
    requests = [GenerationRequest(prompt_token_ids=prompt, seed=row) for row, prompt in enumerate(PROMPTS)]
    sampling = SamplingOptions(
        1.0, top_p=1.0, top_k=-1, max_tokens=RESPONSE, stop_token_ids=(), ignore_eos=True
    )
    samples = engine.call("generate", requests, sampling)
    tokens = TokenBatch(
        prompts=torch.tensor(PROMPTS),
        prompt_lengths=torch.full([len(PROMPTS)], len(PROMPTS[0])),
        responses=torch.tensor([token_ids(sample.parts) for sample in samples]),
        response_lengths=torch.full([len(PROMPTS)], RESPONSE),
        batch_size=[len(PROMPTS)],
    )
    return tokens, torch.stack([torch.cat([part.log_probs for part in sample.parts]) for sample in samples])


def mean_gap(folder: Path, head: str | None, tokens: TokenBatch, rollout: Tensor) -> float:
    model = load_causal_lm(str(folder), torch.bfloat16, products=Products(head)).eval()
    with torch.no_grad():
        scores = score_tokens(model, tokens, ForwardOptions(), with_entropy=False)
    return float((scores.log_probs.float() - rollout).abs().mean())


def test_both_sides_have_one_head_and_one_side_alone_is_further_off(
    engine: ChildProcess, head: str | None, task: dict[str, Path], tmp_path: Path
) -> None:
    tokens, rollout = sampled(engine)
    assert engine.call("num_copies") == (1 if head else 0)
    other = None if head else "float32"
    same, one_sided = (mean_gap(task["model"], precision, tokens, rollout) for precision in (head, other))
    assert same < one_sided
    # What is kept of the output layer belongs to the weights: an update brings others.
    model = AutoModelForCausalLM.from_pretrained(task["model"])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    engine.call("load", dict(every_name(model)), 1)
    assert engine.call("num_copies") == 0
    tokens, rollout = sampled(engine)
    assert mean_gap(tmp_path, head, tokens, rollout) < 5 * same
    assert mean_gap(task["model"], head, tokens, rollout) > 20 * same
