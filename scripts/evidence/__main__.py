"""Run a study, or what it lacks: python -m scripts.evidence NAME [WORD …] [--quick]

Results are lines of docs/evidence/NAME.jsonl; docs/evidence.md and its figures are made from these alone. A
study that was interrupted goes on: what was running is run again.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence import against_verl, bill, early_warning
from evidence.studies import STUDIES
from evidence.study import Study, quick
from evidence.tables import FALL, draw, headline, minutes_of, section

from verl_rc.config.folder_owner import FolderTakenError
from verl_rc.study.machine import cores_of
from verl_rc.study.runs import (
    ROOT,
    MixedResultsError,
    NotStartedError,
    Run,
    known_runs,
    missing,
    run_and_tell,
)

PAGE, RESULTS = ROOT / "docs" / "evidence.md", ROOT / "docs" / "evidence"
BILLS, COMPARED = RESULTS / "bill.jsonl", RESULTS / "against_verl.jsonl"
HEAD = """# Evidence

What happens when rollout and trainer disagree, and what each correction does about it: runs of this
trainer on two CPU cores, or with `--cores 0,1` on one core each. Every number below is made from
the runs in [evidence/](evidence) by `python -m scripts.evidence page`. All runs of a study on one
machine start from one model; another machine makes its own with the same commands and seed. Arms
are compared at the same seeds. *Over the run* is the mean accuracy over its steps; one validation
of 256 prompts moves by more than that. A run has collapsed when it ends in an error or {fall:.2f}
below its own best accuracy; the step is that from which on it stayed so far below. To run all
studies again takes some {hours:.0f} hours on two cores."""


def write_page() -> None:
    """Write docs/evidence.md and its figures from the results on disk."""
    short, blocks, hours = list[str](), list[str](), 0.0
    whole = dict[str, list[Run]]()
    for name, study in STUDIES.items():
        runs = known_runs(RESULTS / f"{name}.jsonl", study)
        if runs:
            draw(name, study, runs, RESULTS)
        short += headline(study, runs) if name == "staleness" else []
        blocks += section(name, study, runs)
        if study.every == 1:
            whole[name] = [*runs.values()]
        hours += minutes_of(study, runs)[1] / 60
    blocks = [HEAD.format(fall=FALL, hours=hours), *short, *blocks]
    blocks += early_warning.section(whole)
    if bills := bill.read_bills(BILLS):
        blocks += bill.section(bills, known_runs(RESULTS / f"{bill.STUDY}.jsonl", STUDIES[bill.STUDY]))
    if lines := against_verl.read_lines(COMPARED):
        blocks += against_verl.section(lines)
    PAGE.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def run_missing(study: Study, results: Path, options: argparse.Namespace) -> None:
    """Run what is missing of a study on this machine, as the command line asks; what is found goes to
    ``results``."""
    known = known_runs(results, study)
    todo = quick(study, known) if options.quick else missing(study, known, options.words)
    run_and_tell(study, todo, options.folder, results, options.cores)


def main() -> int:
    """Run what is missing of a study and write the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.evidence", description=__doc__)
    names = [*STUDIES, "bill", "against_verl", "page"]
    parser.add_argument("name", choices=names, help="a study; 'page' writes docs/evidence.md alone")
    parser.add_argument("words", nargs="*", help="words that an arm's name must have, such as: k8 disabled")
    parser.add_argument(
        "--cores",
        type=cores_of,
        default="",
        metavar="0,1",
        help="a run on each at a time; without: one on all",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed of the arms that show the sign of the effect"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "evidence", help="where models, data and runs are kept"
    )
    parser.add_argument("--verl", type=Path, help="of against_verl: the folder that verl was installed in")
    options = parser.parse_args()
    try:
        if options.name == "bill":
            known = known_runs(RESULTS / f"{bill.STUDY}.jsonl", STUDIES[bill.STUDY])
            found_bills = list(bill.bills_of(options.folder / bill.STUDY, known))
            print(
                f"{len(found_bills)} of {len(known)} runs have records below {options.folder / bill.STUDY}",
                flush=True,
            )
            bill.write_bills(BILLS, found_bills)
        elif options.name == "against_verl":
            if options.verl is None:
                parser.error("--verl must be the folder that verl was installed in, see docs/evidence.md")
            run_missing(against_verl.RUNS, options.folder / "against_verl.jsonl", options)
            batches = list(against_verl.batches_of(options.folder / "against_verl"))
            if lacking := against_verl.RUNS.arms.keys() - {batch.samples for batch in batches}:
                parser.error(
                    f"every run must have recorded a batch; there is none of {', '.join(sorted(lacking))}"
                )
            lines = list(against_verl.compare(batches, against_verl.ask_verl(options.verl)))
            against_verl.write_lines(COMPARED, lines)
        elif options.name != "page":
            run_missing(STUDIES[options.name], RESULTS / f"{options.name}.jsonl", options)
        write_page()
    except (FolderTakenError, MixedResultsError, NotStartedError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
