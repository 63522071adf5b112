"""Planted runs in the files of other trainers: what is named first, beside what their own folder names.

Usage: python -m scripts.planted_faults.in_files RUNS --seed 1 --out FILE
RUNS is the folder of ``python -m scripts.planted_faults``. A line of FILE for each run; a repeated call goes
on behind the last.
With ``RUNS/sft_model`` the first step is scored again, too, as ``verl-rc diagnose --model`` does.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_faults.faults import ARMS, Fault
from planted_faults.foreign_layouts import WRITERS, Row
from planted_faults.matrix import Named, named_first, named_of

from verl_rc.data.token_rows import record_of_rows, rows_of
from verl_rc.health.cause_table import CAUSES
from verl_rc.insight.diagnosis import DiagnosisRequest
from verl_rc.insight.replay.foreign import diagnose_with_model
from verl_rc.insight.run_folder import RunData, read_run, token_source
from verl_rc.insight.run_folder.folder import with_tokens
from verl_rc.insight.run_folder.token_files import TokenSource
from verl_rc.study.runs import folder_of

READ_SLOWLY = ("slime", "miles")
"""Dumps of many small tensors: every third step is written."""
ALONE = ("response_mask", "rollout_log_prob", "old_log_prob")
WITH_MODEL = ("prime-rl", "NeMo-RL")
"""Whose files are also read with the model: with entropies and without."""
PLANTED_IN_ROWS = {
    "mask shifted": ("healthy bf16", lambda row: {**row, "response_mask": [0, *row["response_mask"][:-1]]})
}
"""Faults with which a run ends before its first step: the run whose rows stand for it, and the change."""


def steps_of(folder: Path) -> dict[int, list[Row]]:
    """The rows of each recorded step, in plain numbers."""
    source = token_source(folder)
    if source is None:
        return {}
    return {record.step: [_plain(row) for row in rows_of(record)] for record in source.records()}


def _plain(row: Mapping[str, Any]) -> Row:
    not_computed = {"old_log_prob": [0.0] * len(row["response_mask"])}  # as trainers write it
    return (
        not_computed
        | {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in row.items()
            if name != "version"  # of tokens here, of samples in the dumps
        }
        | ({"version": int(row["version"][-1])} if "version" in row else {})
    )


def readings(
    steps: Mapping[int, list[Row]], fault: Fault, model: Path, temperature: float
) -> Iterator[tuple[str, Named]]:
    """What is named in each trainer's files, with the model too, and with two log-probs and a mask alone."""
    for trainer, write in WRITERS.items():
        with tempfile.TemporaryDirectory() as place:
            for step, rows in steps.items():
                if trainer not in READ_SLOWLY or step % 3 == 1:
                    write(Path(place), step, rows)
            yield trainer, named_first(read_run(Path(place)), fault, "")
            if trainer in WITH_MODEL and model.is_dir():
                request = DiagnosisRequest(
                    Path(place),
                    rows=1000,
                    model=model,
                    temperature=temperature,
                    dtypes=("float32", "bfloat16"),
                )
                yield f"{trainer} and the model", named_of(diagnose_with_model(request).statements, fault)

    def alone(step: int) -> Any:
        return record_of_rows({}, step, [{name: row[name] for name in ALONE} for row in steps[step]])

    source = TokenSource("nobody", list(steps), alone)
    run = with_tokens(RunData("alone", Path("alone"), "token records"), source)
    yield "log-probs and mask alone", named_first(run, fault, "")


def line_of(folder: Path, arm: str, fault: Fault, model: Path) -> dict[str, Any]:
    """What is named first natively and in each layout."""
    named, steps = {}, steps_of(folder)
    if arm in PLANTED_IN_ROWS:
        change = PLANTED_IN_ROWS[arm][1]
        steps = {step: [change(row) for row in rows] for step, rows in steps.items()}
    else:
        named["natively"] = named_first(read_run(folder), fault, "")
    temperature = next(
        (float(text.partition("=")[2]) for text in fault.overrides if ".temperature=" in text), 1.0
    )
    named |= dict(readings(steps, fault, model, temperature))
    return {"arm": arm, **{name: [_outcome(one), one.cause] for name, one in named.items()}}


def _outcome(named: Named) -> str:
    """Of a cause that leaves open what differs: not separable."""
    is_open = named.cause in CAUSES and not CAUSES[named.cause].is_specific
    return "not separable" if named.outcome == "wrong" and is_open else named.outcome


def main() -> None:
    """Judge what is not in the file yet, and print what was named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.touch()
    done = {json.loads(line)["arm"] for line in options.out.read_text("utf-8").splitlines()}
    for arm, fault in ARMS.items():
        run_arm = PLANTED_IN_ROWS[arm][0] if arm in PLANTED_IN_ROWS else arm
        folder = folder_of(options.runs, run_arm, options.seed)
        if arm in done or not (folder / "planted.json").is_file():
            continue
        line = json.dumps(line_of(folder, arm, fault, options.runs / "sft_model"))
        with options.out.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
