"""The first recorded step of another trainer's run, scored again: expected log-probs are those of
transformers, row by row in float32, and what is planted in the files is what is said."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_layouts import WRITERS, Row
from planted_series import healthy, write_run
from small_checkpoints import write_tiny_model
from transformers import AutoModelForCausalLM

from verl_rc.cli import main
from verl_rc.data.token_lines import TokenLines
from verl_rc.health.cause_table import ENGINES_INPUTS, NOT_THE_MODEL, OTHER_INPUTS
from verl_rc.insight.diagnosis import Diagnosis, DiagnosisRequest, diagnose
from verl_rc.insight.replay.diagnosis import diagnose_with_replays
from verl_rc.insight.replay.foreign import diagnose_with_model

COUNT, LENGTH = 24, 12
DIGITS = np.random.default_rng(0).integers(48, 58, (COUNT, LENGTH + 4)).tolist()
PROMPTS, RESPONSES = [row[: 2 + n % 3] for n, row in enumerate(DIGITS)], [row[4:] for row in DIGITS]
PAD = 257
"""The model's."""
FLOAT32 = {"trainer_dtype": "float32", "engine_dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "first", "--no-tie_word_embeddings")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shapes."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "other", "--seed", "7")


@functools.cache
def sampled(folder: Path, temperature: float) -> list[list[int]]:
    """Responses that the model samples."""
    generator = torch.Generator().manual_seed(0)
    responses = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = network(folder)(torch.tensor([ids])).logits[0, -1]
            ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        responses.append(ids[len(prompt) :])
    return responses


def distributions(folder: Path, prompts: Any, responses: Any, temperature: float = 1.0) -> tuple[Any, Any]:
    """Log-probs and entropies, float32 ``[rows, tokens]``."""
    rows, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = network(folder)(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        logs = (logits / temperature).log_softmax(-1)
        rows.append(logs.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist())
        entropies.append((-logs.exp() * logs).sum(-1).tolist())
    return np.array(rows, "float32"), entropies


def log_probs(
    folder: Path, prompts: Any = PROMPTS, responses: Any = RESPONSES, temperature: float = 1.0
) -> Any:
    return distributions(folder, prompts, responses, temperature)[0]


@functools.cache
def network(folder: Path) -> Any:
    """The model, which every test reads and none changes."""
    return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def rows_with(train: Any, rollout: Any, responses: Any = RESPONSES) -> list[Row]:
    return [
        {
            "prompt_ids": PROMPTS[index],
            "response_ids": responses[index],
            "response_mask": [1] * LENGTH,
            "rollout_log_prob": rollout[index].tolist(),
            "old_log_prob": None if train is None else train[index].tolist(),
            "advantage": [0.0] * LENGTH,
            "score": 0.0,
        }
        for index in range(COUNT)
    ]


def write(
    path: Path, train: Any, rollout: Any, responses: Any = RESPONSES, step: int = 1, **facts: Any
) -> Path:
    """A token record as a hook writes it."""
    with TokenLines(path / f"tokens/step_{step:06d}.rank_0.jsonl", trainer="TRL", **facts) as lines:
        for row in rows_with(train, rollout, responses):
            lines.write(
                step, *(row.pop(n) for n in ("response_mask", "rollout_log_prob", "old_log_prob")), **row
            )
    return path


def replayed(folder: Path, model: Path, **further: Any) -> Diagnosis:
    return diagnose_with_model(DiagnosisRequest(folder, model=model, **further))


def grave(diagnosis: Diagnosis) -> list[str]:
    return [one.cause for one in diagnosis.statements if one.level in ("fault", "notice")]


def said(diagnosis: Diagnosis, words: str) -> bool:
    return any(words in note for note in diagnosis.notes)


def test_a_healthy_run_is_reproduced_on_both_sides(model: Path, tmp_path: Path) -> None:
    exact = log_probs(model)
    diagnosis = replayed(write(tmp_path, exact, exact + 2e-4, temperature=1.0, **FLOAT32), model)
    (record,) = diagnosis.replayed
    assert (record.step, record.tokens) == (1, COUNT * LENGTH)
    assert record.gap == pytest.approx(2e-4, rel=1e-2)
    assert record.parts["trainer"].size < 1e-5
    assert record.parts["rest"].size == pytest.approx(2e-4, rel=1e-2)
    assert grave(diagnosis) == []
    assert said(diagnosis, "of the trainer, step 1: reproduced by the model in float32 at temperature 1")
    assert said(diagnosis, "of the engine, step 1: reproduced")
    assert said(diagnosis, "not asked with a model alone: older weights (R3)")


def test_the_healthy_gap_is_what_both_precisions_round(model: Path, tmp_path: Path) -> None:
    exact = log_probs(model)
    folder = write(tmp_path, exact, exact, temperature=1.0)
    sizes = [
        replayed(folder, model, dtypes=dtypes).replayed[0].numbers["healthy_gap"]
        for dtypes in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
    ]
    assert sizes[0] == 0
    bfloat16 = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    rounded = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logs = (
            bfloat16(torch.tensor([[*prompt, *response]]))
            .logits[0, len(prompt) - 1 : -1]
            .float()
            .log_softmax(-1)
        )
        rounded.append(logs.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist())
    expected = float(np.sqrt(np.mean((np.array(rounded) - exact) ** 2)))
    assert sizes[1] == pytest.approx(expected, rel=1e-4)
    assert sizes[2] == pytest.approx(expected * 2**0.5, rel=1e-4)


@pytest.mark.parametrize("is_trainer", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda prompt: prompt[1:], "prompts without their first token"),
        (lambda prompt: [prompt[0], *prompt], "the first token of prompts twice"),
        (lambda prompt: [PAD] * (4 - len(prompt)) + prompt, "padding attended as if it were prompt"),
    ],
)
def test_a_mistake_in_the_prompts_is_named_on_its_side(
    model: Path, tmp_path: Path, change: Callable[[list[int]], list[int]], words: str, is_trainer: bool
) -> None:
    exact, wrong = log_probs(model), log_probs(model, [change(prompt) for prompt in PROMPTS])
    sides = (wrong, exact) if is_trainer else (exact, wrong)
    diagnosis = replayed(write(tmp_path, *sides, temperature=1.0, **FLOAT32), model)
    assert diagnosis.statements[0].cause == (OTHER_INPUTS if is_trainer else ENGINES_INPUTS).name
    assert words in diagnosis.statements[0].sentence


