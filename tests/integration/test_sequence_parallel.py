"""Ranks that share the tokens of their micro-batches, and rows that share a prompt, compute what one rank
computes row by row: scores, losses, gradients, statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import whole
from small_models import add_supports, make_train_batch, ragged, scored, small_run_config, write_small_model
from two_processes import free_port, run_ranks

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.metrics import reduce_metrics
from verl_rc.records.batches import CriticBatch, TrainBatch
from verl_rc.runtime.distributed.process_group import RankAddress, leave_trainer_group
from verl_rc.runtime.weight_sync.proof import LogProbGap
from verl_rc.runtime.workers.critic_worker import CriticWorker
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker, ReferenceWorker

LENGTHS = [7, 2, 5, 0, 1, 6, 7, 3]
"""Of responses; prompts have 1 to 6 tokens, rows 0 to 2 and 5 to 7 one of 6 each. Micro-batches have 20, 4, 6
and 22 distinct tokens: one rank makes all predictions of the third."""
REJECTED = (2, 6)
SPLITS = {1: [[[0, 1, 2], [3], [4], [5, 6, 7]]], 2: [[[0, 1], [2, 3]], [[4, 5, 6, 7], []]]}
"""Micro-batches of each share of the rows."""
BYPASS = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}
RULE = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.97_1.03"}
WIDE_RULE = {**RULE, "rollout_rs_threshold": "0.0001_10000"}
"""For rollout log-probs that are those of the whole vocabulary."""
CORRECTIONS: dict[str, dict[str, object]] = {
    "decoupled": {},
    "bypass": {**BYPASS, **RULE},
    "bypass, normalised": {**BYPASS, **RULE, "rollout_is_batch_normalize": True},
    "bypass, kept": {**BYPASS, **RULE, "rejection_denominator": "kept"},
    "clip_cov": {},
    "supports": {},
    "supports, bypass": {**BYPASS, **WIDE_RULE, "rejection_denominator": "kept"},
    "a teacher's likeliest tokens": {},
}
ACTOR, KEY = "actor_rollout_ref.actor", "fsdp_config.ulysses_sequence_parallel_size"
ADAPTERS = ("actor_rollout_ref.model.lora_rank=2",)
COPIES = tuple(f"{role}.fsdp_config.fsdp_size=2" for role in (ACTOR, "critic", "actor_rollout_ref.ref"))
CHECKPOINTS = ("actor_rollout_ref.model.enable_gradient_checkpointing=True",)


@dataclass(frozen=True)
class Case:
    """A way to run, and the one rank that it must equal."""

    ranks: int
    sharing: int
    overrides: tuple[str, ...] = ()
    corrections: Sequence[str] = tuple(CORRECTIONS)


CASES = {
    "one rank": Case(1, 1),
    "two ranks": Case(2, 2),
    "adapters": Case(2, 2, ADAPTERS, ("decoupled",)),
    "more ranks than heads of keys": Case(
        4, 4, (), ("decoupled", "supports", "a teacher's likeliest tokens")
    ),
    "two groups of two, with checkpointing": Case(4, 2, CHECKPOINTS),
    "two groups of two, each with a copy of the weights": Case(4, 2, COPIES, ("decoupled", "bypass, kept")),
}
ALONE = (Case(1, 1), Case(1, 1, ADAPTERS, ("decoupled",)))
Found = dict[str, Any]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 difference."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def gradients(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([whole(p.grad).flatten() for p in module.parameters() if p.grad is not None])


def share_of(batch: TrainBatch, micro_batches: list[list[int]]) -> MiniBatch:
    counted = batch.response_mask.sum(-1)
    return MiniBatch(micro_batches, int(counted.sum()), int((counted > 0).sum()), int(batch.loss_mask.sum()))


def batch_of_groups(rejected: tuple[int, ...] = ()) -> TrainBatch:
    batch = make_train_batch(LENGTHS, rejected)
    for rows in ([0, 1, 2], [5, 6, 7]):
        batch.tokens.prompts[rows] = batch.tokens.prompts[rows[0]].clone()
        batch.tokens.prompt_lengths[rows] = 6
    return batch


def run_case(case: Case, rank: int, folder: Path, ports: list[int], share_prefixes: str = "auto") -> Found:
    """What actor, critic and reference compute on one of the ranks."""
    sizes = [f"{role}.{KEY}={case.sharing}" for role in (ACTOR, "critic")]
    learns = (
        "critic.enable=True",
        f"{ACTOR}.entropy_coeff=0.05",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.optim.lr=0.01",
    )
    precision = [f"{role}.fsdp_config.dtype=float32" for role in ("critic", "actor_rollout_ref.ref")]
    full = "algorithm.rollout_correction.diagnostics=full"
    ranks = f"trainer.n_gpus_per_node={case.ranks}"
    batches = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8")
    prefixes = f"actor_rollout_ref.model.share_prefixes={share_prefixes}"
    every = (*batches, *sizes, *learns, *precision, full, prefixes, *case.overrides)
    config = small_run_config(folder, ranks, *every)
    addresses = [RankAddress(rank, case.ranks, "127.0.0.1", port) for port in ports]
    micro_batches = SPLITS[case.ranks // case.sharing][rank // case.sharing]
    torch.manual_seed(3)
    actor = PolicyWorker(config, addresses[0], total_steps=10)
    for name, parameter in actor.model.module.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.constant_(parameter.detach().to_local(), 0.1)  # type: ignore[attr-defined]
    found = actor_numbers(actor, micro_batches, case.corrections)
    actor.close()
    if case.overrides == ADAPTERS:
        return found
    critic = CriticWorker(config, addresses[1], total_steps=10)
    head = critic.model.module.get_submodule("score").weight
    torch.nn.init.constant_(head.detach().to_local(), 0.3)  # type: ignore[union-attr, operator]
    found |= critic_numbers(critic, micro_batches)
    critic.close()
    reference = ReferenceWorker(config, addresses[2], total_steps=10)
    reference._top_tokens = 3  # as a teacher's
    scores = scored(reference.compute_log_probs, batch_of_groups().tokens, micro_batches)
    found |= dict(zip(("reference", "its likeliest tokens", "their log-probs"), scores, strict=True))
    leave_trainer_group()
    return found


def actor_numbers(worker: PolicyWorker, micro_batches: list[list[int]], corrections: Sequence[str]) -> Found:
    tokens = batch_of_groups().tokens
    scores = scored(worker.compute_log_probs, tokens, micro_batches)
    found: Found = dict(
        zip(("log-probs", "entropies", "sums of squares", "varentropies"), scores, strict=True)
    )
    if any(".lora_" in name for name, _ in worker.model.module.named_parameters()):
        found["without adapters"] = scored(worker.compute_reference_log_probs, tokens, micro_batches)[0]
    everything = scored(worker.compute_log_probs, tokens, [list(range(len(LENGTHS)))])[
        0
    ]  # the same on all ranks
    worker.model.module.train()
    for name in corrections:
        worker._correction = RolloutCorrectionConfig.model_validate(
            {**CORRECTIONS[name], "diagnostics": "full"}
        )
        loss = {"loss_mode": name, "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0} if name == "clip_cov" else {}
        chosen = type(worker._actor.policy_loss).model_validate(loss)
        worker._actor = worker._actor.model_copy(update={"policy_loss": chosen})
        bypass = worker._correction.bypass_mode
        batch = batch_of_groups(() if bypass else REJECTED)
        if name.startswith("supports"):
            add_supports(batch, worker.model.module.config.vocab_size)
        near = everything + 0.1 * torch.randn(everything.shape, generator=torch.Generator().manual_seed(7))
        batch.reference_log_probs = torch.where(batch.response_mask, near, 0.0)
        if bypass:
            batch.old_log_probs = batch.rollout_log_probs = batch.reference_log_probs
        worker._distillation = None
        if name == "a teacher's likeliest tokens":
            worker._distillation = DistillationLossConfig(loss_mode="forward_kl_topk", topk=3)
            batch.teacher_log_probs = batch.reference_log_probs
            add_top_tokens(batch, worker.model.module.config.vocab_size)
        correction = corrector_of(worker._correction).during_update(0, 1, worker._ranks)
        totals = ObjectiveTotals("actor")
        share = share_of(batch, micro_batches)
        worker.accumulate(ragged(batch), share, totals, correction)
        found[f"{name}: gradients"] = gradients(worker.model.module)
        found[f"{name}: metrics"] = totals.metrics(is_first_rank=worker._address.rank == 0)
        correction.end_mini_batch(share, 0)
        if (measured := correction.measured()) is not None:
            gap = LogProbGap.from_statistics(measured.before_update)
            found[f"{name}: statistics"] = measured.statistics.sums
            found[f"{name}: signatures"] = measured.signatures.sums  # type: ignore[union-attr]
            found[f"{name}: gap"] = torch.tensor([gap.mean, gap.maximum])  # type: ignore[union-attr]
        worker.model.optimizer.zero_grad()
    return found


def add_top_tokens(batch: TrainBatch, vocabulary: int) -> None:
    """Give each token three words of a teacher; the rest of the probability is a fourth's."""
    shape = (*batch.response_mask.shape, 4)
    generator = torch.Generator().manual_seed(11)
    first = torch.randint(vocabulary, (*shape[:2], 1), generator=generator)
    batch.teacher_top_ids = ((first + torch.arange(3)) % vocabulary).int()
    batch.teacher_top_log_probs = torch.randn(shape, generator=generator).log_softmax(-1)[..., :3]


