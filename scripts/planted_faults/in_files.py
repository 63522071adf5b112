"""Planted runs in the files of other trainers: what is named first, beside what their own folder names.

Usage: python -m scripts.planted_faults.in_files RUNS --seed 1 --out FILE
RUNS is a folder of ``python -m scripts.planted_faults`` whose runs recorded whole steps
(``trainer.token_records.full_freq=1``). A line of FILE for each run; a repeated call goes on behind the last.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence.runs import folder_of
from planted_faults.faults import ARMS, Fault
from planted_faults.foreign_layouts import WRITERS, Row
from planted_faults.matrix import Named, named_first

from verl_rc.data.token_rows import record_of_rows, rows_of
from verl_rc.health.cause_table import CAUSES
from verl_rc.insight.run_folder import RunData, read_run, token_source
from verl_rc.insight.run_folder.folder import with_tokens
from verl_rc.insight.run_folder.token_files import TokenSource

READ_SLOWLY = ("slime", "miles")
"""Dumps of many small tensors: every third step is written."""
ALONE = ("response_mask", "rollout_log_prob", "old_log_prob")


def steps_of(folder: Path) -> dict[int, list[Row]]:
    """The rows of each recorded step, in plain numbers."""
    source = token_source(folder)
    if source is None:
        return {}
    return {record.step: [_plain(row) for row in rows_of(record)] for record in source.records()}


def _plain(row: Mapping[str, Any]) -> Row:
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in row.items()
        if name != "version"  # of tokens here, of samples in the dumps
    } | ({"version": int(row["version"][-1])} if "version" in row else {})


def readings(steps: Mapping[int, list[Row]]) -> Iterator[tuple[str, RunData]]:
    """The run as each trainer's files hold it, and with two log-probs and a mask alone."""
    for trainer, write in WRITERS.items():
        with tempfile.TemporaryDirectory() as place:
            for step, rows in steps.items():
                if trainer not in READ_SLOWLY or step % 3 == 1:
                    write(Path(place), step, rows)
            yield trainer, read_run(Path(place))

    def alone(step: int) -> Any:
        return record_of_rows({}, step, [{name: row[name] for name in ALONE} for row in steps[step]])

    source = TokenSource("nobody", list(steps), alone)
    yield "log-probs and mask alone", with_tokens(RunData("alone", Path("alone"), "token records"), source)


def line_of(folder: Path, arm: str, fault: Fault) -> dict[str, Any]:
    """What is named first natively and in each layout."""
    named = {"natively": named_first(read_run(folder), fault, "")}
    named |= {name: named_first(run, fault, "") for name, run in readings(steps_of(folder))}
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
        folder = folder_of(options.runs, arm, options.seed)
        if arm in done or not (folder / "planted.json").is_file():
            continue
        line = json.dumps(line_of(folder, arm, fault))
        with options.out.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