def test_an_engine_with_other_weights_is_not_reproduced(model: Path, other: Path, tmp_path: Path) -> None:
    diagnosis = replayed(
        write(tmp_path, log_probs(model), log_probs(other), temperature=1.0, **FLOAT32), model
    )
    assert grave(diagnosis)[0] == NOT_THE_MODEL.name
    assert said(diagnosis, "of the engine, step 1: not reproduced by the model")
    assert said(diagnosis, "of the trainer, step 1: reproduced")


def test_another_model_than_the_run_s_is_no_fault_of_the_run(
    model: Path, other: Path, tmp_path: Path
) -> None:
    exact = log_probs(model)
    diagnosis = replayed(write(tmp_path, exact, exact, temperature=1.0, **FLOAT32), other)
    assert grave(diagnosis) == []
    assert diagnosis.replayed == ()
    assert said(diagnosis, "it is not the model of that step, or the temperature of both is not 1")


def test_only_the_first_step_has_the_weights_of_the_beginning(model: Path, tmp_path: Path) -> None:
    exact = log_probs(model)
    folder = write(tmp_path, exact, exact, step=10, temperature=1.0, **FLOAT32)
    assert said(replayed(folder, model), "not replayed: the first recorded step is 10")
    assert [one.step for one in replayed(folder, model, first_step=10, last_step=10).replayed] == [10]


@pytest.fixture(scope="module")
def at_temperature(model: Path) -> list[Row]:
    """Rows that trainer and engine sampled and scored at temperature 0.8."""
    responses = sampled(model, 0.8)
    exact, entropies = distributions(model, PROMPTS, responses, 0.8)
    rows = zip(rows_with(exact, exact, responses), entropies, strict=True)
    return [{**row, "entropy": entropy} for row, entropy in rows]


@pytest.mark.parametrize("trainer", WRITERS)
def test_files_of_each_trainer_are_replayed(
    model: Path, tmp_path: Path, at_temperature: list[Row], trainer: str
) -> None:
    WRITERS[trainer](tmp_path, 1, at_temperature)
    diagnosis = replayed(tmp_path, model, temperature=0.8, dtypes=("float32", "float32"))
    assert diagnosis.replayed[0].tokens == COUNT * LENGTH
    assert diagnosis.replayed[0].parts["trainer"].size < 1e-5
    assert grave(diagnosis) == []


