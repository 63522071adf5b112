"""Log-probs of response tokens: packed, padded and one row at a time by the plain model agree."""

from pathlib import Path

import pytest
import torch
from small_models import VOCABULARY, make_tokens, ragged
from transformers import AutoModelForCausalLM

from verl_rc.records.batches import TokenBatch, positions_mask
from verl_rc.runtime.workers.forward import ForwardOptions, packed_logits, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm
from verl_rc.runtime.workers.packed_layout import PackedLayout

PROMPTS, RESPONSES = [1, 6, 3, 4], [7, 2, 0, 5]


def expected_scores(folder: Path, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row at a time through the unchanged Hugging Face model with eager attention, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    tokens = make_tokens(PROMPTS, RESPONSES)
    log_probs, entropies, squares, varentropies = torch.zeros(4, 4, 7, dtype=torch.float64)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = torch.cat([tokens.prompts[row, 6 - prompt :], tokens.responses[row, :response]])
        table = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
        for t in range(response):
            at = table[prompt - 1 + t]
            log_probs[row, t] = at[tokens.responses[row, t]]
            entropies[row, t] = -(at.exp() * at).sum()
            squares[row, t] = (2 * at).exp().sum()
            varentropies[row, t] = (at.exp() * (at + entropies[row, t]).square()).sum()
    return log_probs, entropies, squares, varentropies


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_the_plain_models(model_folder: Path, remove_padding: bool, temperature: float) -> None:
    model = load_causal_lm(str(model_folder), torch.float32)
    options = ForwardOptions(temperature, remove_padding)
    with torch.no_grad():
        scores = score_tokens(
            model, make_tokens(PROMPTS, RESPONSES), options, with_entropy=True, with_sum_pi_squared=True
        )
        expected = expected_scores(model_folder, temperature)
    for found, values in zip(
        (scores.log_probs, scores.entropies, scores.sum_pi_squared, scores.varentropies),
        expected,
        strict=True,
    ):
        assert found is not None
        torch.testing.assert_close(found.double(), values, rtol=0, atol=2e-5)


@pytest.mark.parametrize("remove_padding", [True, False])
def test_other_words_stand_beside_their_tokens(model_folder: Path, remove_padding: bool) -> None:
    """All words as candidates are a distribution, in which the token itself and the most likely ones lie."""
    model, tokens = load_causal_lm(str(model_folder), torch.float32), make_tokens(PROMPTS, RESPONSES)
    words = torch.arange(VOCABULARY).expand(*tokens.responses.shape, VOCABULARY)
    with torch.no_grad():
        found = score_tokens(
            model, tokens, ForwardOptions(0.7, remove_padding), False, top_tokens=3, candidate_ids=words
        )
    real = positions_mask(tokens.response_lengths, 7)
    assert found.candidate_log_probs is not None
    assert found.top_ids is not None
    assert found.top_log_probs is not None
    everywhere = found.candidate_log_probs.logsumexp(-1)[real]
    torch.testing.assert_close(everywhere, torch.zeros_like(everywhere), rtol=0, atol=1e-5)
    own = found.candidate_log_probs.gather(-1, tokens.responses[..., None])[..., 0]
    torch.testing.assert_close(own[real], found.log_probs[real], rtol=0, atol=1e-6)
    values, ids = found.candidate_log_probs[real].topk(3, dim=-1)
    assert torch.equal(found.top_ids[real], ids)
    torch.testing.assert_close(found.top_log_probs[real], values, rtol=0, atol=1e-6)
    assert not found.top_log_probs[~real].any()


@pytest.mark.parametrize("remove_padding", [True, False])
def test_a_conversation_that_begins_in_a_row_sees_nothing_before_it(
    model_folder: Path, remove_padding: bool
) -> None:
    """Row 1 begins two others, at positions 2 and 5; what is scored there is what rows of their own give."""
    tokens = make_tokens([3, 2, 4], [4, 7, 2])
    whole = tokens.clone()
    whole.restarts = torch.zeros(3, 7, dtype=torch.bool)
    whole.restarts[1, [2, 5]] = True
    model = load_causal_lm(str(model_folder), torch.float32)
    options = ForwardOptions(remove_padding=remove_padding)

    def scored(batch: TokenBatch) -> torch.Tensor:
        with torch.no_grad():
            return score_tokens(model, batch, options, with_entropy=False).log_probs

    def alone(begin: int, end: int) -> torch.Tensor:
        """The tokens behind the first of a conversation of row 1."""
        one = make_tokens([1], [end - begin - 1])
        one.prompts[0, -1] = tokens.responses[1, begin]
        one.responses[0, : end - begin - 1] = tokens.responses[1, begin + 1 : end]
        return scored(one)[0, : end - begin - 1]

    found, plain = scored(whole), scored(tokens)
    torch.testing.assert_close(found[[0, 2]], plain[[0, 2]], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1, :2], plain[1, :2], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1, 3:5], alone(2, 5), rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1, 6:], alone(5, 7), rtol=0, atol=2e-5)
    assert (found[1, 3:5] - plain[1, 3:5]).abs().max() > 1e-3


