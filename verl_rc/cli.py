"""``verl-rc <subcommand>``: the tools around a training run."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_rc.config.run import RunConfig

Options = argparse.Namespace
USER_ERROR = 2
"""Exit status for what the caller can put right; argparse uses the same."""


@dataclass(frozen=True)
class Subcommand:
    """A tool by its name, and the arguments that it takes: for each, those of ``add_argument``."""

    run: Callable[[Options], int | None]
    """Carries it out; returns the exit status, None for 0. ``main`` prints its ``ValueError`` or
    ``OSError``."""
    summary: str
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alternatives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further arguments, of which at most one may be given."""
    takes_configuration: bool = False
    """Whether all other arguments mean a configuration: a recipe, and what verl_rc.main_ppo takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` (default: the command line) name; returns the exit status."""
    parser = build_parser()
    options, overrides = parser.parse_known_args(arguments)
    if options.subcommand is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    subcommand = SUBCOMMANDS[options.subcommand]
    if overrides and not subcommand.takes_configuration:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if subcommand.takes_configuration and not overrides:
        options.parser.print_help()
        return USER_ERROR
    options.overrides = overrides
    try:
        return subcommand.run(options) or 0
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        message = _install_advice(error.name.partition(".")[0])
    except (ValueError, OSError) as error:
        if subcommand.takes_configuration:
            raise
        message = " ".join(str(error).split())
    sys.stderr.write(f"verl-rc {options.subcommand}: {message}\n")
    return USER_ERROR


def _install_advice(package: str) -> str:
    """What to install where a package is missing that the bare wheel does not bring."""
    if package == "torch":
        return "it needs torch, any version from 2.4 on, which is not installed here: pip install torch."
    return f"it needs {package}, which comes with the trainer: bash scripts/install.sh cpu (or gpu)."


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="verl-rc", description="The tools around a training run.")
    parsers = parser.add_subparsers(title="subcommands", dest="subcommand", metavar="SUBCOMMAND")
    for name, subcommand in SUBCOMMANDS.items():
        summary = subcommand.summary
        described: dict[str, Any] = {"help": summary, "description": f"{summary[0].upper()}{summary[1:]}."}
        if subcommand.takes_configuration:
            described |= {
                "usage": f"verl-rc {name} [RECIPE.sh] [GROUP=CHOICE ...] [KEY=VALUE ...] [OPTION ...]",
                "epilog": "Groups and keys as python -m verl_rc.main_ppo, whose --help lists the groups.",
                "allow_abbrev": False,
            }
        child = parsers.add_parser(name, **described)
        child.set_defaults(parser=child)
        for argument, keywords in subcommand.arguments.items():
            child.add_argument(argument, **keywords)
        alternatives = child.add_mutually_exclusive_group() if subcommand.alternatives else child
        for argument, keywords in subcommand.alternatives.items():
            alternatives.add_argument(argument, **keywords)
    return parser


def _path(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "type": Path, "help": text, **more}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("it must be at least 1")
    return number


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if int(first) > int(last):
        raise ValueError("the first step must not be after the last")
    return int(first), int(last)


def _dtypes(text: str) -> tuple[str, str]:
    trainer, comma, engine = text.partition(",")
    if not {trainer, engine or trainer} <= {"float32", "bfloat16", "float16"} or (comma and not engine):
        raise ValueError("they must be of float32, bfloat16 and float16")
    return trainer, engine or trainer


def _step_range(options: Options) -> dict[str, Any]:
    return {} if options.steps is None else {"first_step": options.steps[0], "last_step": options.steps[1]}


