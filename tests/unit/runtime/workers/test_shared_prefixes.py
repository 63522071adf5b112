"""What rows have in common is computed once, and every number is that of rows of their own."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import VOCABULARY, small_experts, write_small_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen2MoeForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from verl_rc.records.batches import TokenBatch, TokenScores, positions_mask
from verl_rc.runtime.workers import packing
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens, score_values
from verl_rc.runtime.workers.language_model import load_causal_lm, load_value_model
from verl_rc.runtime.workers.packed_layout import Branches
from verl_rc.runtime.workers.packing import ComputedOnce, PackedSequences, PrefixSharing
from verl_rc.runtime.workers.router_replay import RouterReplay

Rows = list[tuple[list[int], list[int]]]
"""Prompts and responses."""


def draw(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


ONE, TWO, TURN, BRANCH = draw(20, 1), draw(18, 2), draw(9, 3), draw(6, 4)
ROWS: dict[str, Rows] = {
    "a group": [(ONE, [first, *draw(length, 10 + length)]) for first, length in enumerate((4, 0, 7, 2), 3)],
    "two groups": [(prompt, draw(4, 20 + n)) for n, prompt in enumerate((ONE, TWO, ONE, TWO, ONE))],
    "rows alone": [(draw(3, 30), draw(4, 31)), (draw(7, 32), draw(2, 33))],
    "equal rows": [(ONE, TURN), (TWO, TURN), (ONE, TURN), (ONE, TURN)],
    "a row that is the beginning of others": [(ONE, TURN[:4]), (ONE, TURN), (ONE, TURN[:4] + BRANCH)],
    "three levels of branches": [
        (ONE, TURN + BRANCH + draw(3, 40)),
        (ONE, TURN + BRANCH + draw(5, 41)),
        (ONE, TURN + draw(4, 42)),
        (ONE, draw(6, 43)),
        (ONE, TURN + draw(2, 44)),
        (TWO, draw(1, 45)),
    ],
    "an empty response": [(ONE, []), (ONE, draw(4, 50)), (ONE + TURN, []), (TWO, [])],
    "other borders of prompts": [(ONE + TURN[:3], TURN[3:]), (ONE, TURN + BRANCH), (ONE + TURN, BRANCH)],
}


def tokens_of(rows: Rows) -> TokenBatch:
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    prompts, responses = (torch.zeros(len(rows), max(1, width), dtype=torch.int64) for width in longest)
    for row, (prompt, response) in enumerate(rows):
        prompts[row, prompts.shape[1] - len(prompt) :] = torch.tensor(prompt)
        responses[row, : len(response)] = torch.tensor(response, dtype=torch.int64)
    return TokenBatch(
        prompts=prompts,
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in rows]),
        responses=responses,
        response_lengths=torch.tensor([len(response) for _, response in rows]),
        batch_size=[len(rows)],
    )


def reward_of(logits: Tensor) -> Tensor:
    """A sum whose gradient differs at every place and word."""
    weights = torch.from_numpy(np.random.default_rng(5).normal(size=tuple(logits.shape))).to(logits)
    return (logits.log_softmax(-1) * weights).sum()


def gradients(model: nn.Module, reward: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    reward.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def in_float64(model_folder: Path) -> nn.Module:
    """The model with norms that do not round to float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            modeling_qwen2.Qwen2RMSNorm,
            "forward",
            lambda self, x: nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon),
        )
        yield load_causal_lm(str(model_folder), torch.float64)


def row_by_row(model: nn.Module, rows: Rows) -> Tensor:
    """Logits of all response tokens, by an attention of PyTorch's that knows no packing."""
    implementation = model.config._attn_implementation  # type: ignore[union-attr]
    model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    logits = []
    for prompt, response in rows:
        ids = torch.tensor([prompt + response])
        whole = model(ids, use_cache=False).logits[0]  # type: ignore[operator]
        logits.append(whole[len(prompt) - 1 : len(prompt) - 1 + len(response)])
    model.config._attn_implementation = implementation  # type: ignore[union-attr]
    return torch.cat(logits)


def shared(model: nn.Module, rows: Rows) -> Tensor:
    packed = PackedSequences.from_tokens(tokens_of(rows)).sharing_prefixes(PrefixSharing())
    inputs, predictors = packed.model_inputs(True, None)
    return model(**inputs).logits[0][predictors.positions]  # type: ignore[no-any-return]


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())