def test_a_batch_without_responses_has_zero_scores(model_folder: Path) -> None:
    model = load_causal_lm(str(model_folder), torch.float32)
    scores = score_tokens(model, make_tokens([2, 3], [0, 0]), ForwardOptions(1.0), with_entropy=False)
    assert not scores.log_probs.any()
    assert scores.entropies is None
    assert scores.sum_pi_squared is None


def test_gradient_checkpointing_changes_no_gradient(model_folder: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = load_causal_lm(str(model_folder), torch.float32, gradient_checkpointing=checkpointing).train()
        score_tokens(
            model, make_tokens(PROMPTS, RESPONSES), ForwardOptions(1.0), False
        ).log_probs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-6)


def test_lengths_must_sum_to_the_tokens(model_folder: Path) -> None:
    model = load_causal_lm(str(model_folder), torch.float32)
    with pytest.raises(ValueError, match="sum to the number of tokens 5, got 4"):
        packed_logits(model, torch.arange(5), [2, 2])


def test_layout_restarts_positions_in_every_sequence() -> None:
    layout = PackedLayout.from_lengths(torch.tensor([2, 3]))
    assert layout.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert layout.grid_index.tolist() == [0, 1, 3, 4, 5]


def test_a_folder_without_a_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"config\.json, got '\./nowhere'"):
        load_causal_lm("./nowhere", torch.float32)


@pytest.mark.parametrize("remove_padding", [True, False])
def test_tokens_that_the_engine_did_not_keep_count_for_nothing(
    model_folder: Path, remove_padding: bool
) -> None:
    """Against logits of the plain model, whose other words are -inf; in rows of their own, too."""
    tokens = make_tokens(PROMPTS, RESPONSES)
    sets = {
        (row, t): sorted({int(tokens.responses[row, t]), *range(3 + t, 3 + t + row)})
        for row, length in enumerate(RESPONSES)
        for t in range(length)
        if (row, t) != (3, 1)  # not recorded there
    }
    ids = [[word for t in range(7) for word in sets.get((row, t), [])] for row in range(4)]
    tokens.support_counts = torch.tensor(
        [[len(sets.get((row, t), [])) for t in range(7)] for row in range(4)]
    )
    most = max(map(len, ids))
    tokens.support_ids = torch.tensor([one + [0] * (most - len(one)) for one in ids], dtype=torch.int32)
    plain = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float64, attn_implementation="eager"
    )
    model = load_causal_lm(str(model_folder), torch.float32)
    options = ForwardOptions(0.7, remove_padding)
    with torch.no_grad():
        whole = score_tokens(model, tokens, options, with_entropy=True)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            if not response:
                continue
            alone = score_tokens(model, ragged(tokens).padded([row]), options, with_entropy=True)
            text = torch.cat([tokens.prompts[row, 6 - prompt :], tokens.responses[row, :response]])
            logits = plain(text[None]).logits[0] / 0.7
            for t in range(response):
                words = sets.get((row, t), list(range(VOCABULARY)))
                table = logits[prompt - 1 + t][words].log_softmax(-1)
                at = float(table[words.index(int(tokens.responses[row, t]))])
                assert whole.log_probs[row, t].item() == pytest.approx(at, abs=2e-5)
                assert alone.log_probs[0, t].item() == pytest.approx(at, abs=2e-5)
                assert whole.entropies is not None
                assert whole.entropies[row, t].item() == pytest.approx(
                    float(-(table.exp() * table).sum()), abs=2e-5
                )