def _write_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _quieten_libraries() -> None:
    """To be called before transformers is imported; the user's values take precedence."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _refuse(message: str) -> SystemExit:
    sys.stderr.write(f"{message}\n")
    return SystemExit(USER_ERROR)


def _configuration(overrides: Sequence[str]) -> "RunConfig":
    """What a run would get from these arguments, or from a recipe named first that is called with the others.

    Ends the process with a line for each mistake, as a run does.
    """
    from verl_rc.config.load import load_run_config  # noqa: PLC0415  (Hydra, which no help text should wait for)
    from verl_rc.config.verl.migration import arguments_of_script, is_recipe_script  # noqa: PLC0415  (as above)

    try:
        if is_recipe_script(overrides[0]):
            overrides = arguments_of_script(overrides[0], overrides[1:])
        return load_run_config(overrides)
    except ValueError as error:
        raise _refuse(f"configuration error:\n{error}") from None


def _convert(options: Options) -> None:
    from verl_rc.insight.convert import convert  # noqa: PLC0415  (numpy)

    _write_lines(convert(options.path, options.output))


def _exact(options: Options) -> int:
    _quieten_libraries()
    from verl_rc.preflight.certificate import certify  # noqa: PLC0415  (transformers)

    certificate = certify(options.model, options.dtype, options.prompts, exact=not options.ordinary)
    _write_lines(certificate.lines())
    return 0 if certificate.is_exact else 1


def _explain(options: Options) -> None:
    config = _configuration(options.overrides)
    from verl_rc.ppo.step_time import MeasuredStep  # noqa: PLC0415  (pydantic, which no help text should wait for)
    from verl_rc.preflight.explain import plan_text  # noqa: PLC0415  (as above)

    seconds = [
        seconds for seconds in (options.sampling_seconds, options.training_seconds) if seconds is not None
    ]
    if len(seconds) == 1:
        raise _refuse("--sampling-seconds and --training-seconds must be given together.")
    try:
        measured = MeasuredStep(*seconds) if seconds else None
    except ValueError as error:
        raise _refuse(str(error)) from None
    sys.stdout.write(plan_text(config, measured))


def _diagnose(options: Options) -> None:
    if options.digests is not None:
        _quieten_libraries()
        from verl_rc.insight.replay.digests import compare_weights  # noqa: PLC0415  (torch, transformers)

        _write_lines(compare_weights(options.folder, options.digests).lines())
        return
    from verl_rc.insight.diagnosis import REPLAYS, DiagnosisRequest, diagnose  # noqa: PLC0415  (the catalogue and yaml)

    names = list(REPLAYS) if options.replay == "all" else [name for name in options.replay.split(",") if name]
    if unknown := [name for name in names if name not in REPLAYS]:
        raise ValueError(f"--replay must be of {', '.join(REPLAYS)}, got {', '.join(unknown)}")
    given = {name: getattr(options, name) for name in ("model", "temperature", "dtypes")}
    request = DiagnosisRequest(options.folder, names, options.rows, **given, **_step_range(options))
    if options.model is not None:
        _quieten_libraries()
        from verl_rc.insight.replay.foreign import diagnose_with_model  # noqa: PLC0415  (torch, transformers)

        diagnosis = diagnose_with_model(request)
    elif names:
        _quieten_libraries()
        from verl_rc.insight.replay.diagnosis import diagnose_with_replays  # noqa: PLC0415  (torch, transformers)

        diagnosis = diagnose_with_replays(request)
    else:
        diagnosis = diagnose(request)
    _write_lines([json.dumps(diagnosis.as_json(), indent=2)] if options.json else diagnosis.lines())


_GPU_FILE = Path("doctor_gpu.json")


def _doctor(options: Options) -> int:
    _quieten_libraries()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    config = _configuration(options.overrides)
    from verl_rc.preflight.finding import verdict  # noqa: PLC0415  (no help text should wait for it)

    if options.gpu or options.only:
        from verl_rc.preflight.bring_up.run import STAGES, bring_up  # noqa: PLC0415  (torch)
        from verl_rc.preflight.machine import uses_gpus  # noqa: PLC0415  (as above)

        if unknown := set(options.only) - set(STAGES):
            raise _refuse(f"--only must name one of {', '.join(STAGES)}; got {', '.join(sorted(unknown))}.")
        if not uses_gpus(config) and config.trainer.device != "cpu":
            raise _refuse(
                "--gpu needs a GPU, and torch sees none. Pass trainer.device=cpu to rehearse its stages on "
                "the CPU."
            )
        findings = bring_up(config, _GPU_FILE, {name: STAGES[name] for name in options.only or STAGES})
    else:
        from verl_rc.preflight.doctor import examine  # noqa: PLC0415  (Ray)

        findings = examine(config)
    failures = 0
    for finding in findings:
        failures += finding.status == "failed"
        _write_lines(finding.lines())
        sys.stdout.flush()
    if options.gpu or options.only:
        sys.stdout.write(f"All numbers are in {_GPU_FILE}.\n")
    sys.stdout.write(f"{verdict(failures)}\n")
    return 1 if failures else 0


def _export(options: Options) -> None:
    _quieten_libraries()
    # torch and transformers take seconds to load, for which no other subcommand and no help text should wait.
    from verl_rc.workers.export import ExportRequest, export_checkpoint  # noqa: PLC0415

    request = ExportRequest(options.checkpoint, options.output, options.part, options.dtype, options.model)
    sys.stdout.write(f"{export_checkpoint(request)}\n")


def _migrate(options: Options) -> None:
    from verl_rc.config.verl.migration import migrate  # noqa: PLC0415  (pydantic and yaml, which no help text should wait for)

    legacy_options = {"era": options.era, "k1_bound_convention": options.k1_bound_convention}
    migration = migrate(
        options.arguments, {name: value for name, value in legacy_options.items() if value is not None}
    )
    if options.recipe:
        sys.stdout.write(migration.recipe())
    else:
        _write_lines(migration.overrides)
    sys.stderr.write("".join(f"# {note}\n" for note in migration.notes))


def _plot(options: Options) -> None:
    from verl_rc.insight.picture import draw_run  # noqa: PLC0415  (pydantic and yaml, which no help text should wait for)

    sys.stdout.write(f"{draw_run(options.folder)}\n")


def _presets(options: Options) -> None:
    from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig  # noqa: PLC0415  (pydantic)

    configs = {name: RolloutCorrectionConfig.from_preset(name) for name in options.names or PRESETS}
    for name, config in configs.items():
        fields = ", ".join(f"{field}={value}" for field, value in config.effective_fields().items())
        summary = f"    {PRESETS[name].summary} ({PRESETS[name].origin})"
        _write_lines([f"{name}: {fields or 'measures only'}", summary])


def _report(options: Options) -> None:
    from verl_rc.insight.page import PageOptions, Request, write_report  # noqa: PLC0415  (the catalogue and yaml)

    page = PageOptions(not options.no_text, options.max_megabytes)
    steps = _step_range(options)
    report = write_report(
        Request(tuple(options.paths), options.output, newest_steps=options.last, options=page, **steps)
    )
    verdicts = list(zip(report.runs, report.verdicts, strict=True))
    if options.json:
        runs = [{"name": run.name, "verdict": verdict.as_json()} for run, verdict in verdicts]
        sys.stdout.write(f"{json.dumps({'report': str(report.path), 'runs': runs}, indent=2)}\n")
        return
    for run, verdict in verdicts:
        lines = verdict.lines() if run.is_own else [*verdict.lines(), f"  read as: {run.source}"]
        if len(verdicts) > 1:
            lines[0] = f"{run.name}: {lines[0]}"
        _write_lines(lines)
    sys.stdout.write(f"report: {report.path}\n")


def _trace(options: Options) -> None:
    from verl_rc.insight.timeline import write_timeline  # noqa: PLC0415  (matplotlib, which no help text should wait for)

    sys.stdout.write(write_timeline(options.folder, options.steps))


def _wandb_workspace(options: Options) -> None:
    entity, slash, project = options.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ValueError(f"the project must be given as ENTITY/PROJECT, got {options.project}")
    try:
        from verl_rc.metrics.sinks import wandb_workspace as views  # noqa: PLC0415  (an optional package)
    except ImportError as error:
        raise ValueError(
            "wandb-workspaces must be installed for it; run `pip install 'verl_rc[wandb-workspaces]'`"
        ) from error
    view = views.workspace_json(entity, project) if options.json else None
    sys.stdout.write(f"{json.dumps(view, indent=2) if view else views.save_workspace(entity, project)}\n")


def _what_if(options: Options) -> None:
    from verl_rc.insight.run_folder import read_run  # noqa: PLC0415  (the catalogue and yaml)
    from verl_rc.insight.verdict import judge  # noqa: PLC0415  (as above)
    from verl_rc.insight.what_if import (  # noqa: PLC0415  (torch)
        answer,
        clip_of,
        read_batch,
        tried_configs,
        with_turns,
    )

    configs = tried_configs(options.presets, options.fields)
    run = read_run(options.folder)
    verdict, steps = judge(run), options.steps or ()
    clip = clip_of(run.settings)
    if options.gradients:
        _quieten_libraries()
        from verl_rc.insight.replay.gradients import ParameterGradients  # noqa: PLC0415  (transformers)

        gradients = ParameterGradients(options.folder, *steps)
        batch = replace(gradients.batch, clip=clip)
        configs = configs if options.presets else with_turns(configs, batch)
        result = answer(batch, configs, verdict, updates=gradients)
        result = replace(result, notes=(*result.notes, gradients.cost))
    else:
        batch = replace(read_batch(options.folder, *steps), clip=clip)
        configs = configs if options.presets else with_turns(configs, batch)
        result = answer(batch, configs, verdict)
    if not run.is_own:
        result = replace(result, notes=(f"Read as {run.source}.", *result.notes))
    _write_lines([json.dumps(result.as_json(), indent=2)] if options.json else result.lines())


_STEPS = {"--steps": {"metavar": "A-B", "type": _steps, "help": "only steps A to B"}}
SUBCOMMANDS: Mapping[str, Subcommand] = {
    "convert": Subcommand(
        _convert,
        "write the token files of any trainer as token records, version 1 (docs/token_record.md)",
        {
            "path": _path("PATH", "folder or file that a trainer wrote"),
            "output": _path("OUT.jsonl", "file to write"),
        },
    ),
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
            "--prompts": _path("FILE", "a prompt in each line (default: random tokens)"),
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
    "diagnose": Subcommand(
        _diagnose,
        "name what makes engine and trainer of a run differ; --replay scores recorded tokens again",
        {
            "folder": _path("RUN", "folder of a run; replays need its token records"),
            "--replay": {
                "metavar": "R0,R1",
                "nargs": "?",
                "const": "all",
                "default": "",
                "help": "replays to make, such as R1,R3, or all; without names all (RUN/diagnosis.json keeps "
                "them, the report shows them)",
            },
            "--rows": {
                "metavar": "N",
                "type": _positive,
                "default": 64,
                "help": "most rows of a record (default: 64)",
            },
            **_STEPS,
            "--model": _path(
                "FOLDER",
                "for a run of another trainer: the model that it began with (with --steps A-B: that "
                "of step A), which scores the first recorded step again",
            ),
            "--temperature": {"metavar": "T", "type": float, "help": "if the files do not say it"},
            "--dtypes": {
                "metavar": "TRAINER,ENGINE",
                "type": _dtypes,
                "help": "with --model: precisions, such as float32,bfloat16, where the files do not say",
            },
            "--digests": _path(
                "WEIGHTS",
                "name the tensors of RUN, here a file of an engine's digests, a model folder or a "
                "checkpoint, that differ from those of this model folder or checkpoint",
            ),
            "--json": {"action": "store_true", "help": "print statements and measurements as JSON"},
        },
    ),
    "doctor": Subcommand(
        _doctor,
        "check whether a run can start here; with --gpu [--only STAGE], measure what its GPUs do",
        {
            "--gpu": {"action": "store_true", "help": "measure what the GPUs of a node do, stage by stage"},
            "--only": {
                "metavar": "STAGE",
                "action": "append",
                "default": [],
                "help": "run this stage alone; may be given several times",
            },
        },
        takes_configuration=True,
    ),
    "export": Subcommand(
        _export,
        "write a checkpoint as a Hugging Face folder, which transformers and vLLM load",
        {
            "checkpoint": _path("CHECKPOINT", "folder global_step_N of a run"),
            "--output": _path("DIR", "folder to write; new or empty", required=True),
            "--dtype": {
                "choices": ("bfloat16", "float32", "float16"),
                "help": "precision of the weights (default: the base model's)",
            },
            "--model": {
                "metavar": "PATH",
                "help": "where the base model is now (default: where it was when the run was started)",
            },
        },
        alternatives={
            "--critic": {
                "dest": "part",
                "action": "store_const",
                "const": "critic",
                "default": "policy",
                "help": "the value model, not the policy",
            },
            "--adapter": {
                "dest": "part",
                "action": "store_const",
                "const": "adapter",
                "default": "policy",
                "help": "the LoRA adapter alone (default: merged)",
            },
        },
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
    "plot": Subcommand(
        _plot,
        "draw accuracy, reward, ESS and gap of a run, finished or not, over its steps",
        {"folder": _path("RUN", "a run's folder, or a log of another trainer; the picture is written there")},
    ),
    "presets": Subcommand(
        _presets,
        "print presets of rollout correction as the fields they stand for",
        {"names": {"metavar": "NAME", "nargs": "*", "help": "presets to print (default: all)"}},
    ),
    "report": Subcommand(
        _report,
        "write report.html: what a run did and what is wrong with it, in words and curves; or several runs "
        "compared",
        {
            "paths": _path(
                "RUN",
                "a run's folder, or files that another trainer wrote (docs/token_record.md names them)",
                nargs="+",
            ),
            "--output": _path("FILE", "the page (default: RUN/report.html; several runs need it)"),
            "--max-megabytes": {
                "metavar": "MB",
                "type": float,
                "default": 8.0,
                "help": "size of the page (default: 8)",
            },
            "--no-text": {"action": "store_true", "help": "leave prompts and responses out of the page"},
            "--json": {"action": "store_true", "help": "print verdict and evidence as JSON"},
        },
        alternatives={
            "--last": {"metavar": "N", "type": _positive, "help": "only the last N steps"},
            **_STEPS,
        },
    ),
    "trace": Subcommand(
        _trace,
        "show who did what and when in a run with async_training.trace=True: text, picture, file for "
        "Perfetto",
        {
            "folder": _path("RUN", "folder of a run; the files are written into it"),
            "--steps": {
                "metavar": "A-B",
                "type": _steps,
                "help": "only steps A to B (default: all; drawn: the last six)",
            },
        },
    ),
    "wandb-workspace": Subcommand(
        _wandb_workspace,
        "save a view of a W&B project whose charts answer questions; needs an account and a network",
        {
            "project": {"metavar": "ENTITY/PROJECT", "help": "the user or team, and the project of the runs"},
            "--json": {"action": "store_true", "help": "print the view instead of saving it; no network"},
        },
    ),
    "what-if": Subcommand(
        _what_if,
        "say what each preset would have done with the tokens that a run recorded, and which one it needs",
        {
            "folder": _path("RUN", "folder of a run with token records"),
            "--presets": {"metavar": "A,B", "help": "presets to try (default: all of today)"},
            "--set": {
                "metavar": "KEY=VALUE",
                "dest": "fields",
                "action": "append",
                "default": [],
                "help": "a field of algorithm.rollout_correction; those given are tried together, as one "
                "correction named 'given'",
            },
            **_STEPS,
            "--gradients": {
                "action": "store_true",
                "help": "take gradients of the trainer's model, at the weights that the run kept; a backward "
                "pass a prompt and preset",
            },
            "--json": {"action": "store_true", "help": "print the table as JSON"},
        },
    ),
}


if __name__ == "__main__":
    sys.exit(main())