def difference(model: nn.Module, rows: Rows) -> float:
    """Of logits and gradients, with and without sharing."""
    expected, found = row_by_row(model, rows), shared(model, rows)
    values = float((found - expected).norm() / expected.norm())
    return max(values, furthest(gradients(model, reward_of(found)), gradients(model, reward_of(expected))))


@pytest.mark.parametrize("name", ROWS)
def test_logits_and_gradients_are_those_of_rows_of_their_own(in_float64: nn.Module, name: str) -> None:
    assert difference(in_float64, ROWS[name]) < 1e-12


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("a group", 20 + 5 + 1 + 8 + 3),
        ("two groups", 20 + 18 + 5 * 4),
        ("rows alone", 3 + 4 + 7 + 2),
        ("equal rows", 20 + 9 + 18 + 9),
        ("three levels of branches", 20 + 9 + 6 + 3 + 5 + 4 + 6 + 2 + 18 + 1),
    ],
)
def test_every_common_token_is_computed_once(model_folder: Path, name: str, computed: int) -> None:
    sharing, tokens = PrefixSharing(), tokens_of(ROWS[name])
    inputs, _ = PackedSequences.from_tokens(tokens).sharing_prefixes(sharing).model_inputs(True, None)
    assert inputs["input_ids"].numel() == computed
    total = int(tokens.sequence_lengths.sum())
    assert sharing.take_fraction().value == pytest.approx(1 - computed / total)
    assert sharing.take_fraction().count == 0


def with_a_siblings_key(branches: Branches) -> Branches:
    """The first own key of a branch is that of the next one."""
    keys = branches.keys.clone()
    keys[branches.lengths.cumsum(0) - branches.own_lengths] = keys[
        branches.lengths.cumsum(0) - branches.own_lengths
    ].roll(1)
    return replace(branches, keys=keys)


