"""The warm start: its loss and accuracy against plain loops, its invariances, its early stop and what it
saves."""

import io
import random
from pathlib import Path

import make_tiny_model
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_rc.config.sft import SftConfig
from verl_rc.records.tokenize import WorkedExample
from verl_rc.runtime.workers.sft import answer_logits, load_sft, train_sft, train_step, validate

SMALL = [
    "--num_layers",
    "2",
    "--hidden_size",
    "32",
    "--num_heads",
    "2",
    "--num_kv_heads",
    "1",
    "--intermediate_size",
    "64",
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model.main(["--output_dir", str(folder), "--seed", "3", *SMALL])
    return folder


@pytest.fixture
def make_setup(model_folder, tmp_path):
    """Loads a warm start on copying digits: "407=" is answered by "407"."""

    def make(num_examples=64, **changes):
        drawn = random.Random(0)
        questions = [
            "".join(drawn.choices("0123456789", k=drawn.choice([1, 2, 3]))) for _ in range(num_examples)
        ]
        rows = [{"messages": [{"role": r, "content": q} for r in ("user", "assistant")]} for q in questions]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sft.parquet")
        tree = {
            "model": {"path": str(model_folder)},
            "data": {
                "train_files": str(tmp_path / "sft.parquet"),
                "val_files": str(tmp_path / "sft.parquet"),
            },
            "trainer": {"output_dir": str(tmp_path / "trained")},
        }
        tree["data"]["train_batch_size"] = 16
        for key, value in changes.items():
            section, leaf = key.split("__")
            tree.setdefault(section, {})[leaf] = value
        return load_sft(SftConfig.model_validate(tree))

    return make


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()


def mean_answer_loss(model: torch.nn.Module, examples: list[WorkedExample]) -> float:
    """One example after the other, one token after the other."""
    losses = []
    for example in examples:
        tokens = example.prompt_token_ids + example.answer_token_ids
        log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses += [
            -float(log_probs[i - 1, tokens[i]]) for i in range(len(example.prompt_token_ids), len(tokens))
        ]
    return sum(losses) / len(losses)


def greedy(model: torch.nn.Module, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def test_losses_are_means_over_answer_tokens_alone(make_setup, model_folder):
    setup = make_setup(num_examples=7, data__train_batch_size=7)
    expected = mean_answer_loss(reference(model_folder), setup.train)
    assert validate(setup).loss == pytest.approx(expected, rel=1e-5)
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(setup.model.parameters(), lr=0.0)
        assert train_step(setup, setup.train, optimizer) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_accuracy_is_that_of_greedy_decoding(make_setup, model_folder):
    setup, model = make_setup(num_examples=16), reference(model_folder)
    right = [
        WorkedExample(e.prompt_token_ids, greedy(model, e.prompt_token_ids, 1 + index % 4))
        for index, e in enumerate(setup.held_out)
    ]
    wrong = [
        WorkedExample(e.prompt_token_ids, [*e.answer_token_ids[:-1], (e.answer_token_ids[-1] + 1) % 258])
        for e in right[:5]
    ]
    setup.held_out[:] = [*wrong, *right[5:]]
    assert validate(setup).accuracy == pytest.approx(11 / 16)


def test_answer_logits_say_which_token_and_example_they_belong_to(make_setup):
    examples = [WorkedExample([1, 2], [3]), WorkedExample([4], [5, 6, 7])]
    logits, targets, rows = answer_logits(make_setup().model, examples)
    assert logits.shape == (4, 258)
    assert targets.tolist() == [3, 5, 6, 7]
    assert rows.tolist() == [0, 1, 1, 1]


def test_a_step_does_not_depend_on_the_split_into_forward_passes(make_setup):
    losses, weights = [], []
    for max_tokens in (16384, 40, 8):
        setup = make_setup(data__max_token_len_per_gpu=max_tokens)
        optimizer = torch.optim.SGD(setup.model.parameters(), lr=1.0)
        losses.append(train_step(setup, setup.train[:16], optimizer))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in setup.model.parameters()]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(weights[2], weights[0], atol=1e-6, rtol=0)


def test_it_learns_stops_early_and_saves_what_it_learnt(make_setup):
    setup = make_setup(
        num_examples=16,
        optim__lr=1e-2,
        trainer__total_training_steps=200,
        trainer__test_freq=5,
        trainer__stop_at_accuracy=0.3,
    )
    before, console = validate(setup), quiet()
    result = train_sft(setup, console)
    assert before.accuracy == 0.0
    assert result.validation.accuracy >= 0.3
    assert result.steps < 200
    assert result.steps % 5 == 0
    assert result.validation.loss < before.loss / 2
    lines = console.file.getvalue().splitlines()
    assert len(lines) == result.steps // 5
    assert f"held-out accuracy {result.validation.accuracy:.3f}" in lines[-1]
    saved = reference(result.folder)
    assert mean_answer_loss(saved, setup.held_out) == pytest.approx(result.validation.loss, rel=1e-4)
    assert (
        AutoTokenizer.from_pretrained(result.folder)("407=")["input_ids"]
        == setup.tokenizer("407=")["input_ids"]
    )
    assert saved.generation_config.eos_token_id == setup.tokenizer.eos_token_id


def test_equal_seeds_give_equal_models(make_setup):
    losses = []
    for seed in (1, 1, 2):
        setup = make_setup(trainer__seed=seed, trainer__total_training_steps=3, trainer__test_freq=9)
        losses.append(train_sft(setup, quiet()).validation.loss)
    assert losses[0] == losses[1] != losses[2]


def test_an_accuracy_that_is_not_reached_is_said(make_setup):
    setup = make_setup(trainer__total_training_steps=1, trainer__stop_at_accuracy=1.0)
    console = quiet()
    assert train_sft(setup, console).steps == 1
    assert (
        "below trainer.stop_at_accuracy=1.0: raise trainer.total_training_steps=1" in console.file.getvalue()
    )


def test_a_loss_that_is_no_number_stops_the_run(make_setup):
    setup = make_setup()
    with torch.no_grad():
        setup.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"Lower optim.lr=0.001"):
        train_step(setup, setup.train[:4], torch.optim.SGD(setup.model.parameters(), lr=0.0))


def test_a_gradient_that_is_no_number_stops_the_run_before_anything_is_saved(make_setup):
    setup = make_setup(trainer__total_training_steps=1)
    setup.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(FloatingPointError, match=r"its gradient must be numbers, got [0-9.]+ and inf"):
        train_sft(setup, quiet())
    assert not list(Path(setup.config.trainer.output_dir).glob("*.safetensors"))


def test_what_cannot_be_trained_is_refused(make_setup, model_folder):
    with pytest.raises(ValueError, match=r"data.train_batch_size=65 examples, got 64"):
        make_setup(data__train_batch_size=65)
    with pytest.raises(ValueError, match=r"another folder than model.path"):
        make_setup(trainer__output_dir=str(model_folder))
    with pytest.raises(ValueError, match="no such folder"):
        make_setup(model__path=str(model_folder / "nowhere"))