def test_an_unknown_temperature_is_asked_for_and_an_unknown_precision_assumed(
    model: Path, tmp_path: Path, at_temperature: list[Row]
) -> None:
    WRITERS["prime-rl"](tmp_path, 1, at_temperature)
    unasked = "not replayed: the temperature of sampling is not in the run's files"
    assert said(replayed(tmp_path, model), unasked)
    diagnosis = replayed(tmp_path, model, temperature=0.8)
    assert grave(diagnosis) == []
    assert said(diagnosis, "engine_dtype is not in the run's files, bfloat16 is assumed")


def test_the_model_gives_what_the_files_lack(model: Path, tmp_path: Path) -> None:
    """Without entropies and shared prompts a temperature is not seen."""
    responses = sampled(model, 0.7)
    train, rollout = (log_probs(model, PROMPTS, responses, temperature) for temperature in (1.0, 0.7))
    folder = write(tmp_path, train, rollout, responses, temperature=1.0, **FLOAT32)
    assert "temperature" not in [one.cause for one in diagnose(DiagnosisRequest(folder)).statements]
    diagnosis = replayed(folder, model)
    assert diagnosis.statements[0].cause == "temperature"
    assert diagnosis.statements[0].evidence["other"] == pytest.approx(0.7, rel=1e-3)


def test_engine_s_log_probs_alone_are_compared_with_the_model(
    model: Path, other: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path, None, log_probs(model), temperature=1.0, **FLOAT32)
    diagnosis = replayed(folder, model)
    assert diagnosis.replayed[0].gap < 1e-5
    assert said(diagnosis, "the trainer's log-probs are not in the run's files")
    assert grave(replayed(folder, other))[0] == NOT_THE_MODEL.name


def test_raw_log_probs_are_those_of_temperature_1(model: Path, tmp_path: Path) -> None:
    facts = {"temperature": 0.7, "logprobs_mode": "raw_logprobs", **FLOAT32}
    responses = sampled(model, 0.7)
    train, rollout = (log_probs(model, PROMPTS, responses, temperature) for temperature in (0.7, 1.0))
    diagnosis = replayed(write(tmp_path, train, rollout, responses, **facts), model)
    assert said(diagnosis, "of the engine, step 1: reproduced by the model in float32 at temperature 1")
    assert diagnosis.statements[0].cause == "raw log-probs at another temperature"


def test_what_cannot_be_replayed_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_run(tmp_path / "own", healthy())
    with pytest.raises(ValueError, match="must be a run of another trainer"):
        replayed(own, model)
    exact = log_probs(model)
    folder = write(tmp_path / "foreign", exact, exact, temperature=1.0, **FLOAT32)
    assert main(["diagnose", str(folder), "--replay", "R0"]) == 2
    assert "--model FOLDER, the model that the run began with" in capsys.readouterr().err
    assert main(["diagnose", str(folder), "--model", str(tmp_path / "nowhere")]) == 2
    assert "--model must be a model folder" in capsys.readouterr().err
    assert main(["diagnose", str(folder), "--model", str(model)]) == 0
    assert "step 1, 288 tokens: gap 0.0000 nats; trainer 0.0000" in capsys.readouterr().out
    with pytest.raises(ValueError, match="read as"):
        diagnose_with_replays(DiagnosisRequest(folder, ("R0",)))


ALONE = """
import sys
for name in ({missing}):
    sys.modules[name] = None
from verl_rc.cli import main
sys.exit(main(["diagnose", {folder!r}, "--model", {model!r}]))
"""


@pytest.mark.parametrize(
    ("missing", "status", "words"),
    [
        ("'tensordict', 'hydra', 'ray', 'vllm', 'pyarrow', 'peft'", 0, "trainer, step 1: reproduced"),
        ("'torch',", 2, "verl-rc diagnose: it needs torch, any version from 2.4 on"),
    ],
)
def test_it_runs_where_the_trainer_is_not_installed(
    model: Path, tmp_path: Path, missing: str, status: int, words: str
) -> None:
    exact = log_probs(model)
    folder = write(tmp_path, exact, exact, temperature=1.0, **FLOAT32)
    code = ALONE.format(missing=missing, folder=str(folder), model=str(model))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stderr[-2000:]
    assert words in result.stdout + result.stderr