def without_gradient_of_what_is_shared(found: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keys and values of a branch are constants: only the first row's gradient reaches the prompt."""

    def attended(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
        return found(query, key.detach(), value.detach(), *others)

    return attended


@pytest.mark.parametrize("fault", ["a sibling's key", "a position", "a gradient", "a key too many"])
def test_a_planted_fault_is_seen(in_float64: nn.Module, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ComputedOnce.from_prefixes

    def faulty(*arguments: object) -> ComputedOnce:
        once = found(*arguments)  # type: ignore[arg-type]
        assert once.branches is not None
        if fault == "a position":
            last = torch.arange(len(once.position_ids)) == len(once.position_ids) - 2
            return replace(once, position_ids=once.position_ids + last.long())
        if fault == "a key too many":  # the last own key of a branch is visible to the query before it
            keys = once.branches.keys.clone()
            keys[-2] = keys[-1]
            return replace(once, branches=replace(once.branches, keys=keys))
        return replace(once, branches=with_a_siblings_key(once.branches))

    if fault == "a gradient":
        name = "verl_rc.runtime.workers.attention._branches_on_grids"
        from verl_rc.runtime.workers import attention

        monkeypatch.setattr(name, without_gradient_of_what_is_shared(attention._branches_on_grids))
    else:
        monkeypatch.setattr(packing.ComputedOnce, "from_prefixes", faulty)
    assert difference(in_float64, ROWS["a group"]) > 1e-4


def both(score: Callable[[ForwardOptions], TokenScores | Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The results with and without sharing."""
    results = []
    for sharing in (PrefixSharing(), None):
        scores = score(ForwardOptions(0.7, prefixes=sharing))
        values = (
            [scores] if isinstance(scores, Tensor) else [getattr(scores, one.name) for one in fields(scores)]
        )
        results.append([value for value in values if isinstance(value, Tensor)])
        assert sharing is None or sharing.take_fraction().value > 0.3
    return results[0], results[1]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_all_scores_of_a_token_are_the_same(model_folder: Path) -> None:
    """Entropies, squares, supports of filters, likeliest tokens and candidates."""
    rows, model = ROWS["three levels of branches"], load_causal_lm(str(model_folder), torch.float32)
    tokens = tokens_of(rows)
    candidates = torch.randint(0, VOCABULARY, (*tokens.responses.shape, 3))
    assert_equal(*both(lambda options: score_tokens(model, tokens, options, True, True, 2, candidates)))
    kept = [[sorted({word, 3, 4, 5 + row}) for word in response] for row, (_, response) in enumerate(rows)]
    longest = tokens.responses.shape[1]
    tokens.support_counts = torch.tensor([[*map(len, row)] + [0] * (longest - len(row)) for row in kept])
    flat = [torch.tensor([word for place in row for word in place], dtype=torch.int32) for row in kept]
    tokens.support_ids = pad_sequence(flat, batch_first=True)
    assert_equal(*both(lambda options: score_tokens(model, tokens, options, True)))


def test_conversations_that_begin_in_a_row_share_too(model_folder: Path) -> None:
    tokens = tokens_of([(TURN, BRANCH + ONE + draw(3, 60)), (TURN, BRANCH + ONE + draw(4, 61))])
    tokens.restarts = torch.zeros_like(tokens.responses, dtype=torch.bool)
    tokens.restarts[:, len(BRANCH)] = True
    model = load_causal_lm(str(model_folder), torch.float32)
    assert_equal(*both(lambda options: score_tokens(model, tokens, options, True)))
    inputs, _ = PackedSequences.from_tokens(tokens).sharing_prefixes(PrefixSharing()).model_inputs(True, None)
    assert inputs["input_ids"].numel() == len(TURN) + len(BRANCH) + len(ONE) + 3 + 4


def test_values_of_a_critic_are_the_same(model_folder: Path) -> None:
    model = load_value_model(str(model_folder), torch.float32)
    torch.nn.init.normal_(model.score.weight)  # type: ignore[union-attr, arg-type]
    tokens = tokens_of(ROWS["two groups"])
    assert_equal(*both(lambda options: score_values(model, tokens, options)))


@pytest.mark.parametrize("equal", [True, False])
def test_tokens_with_other_experts_are_not_shared(tmp_path: Path, equal: bool) -> None:
    """Two rows with recorded experts for every place, in the second row others at place 12."""
    small_experts(Qwen2MoeForCausalLM, VOCABULARY).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32)
    rows: Rows = [(ONE, draw(4, 70)), (ONE, draw(4, 71))]
    tokens, places = tokens_of(rows), len(ONE) + 3
    recorded = (
        torch.from_numpy(np.random.default_rng(6).integers(0, 5, (places, 2, 1))).expand(-1, -1, 2).clone()
    )
    recorded[..., 1] = (recorded[..., 0] + 1) % 5
    experts = recorded.expand(2, places, 2, 2).clone().to(torch.uint8)
    experts[1, 12] = experts[1, 12] if equal else (experts[1, 12] + 1) % 5
    tokens.experts_counts = torch.tensor([[4 * len(ONE), 4, 4, 4]] * 2)
    tokens.experts_ids = experts.flatten(1)
    replay, sharing = RouterReplay(model), PrefixSharing()
    with torch.no_grad():
        found, expected = (
            score_tokens(model, tokens, ForwardOptions(prefixes=prefixes, replay=replay), True)
            for prefixes in (sharing, None)
        )
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    assert found.flipped_experts is not None
    assert expected.flipped_experts is not None
    assert torch.equal(found.flipped_experts, expected.flipped_experts)
    assert sharing.take_fraction().total == (20 if equal else 12)


def test_recomputed_activations_have_the_same_gradient(model_folder: Path) -> None:
    tokens, found = tokens_of(ROWS["three levels of branches"]), []
    for checkpointing, sharing in ((False, None), (True, PrefixSharing())):
        model = load_causal_lm(str(model_folder), torch.float32, gradient_checkpointing=checkpointing).train()
        scores = score_tokens(model, tokens, ForwardOptions(prefixes=sharing), with_entropy=True)
        assert scores.entropies is not None
        weights = positions_mask(tokens.response_lengths, tokens.responses.shape[1]) * torch.arange(
            1.0, 1 + tokens.responses.shape[1]
        )
        found.append(gradients(model, ((scores.log_probs + scores.entropies) * weights).sum()))
    assert furthest(found[1], found[0]) < 1e-5


def test_the_plain_model_of_transformers_agrees(model_folder: Path) -> None:
    """With its own norms and attention, in float32."""
    plain = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    model = load_causal_lm(str(model_folder), torch.float32)
    rows = ROWS["three levels of branches"]
    torch.testing.assert_close(shared(model, rows), row_by_row(plain, rows), rtol=1e-5, atol=2e-5)


def test_a_micro_batch_without_rows_of_its_own_has_a_layout(tmp_path: Path) -> None:
    """A rank without rows scores row 0 alone."""
    model = load_causal_lm(str(write_small_model(tmp_path)), torch.float32)
    tokens = tokens_of([(ONE, [])])
    scores = score_tokens(model, tokens, ForwardOptions(prefixes=PrefixSharing()), with_entropy=False)
    assert not scores.log_probs.any()
