"""Tools that need no run: what a configuration means, whether it can start here."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl_rc.cli.subcommand import (
    Options,
    Subcommand,
    load_configuration,
    path_argument,
    quieten_libraries,
    user_error,
    write_lines,
)
from verl_rc.printable import printable, write_error

if TYPE_CHECKING:
    from verl_rc.config.run import RunConfig


def _exact(options: Options) -> int:
    quieten_libraries()
    from verl_rc.runtime.exact.certificate import certify

    certificate = certify(options.model, options.dtype, options.prompts, exact=not options.ordinary)
    write_lines(certificate.lines())
    return 0 if certificate.is_exact else 1


def _explain(options: Options) -> None:
    config = load_configuration(options.overrides)
    from verl_rc.algorithm.supply.step_time import MeasuredStep
    from verl_rc.plan.driver import too_many_tokens
    from verl_rc.plan.explain import plan_text
    from verl_rc.runtime.workers.host import available_memory

    seconds = options.sampling_seconds, options.training_seconds
    if seconds.count(None) == 1:
        raise user_error("--sampling-seconds and --training-seconds must be given together; add the other.")
    try:
        measured = None if None in seconds else MeasuredStep(*seconds)
    except ValueError as error:
        raise user_error(str(error)) from None
    lines = _conversations(config) if config.actor_rollout_ref.rollout.converses else []
    sys.stdout.write(printable(plan_text(config, measured)))
    write_lines(lines)
    if (problem := too_many_tokens(config, available_memory())) is not None:
        raise user_error(problem)


def _conversations(config: "RunConfig") -> list[str]:
    """Sentences on what the chat template of a local model does with the run's conversations. Ends the
    process as a run does, when it cannot hold them."""
    path = config.actor_rollout_ref.model.path
    if not Path(path).expanduser().is_dir():
        return ["", "Chat template", f"  not tried: {path} is no folder here; verl-rc doctor tries it"]
    quieten_libraries()
    from verl_rc.runtime.rollout.chat_template import check_chat_template

    try:
        notes = check_chat_template(config)
    except ValueError as error:
        raise user_error(f"configuration error:\n{error}") from None
    tried = "tried: it goes on behind the policy's turns with what answers them"
    return ["", "Chat template", *(f"  {line}" for line in (tried, *notes))]


def _doctor(options: Options) -> int:
    quieten_libraries()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    config = load_configuration(options.overrides)
    from verl_rc.plan.doctor import examine
    from verl_rc.plan.finding import verdict

    failures = 0
    for finding in examine(config):
        failures += finding.status == "failed"
        write_lines(finding.lines())
        sys.stdout.flush()
    sys.stdout.write(f"{verdict(failures)}\n")
    return 1 if failures else 0


def _migrate(options: Options) -> None:
    from verl_rc.config.verl.migration import migrate

    legacy_options = {"era": options.era, "k1_bound_convention": options.k1_bound_convention}
    migration = migrate(
        options.arguments, {name: value for name, value in legacy_options.items() if value is not None}
    )
    if options.recipe:
        sys.stdout.write(migration.recipe())
    else:
        write_lines(migration.overrides)
    write_error("".join(f"# {note}\n" for note in migration.notes))


def _presets(options: Options) -> None:
    from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig

    configs = {name: RolloutCorrectionConfig.from_preset(name) for name in options.names or PRESETS}
    for name, config in configs.items():
        fields = ", ".join(f"{field}={value}" for field, value in config.effective_fields().items())
        summary = f"    {PRESETS[name].summary} ({PRESETS[name].origin})"
        write_lines([f"{name}: {fields or 'measures only'}", summary])


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "exact": Subcommand(
        _exact,
        "certify that engine and trainer compute the same bits, or name the first operation that differs",
        {
            "model": {"metavar": "MODEL", "help": "model folder or hub id"},
            "--dtype": {
                "choices": ("bfloat16", "float32"),
                "default": "bfloat16",
                "help": "precision of both sides (default: bfloat16)",
            },
            "--prompts": path_argument("FILE", "a prompt in each line (default: random tokens)"),
            "--ordinary": {
                "action": "store_true",
                "help": "without exact mode: where does the gap come from?",
            },
        },
    ),
    "explain": Subcommand(
        _explain,
        "say what a configuration will do: objective, steps, batch arithmetic, options without effect",
        {
            "--sampling-seconds": {
                "metavar": "S",
                "type": float,
                "help": "measured time of sampling a batch alone, to predict an asynchronous step with",
            },
            "--training-seconds": {
                "metavar": "S",
                "type": float,
                "help": "measured time of everything else alone",
            },
        },
        takes_configuration=True,
    ),
    "doctor": Subcommand(
        _doctor,
        "check whether a run can start here",
        takes_configuration=True,
    ),
    "migrate": Subcommand(
        _migrate,
        "translate a verl recipe's overrides or run files, of any release, into overrides of verl_rc",
        {
            "arguments": {
                "metavar": "FILE_OR_OVERRIDE",
                "nargs": "+",
                "help": "a shell script, a YAML file, or key=value",
            },
            "--recipe": {
                "action": "store_true",
                "help": "write a shell script that starts the run, not bare overrides",
            },
            "--era": {
                "choices": ("A", "B1", "B2", "B3", "C", "D"),
                "help": "the release's era, where its keys do not tell",
            },
            "--k1_bound_convention": {
                "choices": ("documented", "inverse"),
                "help": "bounds of k1 rules mean train/rollout (documented, the default) or rollout/train, "
                "as verl executed them",
            },
        },
    ),
    "presets": Subcommand(
        _presets,
        "print presets of rollout correction as the fields they stand for",
        {"names": {"metavar": "NAME", "nargs": "*", "help": "presets to print (default: all)"}},
    ),
}
