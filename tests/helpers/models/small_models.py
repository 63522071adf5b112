"""A very small model on disk, and random batches for it; shared by tests that need real forward passes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from ragged_rows import ragged
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2MoeForCausalLM

from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig
from verl_rc.records.batches import TokenBatch, TrainBatch, positions_mask
from verl_rc.records.heads import head_column
from verl_rc.records.ragged import Column, Ragged
from verl_rc.tensor_ops import placed

VOCABULARY = 29


def small_model_config(vocabulary: int, tie_word_embeddings: bool = True, **further: object) -> Qwen2Config:
    """Two layers, grouped-query attention, 64 positions, random weights that are not tiny."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.3,
        **further,
    )


def small_experts(kind: type[PreTrainedModel], vocabulary: int, **further: object) -> PreTrainedModel:
    """A causal language model with five experts in each layer, of which a token takes two."""
    torch.manual_seed(0)
    sizes = small_model_config(vocabulary).to_dict()
    names = ("model_type", "architectures", "layer_types")
    shared = {name: value for name, value in sizes.items() if name not in names}
    experts = {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "max_position_embeddings": 96,  # those of small engines
    }
    # vLLM's attention on a CPU has no heads below 32.
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    # Qwen3 has no expert that all tokens share; vLLM would build one without weights.
    of_all = {"shared_expert_intermediate_size": 32} if kind is Qwen2MoeForCausalLM else {}
    assert kind.config_class is not None
    return kind(kind.config_class(**{**shared, **experts, **heads, **of_all, **further}))


def write_small_model(folder: Path, **further: object) -> Path:
    """A language model with random weights, without a tokenizer."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(small_model_config(VOCABULARY, **further)).save_pretrained(folder)
    return folder


def make_tokens(prompt_lengths: list[int], response_lengths: list[int], seed: int = 0) -> TokenBatch:
    """Random tokens; prompts left-padded to 6, responses right-padded to 7."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(prompt_lengths)
    return TokenBatch(
        prompts=torch.randint(3, VOCABULARY, (rows, 6), generator=generator),
        prompt_lengths=torch.tensor(prompt_lengths),
        responses=torch.randint(3, VOCABULARY, (rows, 7), generator=generator),
        response_lengths=torch.tensor(response_lengths),
        batch_size=[rows],
    )


def make_train_batch(
    response_lengths: list[int], rejected_rows: tuple[int, ...] = (), seed: int = 0
) -> TrainBatch:
    """A train batch of random log-probs, advantages and weights, near enough to any policy that clipping is
    partial."""
    rows = len(response_lengths)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = make_tokens([1 + row % 6 for row in range(rows)], response_lengths, seed)
    response_mask = positions_mask(tokens.response_lengths, 7)
    keep = torch.ones(rows, 1, dtype=torch.bool)
    keep[list(rejected_rows)] = False
    log_probs = -3.5 + 0.3 * torch.randn(rows, 7, generator=generator)
    return TrainBatch(
        tokens=tokens,
        response_mask=response_mask,
        loss_mask=response_mask & keep,
        old_log_probs=torch.where(response_mask, log_probs, 0.0),
        rollout_log_probs=torch.where(response_mask, log_probs, 0.0),
        policy_versions=torch.where(response_mask, 0, -1),
        scores=torch.zeros(rows),
        advantages=torch.where(response_mask, torch.randn(rows, 1, generator=generator), 0.0),
        rollout_is_weights=torch.where(response_mask, 2 * torch.rand(rows, 7, generator=generator), 0.0),
        batch_size=[rows],
    )


def add_heads(batch: TrainBatch, vocabulary: int, size: int = 4, seed: int = 0) -> None:
    """Beside each response token the head of a sampler with random log-probs; every fifth has none."""
    generator = np.random.default_rng(seed)
    mask, rows = batch.response_mask, []
    counts = torch.zeros(mask.shape, dtype=torch.int64)
    for row in range(len(mask)):
        columns = [torch.empty(0, dtype=torch.int32)]
        for place in mask[row].nonzero()[:, 0].tolist():
            if (row + place) % 5 == 0:
                continue
            ids = generator.choice(vocabulary, size, replace=False)[None]
            masses = generator.dirichlet(np.ones(size + 1))[None, :size]
            column = head_column(ids, np.log(masses))
            counts[row, place] = int(column.counts[0])
            columns.append(torch.from_numpy(column.values))
        rows.append(torch.cat(columns))
    batch.tokens.head_counts = counts
    batch.tokens.head_ids = pad_sequence(rows, batch_first=True)


def add_supports(batch: TrainBatch, vocabulary: int, seed: int = 0) -> None:
    """Beside each response token a set of one to four words that a filter left, itself among them; every
    fifth is not recorded, and so not in the loss."""
    generator = torch.Generator().manual_seed(seed)
    mask, rows = batch.response_mask, []
    counts = torch.zeros(mask.shape, dtype=torch.int64)
    for number, (row, place) in enumerate(mask.nonzero().tolist()):
        if number % 5:
            token, size = int(batch.tokens.responses[row, place]), 1 + number % 4
            others = [
                word for word in torch.randperm(vocabulary, generator=generator).tolist() if word != token
            ]
            counts[row, place] = size
            rows.append((row, [token, *others[: size - 1]]))
    words = [
        [word for row, support in rows if row == number for word in support] for number in range(len(mask))
    ]
    width = max(map(len, words))
    batch.tokens.support_counts = counts
    batch.tokens.support_ids = torch.tensor(
        [[*support, *[0] * (width - len(support))] for support in words], dtype=torch.int32
    )
    batch.loss_mask = batch.loss_mask & (counts > 0)


def small_run_config(model_folder: Path, *overrides: str) -> RunConfig:
    """A valid configuration for ``model_folder`` on a CPU, in fp32; further overrides win."""
    return load_run_config(
        [
            "data.train_files=unused.parquet",
            "data.val_files=unused.parquet",
            "data.train_batch_size=2",
            "data.max_prompt_length=6",
            "data.max_response_length=7",
            f"actor_rollout_ref.model.path={model_folder}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            "trainer.logger=['console']",
            *overrides,
        ]
    )


def log_probs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Of each token of a response, by one pass over prompt and response."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def scored(
    method: Callable[[Ragged[TokenBatch], Sequence[Sequence[int]]], list[Column]],
    tokens: TokenBatch,
    micro_batches: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """What the method of a worker answers about all rows of ``tokens``, in their places ``[B, R, …]``; 0 on
    padding."""
    is_response = positions_mask(tokens.response_lengths, tokens.responses.shape[1])
    return [placed(torch.from_numpy(column), is_response) for column in method(ragged(tokens), micro_batches)]
