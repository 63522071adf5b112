"""Experts of an engine in the trainer's forward pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from small_models import VOCABULARY, make_tokens, ragged, small_experts, small_model_config
from torch import Tensor
from transformers import Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM

from verl_rc.records.batches import TokenBatch
from verl_rc.runtime.distributed.sequence_parallel import SequenceParallel
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm
from verl_rc.runtime.workers.packing import PackedSequences
from verl_rc.runtime.workers.router_replay import RouterReplay

LAYERS, TOP_K, EXPERTS = 2, 2, 5
PROMPTS, RESPONSES = [3, 6, 1, 4], [7, 2, 1, 5]


def routers(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers]


def row_ids(tokens: TokenBatch, row: int) -> Tensor:
    prompt, response = int(tokens.prompt_lengths[row]), int(tokens.response_lengths[row])
    return torch.cat([tokens.prompts[row, -prompt:], tokens.responses[row, :response]])


def own_experts(model: Any, token_ids: Tensor) -> Tensor:
    """``[N, layers, experts of a token]``: what the model takes, one row alone."""
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for router in routers(model)
    ]
    with torch.no_grad():
        model(input_ids=token_ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def log_probs_with(model: Any, token_ids: Tensor, experts: Tensor) -> Tensor:
    """``[N - 1]``: of each token but the first, where a row takes given experts: a loop over its layers."""

    def replaced(layer: int, router: Any, output: Any) -> Any:
        logits, weights, own = output
        taken = own.clone()
        taken[: len(experts)] = experts[:, layer]
        chosen = torch.stack(
            [logits[place].double().softmax(-1)[taken[place]] for place in range(len(taken))]
        )
        if router.norm_topk_prob:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(weights.dtype), taken

    hooks = [
        router.register_forward_hook(lambda one, _, output, layer=layer: replaced(layer, one, output))
        for layer, router in enumerate(routers(model))
    ]
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits[:-1].log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]


def own_experts_beside(model: Any, token_ids: Tensor, experts: Tensor) -> Tensor:
    """``[N - 1, layers, experts of a token]``: what the routers choose in a row that takes ``experts``."""
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for router in routers(model)
    ]
    with torch.no_grad():
        log_probs_with(model, token_ids, experts)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)[:-1]


def with_experts(tokens: TokenBatch, experts: list[Tensor]) -> TokenBatch:
    """The rows with the experts of their places up to the last but one: with the first token the prompt's."""
    counts = torch.zeros(tokens.responses.shape, dtype=torch.int64)
    for row, length in enumerate(tokens.response_lengths.tolist()):
        counts[row, :length] = LAYERS * TOP_K
        counts[row, 0] = LAYERS * TOP_K * int(tokens.prompt_lengths[row])
    rows = [ids[:-1].reshape(-1).to(torch.uint8) for ids in experts]
    full = tokens.clone()
    full.experts_counts = counts
    full.experts_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return full


@pytest.fixture(params=[Qwen3MoeForCausalLM, Qwen2MoeForCausalLM])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    small_experts(request.param, VOCABULARY).save_pretrained(tmp_path)
    return str(tmp_path)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_model_that_is_given_its_own_experts_computes_the_same_bits(
    folder: str, remove_padding: bool, recomputed: bool
) -> None:
    model = load_causal_lm(folder, torch.float32, gradient_checkpointing=recomputed).train()
    tokens = make_tokens(PROMPTS, RESPONSES)
    experts = [own_experts(model, row_ids(tokens, row)) for row in range(len(PROMPTS))]
    options = ForwardOptions(remove_padding=remove_padding)
    plain = score_tokens(model, tokens, options, with_entropy=False)
    expected = gradients(model, plain.log_probs.sum())
    assert plain.flipped_experts is None
    replaying = replace(options, replay=RouterReplay(model))
    replayed = score_tokens(model, with_experts(tokens, experts), replaying, with_entropy=False)
    assert torch.equal(plain.log_probs, replayed.log_probs)
    assert replayed.flipped_experts is not None
    assert not replayed.flipped_experts.any()
    found = gradients(model, replayed.log_probs.sum())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # without records it takes its own, whatever it replayed before
    again = score_tokens(model, tokens, replaying, with_entropy=False)
    assert torch.equal(plain.log_probs, again.log_probs)


@pytest.mark.parametrize("remove_padding", [True, False])
def test_every_place_of_a_row_takes_the_experts_that_are_recorded_for_it(
    folder: str, remove_padding: bool
) -> None:
    """Against a loop that gives them to one row at a time, gradients too; rows in any micro-batch."""
    model, judge = (load_causal_lm(folder, torch.float32).eval() for _ in range(2))
    plain = make_tokens(PROMPTS, RESPONSES)
    given = []
    for row in range(len(PROMPTS)):
        ids = own_experts(judge, row_ids(plain, row))
        changed = torch.rand(ids.shape[:2]) < 0.3
        given.append(torch.where(changed[..., None], (ids + 1) % EXPERTS, ids))
    tokens = with_experts(plain, given)
    options = ForwardOptions(remove_padding=remove_padding, replay=RouterReplay(model))
    expected = torch.zeros(tokens.responses.shape)
    for row, length in enumerate(RESPONSES):
        log_probs = log_probs_with(judge, row_ids(tokens, row), given[row][:-1])
        expected[row, :length] = log_probs[PROMPTS[row] - 1 :]
    wanted = gradients(judge, expected.sum())
    for rows in ([0, 1, 2, 3], [3, 1]):
        part = ragged(tokens).padded(rows)
        scores = score_tokens(model, part, options, with_entropy=False)
        width = scores.log_probs.shape[1]
        assert torch.allclose(scores.log_probs, expected[rows, :width], atol=1e-5)
        assert scores.flipped_experts is not None
        for row, number in enumerate(rows):
            ids = own_experts_beside(judge, row_ids(tokens, number), given[number][:-1])
            differ = (ids.sort(-1).values != given[number][:-1].sort(-1).values).any(-1).any(-1)
            places = differ[PROMPTS[number] - 1 :].float()
            assert torch.equal(scores.flipped_experts[row, : len(places)], places)
        if len(rows) == len(PROMPTS):
            found = gradients(model, scores.log_probs.sum())
            assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)
    assert not torch.allclose(
        score_tokens(model, plain, options, with_entropy=False).log_probs, expected, atol=1e-2
    )


