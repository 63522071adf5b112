"""Whatever a data file holds, prompts come out of it as they stand in it, or a sentence that names the
file."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_models import small_run_config

from verl_rc.config.run import RunConfig
from verl_rc.plan.doctor import Inputs, check_data, check_reward
from verl_rc.records.dataset import build_train_loader, build_validation_rows

BAD_PROMPTS: list[Any] = [
    None,
    [],
    "text",
    7,
    [None],
    ["text"],
    [{}],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": None, "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": 3}],
    {"role": "user"},
    [[{"role": "user", "content": "x"}]],
    [{"role": "user", "content": "x" * 5_000}],
    [{"role": "user", "content": "half \ud800"}],
    [{"role": "user", "content": ""}],
    [{"role": "juggler", "content": "x"}],
    [{"role": "user", "content": "x"}] * 200,
]
BAD_FIELDS: dict[str, list[Any]] = {
    "data_source": [None, 7, "", ["digits"], {"a": 1}, "unknown source", "\ud800"],
    "reward_model": [
        None,
        {},
        "1",
        {"style": "rule"},
        {"ground_truth": None},
        {"ground_truth": [1, 2]},
        [1],
        {"ground_truth": 7},
    ],
    "extra_info": [None, "text", 3, [1], {}, {"a": {"b": None}}, {"index": 10**30}, {"index": "x"}],
}
ODD_BYTES = [
    b"",
    b"PAR1",
    b"\x00" * 64,
    b"\xff\xfe\x00",
    b"null",
    b"{}",
    b"[]",
    b"[1]",
    b"{",
    b'"text"',
    b"[" * 5000,
    b"\n\n\n",
    b"NaN",
]


def rows_of(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": str(rng.randrange(1000))}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index},
        }
        for index in range(rng.randint(1, 6))
    ]


def spoil(rows: list[dict[str, Any]], rng: random.Random) -> None:
    """Change some rows for the worse."""
    for _ in range(rng.randint(0, 2)):
        row = rng.choice(rows)
        match rng.randrange(4):
            case 0:
                row["prompt"] = rng.choice(BAD_PROMPTS)
            case 1:
                name = rng.choice(sorted(BAD_FIELDS))
                row[name] = rng.choice(BAD_FIELDS[name])
            case 2:
                row.pop(rng.choice(sorted(row)), None)
            case 3:
                row[rng.choice(["prompt ", "Prompt", "é", "", "uid"])] = rng.choice([1, None, "x", [1]])


def parquet_bytes(rows: list[dict[str, Any]], rng: random.Random, path: Path) -> bytes:
    """A parquet file, with something wrong with it at times; JSON where Arrow cannot hold the rows."""
    try:
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        match rng.randrange(8):
            case 0:
                table = table.slice(0, 0)
            case 1:
                table = table.append_column("prompt", pa.array([1] * table.num_rows))
            case 2:
                table = table.set_column(
                    0, "data_source", pa.array([b"\xff\xfe"] * table.num_rows).view(pa.string())
                )
            case 3:
                table = table.set_column(
                    0, "data_source", pa.array(["digits"] * table.num_rows).dictionary_encode()
                )
        pq.write_table(table, path)
    except (pa.ArrowException, UnicodeError, OverflowError, KeyError):
        return json.dumps(rows).encode()
    return path.read_bytes()


def write_file(rng: random.Random, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """A file of random rows in one of the formats, perhaps damaged; its path, and the rows that went into
    it."""
    rows = rows_of(rng)
    if rng.random() < 0.8:
        spoil(rows, rng)
    path = folder / f"{rng.choice(['data', 'a b', 'é'])}.{rng.choice(['parquet', 'jsonl', 'json'])}"
    if path.suffix == ".parquet":
        content = parquet_bytes(rows, rng, path)
    elif path.suffix == ".jsonl":
        content = "\n".join(json.dumps(row) for row in rows).encode()
    else:
        content = json.dumps(rows).encode()
    match rng.randrange(12):
        case 0:
            content = content[: rng.randrange(len(content))]
        case 1:
            place = rng.randrange(len(content))
            content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
        case 2:
            content = rng.choice(ODD_BYTES)
    path.unlink(missing_ok=True)
    if rng.random() < 0.97:
        path.write_bytes(content)
    return str(path), rows


def read(seed: int, folder: Path, tokenizer: Any) -> str:
    """What becomes of one or two random files: the number of prompts, or the message; the doctor and a run
    must agree."""
    rng = random.Random(seed)
    files = [write_file(rng, folder)[0] for _ in range(rng.choice([1, 1, 1, 2]))]
    given = ",".join(f"'{file}'" for file in files)
    limits = [
        f"data.truncation={rng.choice(['left', 'error'])}",
        f"data.filter_overlong_prompts={rng.random() < 0.3}",
    ]
    files_given = [f"data.train_files=[{given}]", f"data.val_files=[{given}]", "data.train_batch_size=1"]
    config = small_run_config(folder, *files_given, *limits, "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    examined = examine(config, tokenizer)
    try:
        loader = build_train_loader(config.data, tokenizer)
        prompts = [row for batch in loader for row in batch]
        validation = build_validation_rows(config.data, tokenizer)
    except ValueError as error:
        message = str(error)
        assert "must" in message, message
        assert len(message) < 2000
        assert any(Path(file).name in message for file in files) or "data.train_files" in message, message
        return message
    assert len(prompts) == len(validation) > 0
    assert all(isinstance(row.extra_info, dict) and row.prompt_token_ids for row in prompts)
    assert "data.train_files" not in examined or limits[0].endswith("error")
    return "accepted"


def examine(config: RunConfig, tokenizer: Any) -> set[str]:
    """Subjects that the doctor finds fault with."""
    inputs = Inputs(tokenizer=tokenizer)
    findings = [*check_data(config, inputs), *check_reward(config, inputs)]
    assert all(
        finding.found and (finding.status != "failed" or (finding.must and finding.remedy))
        for finding in findings
    )
    return {finding.subject for finding in findings if finding.status == "failed"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from make_tiny_model import build_tokenizer

    from verl_rc.records.tokenize import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(1024).save_pretrained(folder)
    return load_tokenizer(str(folder))


def test_files_are_read_as_they_are_or_refused_with_a_sentence(tokenizer: Any, tmp_path: Path) -> None:
    outcomes = [read(seed, tmp_path, tokenizer) for seed in range(120)]
    assert outcomes.count("accepted") >= 20
    assert len(outcomes) - outcomes.count("accepted") >= 40


@pytest.mark.chaos
def test_many_files(tokenizer: Any, tmp_path: Path) -> None:
    for seed in range(120, 3000):
        read(seed, tmp_path, tokenizer)