def critic_numbers(worker: CriticWorker, micro_batches: list[list[int]]) -> Found:
    batch = batch_of_groups()
    (values,) = scored(worker.compute_values, batch.tokens, micro_batches)
    targets = torch.where(batch.response_mask, torch.linspace(-3.0, 3.0, 56).view(8, 7), 0.0)
    rows = CriticBatch(batch.tokens, batch.response_mask, torch.zeros_like(targets), targets, batch_size=[8])
    worker.model.module.train()
    totals = ObjectiveTotals("critic")
    worker.accumulate(ragged(rows), share_of(batch, micro_batches), totals)
    metrics = totals.metrics(is_first_rank=worker._address.rank == 0)
    return {"values": values, "values: gradients": gradients(worker.model.module), "values: metrics": metrics}


def run_rank(rank: int, folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    found = {}
    for index, (name, case) in enumerate(CASES.items()):
        if rank < case.ranks:
            found[name] = run_case(case, rank, folder, ports[3 * index : 3 * index + 3])
    torch.save(found, folder / f"found_{rank}.pt")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    folder = write_small_model(tmp_path_factory.mktemp("model"))
    run_ranks(4, run_rank, folder, [free_port() for _ in range(3 * len(CASES))])
    return folder, [torch.load(folder / f"found_{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def alone(shared: tuple[Path, list[Found]]) -> dict[tuple[str, ...], Found]:
    weights, adapters = (
        run_case(case, 0, shared[0], [free_port() for _ in range(3)], share_prefixes="False")
        for case in ALONE
    )
    return {(): weights, CHECKPOINTS: weights, COPIES: weights, ADAPTERS: adapters}


@pytest.mark.parametrize("name", CASES)
def test_numbers_equal_those_of_one_rank(
    shared: tuple[Path, list[Found]], alone: dict[tuple[str, ...], Found], name: str
) -> None:
    case = CASES[name]
    expected = alone[case.overrides]
    ranks = [found[name] for found in shared[1][: case.ranks]]
    wrong = {}
    for what, numbers in expected.items():
        if what.partition(": ")[0] in set(CORRECTIONS) - set(case.corrections):
            continue
        if isinstance(numbers, torch.Tensor):
            shares = [rank[what] for rank in ranks]
            if numbers.shape[:2] == (len(LENGTHS), 7):  # each share has its own rows; the other ones are 0
                shares = [sum(shares[first :: case.sharing]) for first in range(case.sharing)]  # type: ignore[misc]
            differences = [relative(share, numbers) for share in shares]
            assert numbers.norm() > 0.01, what
        else:
            found = reduce_metrics([metric for rank in ranks[:: case.sharing] for metric in rank[what]])
            once: dict[str, float] = reduce_metrics(numbers)
            assert (
                found.keys()
                == once.keys()
                >= {"critic/vf_loss" if what.startswith("values") else "actor/pg_loss"}
            )
            differences = [relative(torch.tensor([*found.values()]), torch.tensor([*once.values()]))]
        if max(differences) > 1e-5:
            wrong[what] = differences
    assert not wrong
