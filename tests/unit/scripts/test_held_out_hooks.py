"""What held-out faults change in the engine and in what it gets: each its own thing, and nothing without
it."""

from types import SimpleNamespace

import pytest
import torch
from planted_faults.held_out_hooks import (
    exchanged,
    in_fp8,
    in_int8,
    misses_update,
    other_parameters,
    seed_of,
    with_prefix,
    without_adapters,
    without_stop,
    without_turn_ends,
)
from planted_faults.workers import PlantedEngine
from torch import nn

from verl_rc.config.models import ModelConfig
from verl_rc.data.parts import Answer, Part, Sample
from verl_rc.rollout.sampling import GenerationRequest
from verl_rc.workers.lora import MergedWeights


@pytest.mark.parametrize(
    ("planted", "changed"),
    [
        ({}, {}),
        ({"temperature": "0.9", "system_prompt": ""}, {}),
        ({"min_p": "0.05"}, {"min_p": 0.05}),
        ({"repetition_penalty": "1.1"}, {"repetition_penalty": 1.1}),
        ({"presence_penalty": "0.5"}, {"presence_penalty": 0.5}),
    ],
)
def test_sampling_parameters_are_those_of_the_trainer_but_for_the_planted_one(
    planted: dict[str, str], changed: dict[str, float]
) -> None:
    usual = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}

    def make(temperature: float) -> SimpleNamespace:
        return SimpleNamespace(temperature=temperature, **usual)

    assert vars(other_parameters(make, planted)(0.7)) == {"temperature": 0.7, **usual, **changed}


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ({}, [17, 16, 28]),
        ({"min_p": "0.05"}, [17, 16, 28]),
        ({"second_start_token": ""}, [256, 17, 16, 28]),
        # "S" is byte 83; the quickstart's tokenizer counts the visible ones from "!", byte 33.
        ({"system_prompt": ""}, [*(byte - 33 for byte in b"Sort."), 17, 16, 28]),
    ],
)
def test_the_engine_sees_other_ids_before_the_prompt(planted: dict[str, str], seen: list[int]) -> None:
    request = GenerationRequest([17, 16, 28], seed=3)
    assert with_prefix(request, planted) == GenerationRequest(seen, seed=3)
    assert request.prompt_token_ids == [17, 16, 28]


@pytest.mark.parametrize(
    ("planted", "first_rank", "missed"),
    [
        ({}, 2, []),
        ({"temperature": "0.9", "skip_every_second_sync": ""}, 1, [1, 3, 5]),
        ({"stale_second_engine": ""}, 1, []),
        ({"stale_second_engine": ""}, 2, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_updates_that_an_engine_misses(planted: dict[str, str], first_rank: int, missed: list[int]) -> None:
    assert [version for version in range(6) if misses_update(planted, first_rank, version)] == missed


def test_int8_has_255_values_a_channel_and_is_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1e-3], [0.1], [1.0], [40.0]]
    )
    weight[0, :4] = torch.tensor([0.0127, -0.0127, 0.00424, 0.00426])  # the first row has steps of 1e-4
    weight[0].clamp_(-0.0127, 0.0127)
    rounded = in_int8(weight)
    torch.testing.assert_close(
        rounded[0, :4], torch.tensor([0.0127, -0.0127, 0.0042, 0.0043]), rtol=1e-6, atol=0
    )
    for row, of_row in zip(rounded, weight, strict=True):
        step = float(of_row.abs().max()) / 127
        assert len(row.unique()) <= 255
        assert 0.4 * step < float((row - of_row).abs().max()) < 0.5001 * step