def test_behind_an_answer_the_first_token_brings_the_experts_of_the_places_before_it(folder: str) -> None:
    """Row: prompt of 3, sampled tokens 0 and 1, an answer at 2 and 3, sampled tokens 4 and 5; then an answer
    at 6, whose experts are nobody's."""
    model, judge = (load_causal_lm(folder, torch.float32).eval() for _ in range(2))
    tokens = make_tokens([3], [7])
    ids = own_experts(judge, row_ids(tokens, 0))
    given = (ids + 1) % EXPERTS
    size = LAYERS * TOP_K
    tokens.experts_counts = torch.tensor([[3 * size, size, 0, 0, 3 * size, size, 0]])
    # places 0 to 7: token 5 of the response, at place 8, was sampled at place 7
    tokens.experts_ids = given[:8].reshape(1, -1).to(torch.uint8)
    options = ForwardOptions(replay=RouterReplay(model))
    with torch.no_grad():
        found = score_tokens(model, tokens, options, with_entropy=False).log_probs[0]
        expected = log_probs_with(judge, row_ids(tokens, 0), given[:8])[2:]
    assert torch.allclose(found, expected, atol=1e-5)


def test_ranks_that_share_tokens_share_their_experts(folder: str) -> None:
    """13 + 12 tokens: the third rank has two places without a token."""
    model = load_causal_lm(folder, torch.float32)
    tokens = make_tokens([6, 5], [7, 7])
    given = [torch.randint(0, EXPERTS, (length, LAYERS, TOP_K)) for length in (13, 12)]
    full, packed = with_experts(tokens, given), PackedSequences.from_tokens(tokens)
    replay, group = RouterReplay(model), cast("dist.ProcessGroup", None)
    whole = replay.packed_routes(full, packed.predictors, packed.is_response, len(packed.token_ids))
    parts = [packed.model_routes(whole, True, SequenceParallel(group, rank, 3)) for rank in range(3)]
    assert [len(part.is_known) for part in parts] == [9, 9, 9]
    for name in ("expert_ids", "is_known"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together[:25], getattr(whole, name))
        assert not together[25:].any()
    assert whole.is_known.tolist() == [True] * 12 + [False] + [True] * 11 + [False]


def test_dense_layers_among_those_with_experts_have_records_that_nobody_reads(tmp_path: Path) -> None:
    small_experts(Qwen3MoeForCausalLM, VOCABULARY, mlp_only_layers=[0]).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32).eval()
    tokens = make_tokens([3], [4])
    (router,) = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    taken: list[Tensor] = []
    router.register_forward_hook(lambda _, __, output: taken.append(output[2]))
    ids = torch.stack([torch.zeros(6, 2), torch.tensor([[1, 3]] * 6)], dim=1)
    tokens.experts_counts = torch.tensor([[3 * 4, 4, 4, 4, 0, 0, 0]])
    tokens.experts_ids = ids.reshape(1, -1).to(torch.uint8)
    replay = RouterReplay(model)
    router.register_forward_hook(lambda _, __, output: taken.append(output[2]))
    score_tokens(model, tokens, ForwardOptions(replay=replay), with_entropy=False)
    assert taken[1][:6].tolist() == [[1, 3]] * 6
    assert torch.equal(taken[1][6], taken[0][6])


def test_records_of_another_model_and_other_routers_are_refused(folder: str, tmp_path: Path) -> None:
    model = load_causal_lm(folder, torch.float32)
    tokens = make_tokens([3], [1])
    tokens.experts_counts = torch.tensor([[9, 0, 0, 0, 0, 0, 0]])
    tokens.experts_ids = torch.zeros(1, 9, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"the 2 experts of all 2 layers .* got 9 numbers: engine and actor"):
        score_tokens(model, tokens, ForwardOptions(replay=RouterReplay(model)), with_entropy=False)
    Qwen2ForCausalLM(small_model_config(VOCABULARY)).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="the model has none: drop"):
        RouterReplay(load_causal_lm(str(tmp_path / "dense"), torch.float32))

    class OtherRouter(type(model.model.layers[0].mlp.gate)):  # type: ignore[misc]
        """Of a family that is not known."""

    model.model.layers[0].mlp.gate.__class__ = OtherRouter
    with pytest.raises(ValueError, match="the model has OtherRouter"):
        RouterReplay(model)