def test_int8_keeps_the_precision_and_rows_of_zeros() -> None:
    rounded = in_int8(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert (rounded == 0).all()


class Adapted(nn.Module):
    """A linear layer with an adapter, under PEFT's names."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.base_layer = nn.Linear(3, 2, bias=False)
        layer.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False)})
        layer.lora_B = nn.ModuleDict({"default": nn.Linear(1, 2, bias=False)})
        self.base_model = nn.Module()
        self.base_model.model = nn.ModuleDict({"q_proj": layer})
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def test_adapters_are_sent_or_left_out() -> None:
    config, model = ModelConfig(path="m", lora_rank=1, lora_alpha=4), Adapted()
    sent = {
        make: make(model, config).gather(["q_proj.weight"], torch.float32)[0]
        for make in (MergedWeights, without_adapters)
    }
    assert torch.equal(sent[MergedWeights], torch.full((2, 3), 5.0))
    assert torch.equal(sent[without_adapters], torch.ones(2, 3))
    assert without_adapters(model, config).shapes() == MergedWeights(model, config).shapes()


def test_a_rounded_cache_holds_what_fp8_can_say() -> None:
    """e4m3 has three bits behind the first one, a smallest number of 2^-9 and a largest of 448; ties go to
    the even one."""
    given = torch.tensor([1.0625, 1.07, -0.3, 500.0, -1e4, 2.0**-9, 2.0**-11], dtype=torch.bfloat16)
    assert in_fp8(given).tolist() == [1.0, 1.125, -0.3125, 448.0, -448.0, 2.0**-9, 0.0]
    assert in_fp8(given).dtype == torch.bfloat16


def sample(number: int, tokens: list[int], *, finished: bool = True) -> Sample:
    part = Part(torch.tensor(tokens, dtype=torch.int32), -torch.arange(len(tokens)).float(), version=1)
    return Sample(number, [part], finished)


def test_samples_change_places_and_keep_their_numbers() -> None:
    samples = [sample(number, [number]) for number in range(400)]
    others = exchanged(samples, torch.Generator().manual_seed(7))
    assert [one.number for one in others] == list(range(400))
    tokens = [int(one.parts[0].token_ids[0]) for one in others]
    moved = [number for number, token in enumerate(tokens) if token != number]
    assert 10 <= len(moved) <= 50
    assert all(tokens[number] == (number + 200) % 400 for number in moved)


@pytest.mark.parametrize(
    ("tokens", "finished", "left"), [([17, 16, 256], True, 2), ([17, 16], False, 2), ([256], True, 1)]
)
def test_a_stop_token_is_left_out_where_something_stays(tokens: list[int], finished: bool, left: int) -> None:
    (part,) = without_stop(sample(3, tokens, finished=finished)).parts
    assert part.token_ids.tolist() == tokens[:left]
    assert isinstance(part, Part)
    assert len(part.log_probs) == left


def test_ends_of_turns_are_left_out_and_answers_stay() -> None:
    turn = sample(0, [17, 256]).parts[0]
    assert without_turn_ends([turn, Answer(torch.tensor([9, 256], dtype=torch.int32)), turn]) == [
        17,
        9,
        256,
        17,
    ]


def test_a_prompt_has_one_seed_and_another_prompt_another() -> None:
    assert seed_of([17, 16]) == seed_of([17, 16]) != seed_of([16, 17])


@pytest.mark.parametrize("fault", ["", "rounded_log_probs", "changed_tokens"])
def test_what_an_engine_misreports_leaves_the_answers_of_tools(fault: str) -> None:
    turn = Part(torch.full([6000], 20, dtype=torch.int32), torch.full([6000], -0.123), 3)
    answer = Answer(torch.tensor([7, 8], dtype=torch.int32))
    engine = PlantedEngine.__new__(PlantedEngine)
    engine._planted, engine._chance = {fault: ""}, torch.Generator().manual_seed(7)
    first, kept, second = engine._misreported(Sample(0, [turn, answer, turn], True)).parts
    assert kept is answer
    assert torch.equal(first.token_ids, turn.token_ids) != (fault == "changed_tokens")
    assert torch.equal(second.log_probs, turn.log_probs) != (fault == "rounded_log_probs")
