"""``verl-rc <subcommand>``: the tools around a training run."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_rc.config.run import RunConfig
    from verl_rc.insight.diagnosis import Diagnosis, DiagnosisRequest
    from verl_rc.preflight.finding import Finding

    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

Run = Callable[[argparse.Namespace], int | None]
"""Carries out a subcommand; returns its exit status, None for 0."""
USER_ERROR = 2
"""Exit status for what the caller can put right; argparse uses the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` (default: the command line) name; returns the exit status."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if options.subcommand is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    try:
        return options.run(options) or 0
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        message = _install_advice(error.name.partition(".")[0])
    except options.mistakes as error:
        message = " ".join(str(error).split())
    sys.stderr.write(f"verl-rc {options.subcommand}: {message}\n")
    return USER_ERROR


def _install_advice(package: str) -> str:
    """What to install where a package is missing that the bare wheel does not bring."""
    if package == "torch":
        return "it needs torch, any version from 2.4 on, which is not installed here: pip install torch."
    return f"it needs {package}, which comes with the trainer: bash scripts/install.sh cpu (or gpu)."


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-rc", description="The tools around a training run.")
    subcommands = parser.add_subparsers(title="subcommands", dest="subcommand", metavar="SUBCOMMAND")
    for add in (
        _add_convert,
        _add_explain,
        _add_diagnose,
        _add_doctor,
        _add_export,
        _add_migrate,
        _add_plot,
        _add_presets,
        _add_report,
        _add_trace,
        _add_wandb_workspace,
        _add_what_if,
    ):
        add(subcommands)
    return parser


def _add_explain(subcommands: "Subcommands") -> None:
    _add_with_configuration(
        subcommands,
        "explain",
        _explain,
        "say what a configuration will do: objective, steps, batch arithmetic, options without effect",
    )


def _add_doctor(subcommands: "Subcommands") -> None:
    _add_with_configuration(
        subcommands,
        "doctor",
        _doctor,
        "check whether a run can start here; with --gpu [--only STAGE], measure what its GPUs do",
    )


def _subcommand(subcommands: "Subcommands", name: str, run: Run, summary: str) -> argparse.ArgumentParser:
    """A subcommand that ``run`` carries out; ``main`` prints its ``ValueError`` or ``OSError``."""
    parser = subcommands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(run=run, mistakes=(ValueError, OSError))
    return parser


def _add_convert(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "convert",
        _convert,
        "write the token files of any trainer as token records, version 1 (docs/token_record.md)",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="folder or file that a trainer wrote")
    parser.add_argument("output", metavar="OUT.jsonl", type=Path, help="file to write")


def _add_diagnose(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "diagnose",
        _diagnose,
        "name what makes engine and trainer of a run differ; --replay scores recorded tokens again",
    )
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="folder of a run; replays need its token records"
    )
    replay_help = (
        "replays to make, such as R1,R3, or all; without names all (RUN/diagnosis.json keeps them, the "
        "report shows them)"
    )
    parser.add_argument("--replay", metavar="R0,R1", nargs="?", const="all", default="", help=replay_help)
    parser.add_argument(
        "--rows", metavar="N", type=_positive, default=64, help="most rows of a record (default: 64)"
    )
    parser.add_argument("--steps", metavar="A-B", type=_steps, default=None, help="only steps A to B")
    parser.add_argument("--json", action="store_true", help="print statements and measurements as JSON")


def _add_with_configuration(subcommands: "Subcommands", name: str, run: Run, summary: str) -> None:
    """A subcommand that takes a recipe, and what verl_rc.main_ppo takes: choices of groups, keys, and where
    its files are."""
    # With no character that starts an option, argparse leaves all arguments to the loader.
    parser = subcommands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", metavar="[RECIPE.sh] GROUP=CHOICE KEY=VALUE", nargs="*")
    parser.set_defaults(run=run, mistakes=())


def _add_export(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "export",
        _export,
        "write a checkpoint as a Hugging Face folder, which transformers and vLLM load",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder global_step_N of a run")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, required=True, help="folder to write; new or empty"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        help="precision of the weights (default: the base model's)",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="where the base model is now (default: where it was when the run was started)",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--critic", dest="part", action="store_const", const="critic", help="the value model, not the policy"
    )
    part.add_argument(
        "--adapter",
        dest="part",
        action="store_const",
        const="adapter",
        help="the LoRA adapter alone (default: merged)",
    )
    parser.set_defaults(part="policy")


def _add_migrate(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "migrate",
        _migrate,
        "translate a verl recipe's overrides or run files, of any release, into overrides of verl_rc",
    )
    parser.add_argument(
        "arguments", metavar="FILE_OR_OVERRIDE", nargs="+", help="a shell script, a YAML file, or key=value"
    )
    parser.add_argument(
        "--recipe", action="store_true", help="write a shell script that starts the run, not bare overrides"
    )
    parser.add_argument(
        "--era",
        choices=("A", "B1", "B2", "B3", "C", "D"),
        help="the release's era, where its keys do not tell",
    )
    parser.add_argument(
        "--k1_bound_convention",
        choices=("documented", "inverse"),
        help="bounds of k1 rules mean train/rollout (documented, the default) or rollout/train, as verl "
        "executed them",
    )


def _add_plot(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "plot",
        _plot,
        "draw accuracy, reward, ESS and gap of a run, finished or not, over its steps",
    )
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="folder of a run; the picture is written into it"
    )


def _add_presets(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands, "presets", _presets, "print presets of rollout correction as the fields they stand for"
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="presets to print (default: all)")


def _add_report(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "report",
        _report,
        "write report.html: what a run did and what is wrong with it, in words and curves; or several "
        "runs compared",
    )
    path_help = "a run's folder, or files that another trainer wrote (docs/token_record.md names them)"
    parser.add_argument("paths", metavar="RUN", type=Path, nargs="+", help=path_help)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: RUN/report.html; several runs need it)",
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--last", metavar="N", type=_positive, help="only the last N steps")
    steps.add_argument("--steps", metavar="A-B", type=_steps, default=None, help="only steps A to B")
    parser.add_argument(
        "--max-megabytes", metavar="MB", type=float, default=8.0, help="size of the page (default: 8)"
    )
    parser.add_argument("--no-text", action="store_true", help="leave prompts and responses out of the page")
    parser.add_argument("--json", action="store_true", help="print verdict and evidence as JSON")


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


def _add_trace(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "trace",
        _trace,
        "show who did what and when in a run with async_training.trace=True: text, picture, file for "
        "Perfetto",
    )
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="folder of a run; the files are written into it"
    )
    parser.add_argument(
        "--steps", metavar="A-B", type=_steps, help="only steps A to B (default: all; drawn: the last six)"
    )


def _add_what_if(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "what-if",
        _what_if,
        ("say what each preset would have done with the tokens that a run recorded, and which one it needs"),
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run with token records")
    parser.add_argument("--presets", metavar="A,B", help="presets to try (default: all of today)")
    set_help = (
        "a field of algorithm.rollout_correction; those given are tried together, as one correction named "
        "'given'"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", dest="fields", action="append", default=[], help=set_help
    )
    parser.add_argument(
        "--steps", metavar="A-B", type=_steps, default=None, help="only records of steps A to B"
    )
    gradients_help = (
        "take gradients of the trainer's model, at the weights that the run kept; a backward pass a prompt "
        "and preset"
    )
    parser.add_argument("--gradients", action="store_true", help=gradients_help)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def _add_wandb_workspace(subcommands: "Subcommands") -> None:
    parser = _subcommand(
        subcommands,
        "wandb-workspace",
        _wandb_workspace,
        "save a view of a W&B project whose charts answer questions; needs an account and a network",
    )
    parser.add_argument(
        "project", metavar="ENTITY/PROJECT", help="the user or team, and the project of the runs"
    )
    parser.add_argument("--json", action="store_true", help="print the view instead of saving it; no network")


def _wandb_workspace(options: argparse.Namespace) -> None:
    entity, slash, project = options.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ValueError(f"the project must be given as ENTITY/PROJECT, got {options.project}")
    try:
        from verl_rc.metrics.sinks import wandb_workspace as views  # noqa: PLC0415  (an optional package)
    except ImportError as error:
        raise ValueError(
            "wandb-workspaces must be installed for it; run `pip install 'verl_rc[wandb-workspaces]'`"
        ) from error
    if options.json:
        sys.stdout.write(f"{json.dumps(views.workspace_json(entity, project), indent=2)}\n")
    else:
        sys.stdout.write(f"{views.save_workspace(entity, project)}\n")


def _explain(options: argparse.Namespace) -> int:
    if _asks_for_help(options.arguments):
        return _show_usage("explain", options.arguments)
    from verl_rc.config.load import load_run_config  # noqa: PLC0415  (Hydra, which no help text should wait for)
    from verl_rc.ppo.step_time import MeasuredStep  # noqa: PLC0415  (as above)
    from verl_rc.preflight.explain import plan_text  # noqa: PLC0415  (as above)

    seconds, arguments = _measured_seconds(options.arguments)
    try:
        measured = MeasuredStep(*seconds) if seconds is not None else None
        config = load_run_config(_with_recipe(arguments))
    except ValueError as error:
        return _refuse_configuration(error)
    sys.stdout.write(plan_text(config, measured))
    return 0


_MEASURED = ("--sampling-seconds", "--training-seconds")


def _measured_seconds(arguments: Sequence[str]) -> tuple[tuple[float, float] | None, list[str]]:
    """The seconds of sampling and training that ``explain`` was given, and the other arguments. Exits when
    one is missing."""
    texts = dict(argument.split("=", 1) for argument in arguments if argument.partition("=")[0] in _MEASURED)
    rest = [argument for argument in arguments if argument.partition("=")[0] not in _MEASURED]
    if not texts:
        return None, rest
    try:
        sampling, training = (float(texts[name]) for name in _MEASURED)
    except (KeyError, ValueError):
        sys.stderr.write(
            f"{' and '.join(f'{name}=<seconds>' for name in _MEASURED)} must be given together, as numbers.\n"
        )
        raise SystemExit(USER_ERROR) from None
    return (sampling, training), rest


def _quieten_libraries() -> None:
    """To be called before transformers is imported; the user's values take precedence."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _doctor(options: argparse.Namespace) -> int:
    if _asks_for_help(options.arguments):
        return _show_usage("doctor", options.arguments)
    _quieten_libraries()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    from verl_rc.config.load import load_run_config  # noqa: PLC0415  (Hydra, which no help text should wait for)
    from verl_rc.preflight.finding import verdict  # noqa: PLC0415  (as above)

    measures_gpus, only, arguments = _gpu_options(options.arguments)
    try:
        config = load_run_config(_with_recipe(arguments))
    except ValueError as error:
        return _refuse_configuration(error)
    failures = 0
    for finding in _gpu_findings(config, only) if measures_gpus else _host_findings(config):
        failures += finding.status == "failed"
        _write_lines(finding.lines())
        sys.stdout.flush()
    sys.stdout.write(f"{verdict(failures)}\n")
    return 1 if failures else 0


def _host_findings(config: "RunConfig") -> "Iterator[Finding]":
    from verl_rc.preflight.doctor import examine  # noqa: PLC0415  (Ray)

    return examine(config)


_GPU = "--gpu"
_ONLY = "--only"
_GPU_FILE = Path("doctor_gpu.json")


def _gpu_options(arguments: Sequence[str]) -> tuple[bool, list[str], list[str]]:
    """Whether ``doctor`` shall measure GPUs, the stages that were named, and the other arguments."""
    only = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{_ONLY}=")]
    rest = [argument for argument in arguments if argument != _GPU and not argument.startswith(f"{_ONLY}=")]
    return _GPU in arguments or bool(only), only, rest


def _gpu_findings(config: "RunConfig", only: Sequence[str]) -> "Iterator[Finding]":
    """Run the stages; exits when one is not known, or there is no GPU and no word that the CPU shall do."""
    from verl_rc.preflight.bring_up.run import STAGES, bring_up  # noqa: PLC0415  (torch)
    from verl_rc.preflight.machine import uses_gpus  # noqa: PLC0415  (as above)

    problem = ""
    if unknown := set(only) - set(STAGES):
        problem = f"{_ONLY} must name one of {', '.join(STAGES)}; got {', '.join(sorted(unknown))}."
    elif not uses_gpus(config) and config.trainer.device != "cpu":
        problem = (
            f"{_GPU} needs a GPU, and torch sees none. Pass trainer.device=cpu to rehearse its stages on the "
            "CPU."
        )
    if problem:
        sys.stderr.write(f"{problem}\n")
        raise SystemExit(USER_ERROR)
    yield from bring_up(config, _GPU_FILE, {name: STAGES[name] for name in only or STAGES})
    sys.stdout.write(f"All numbers are in {_GPU_FILE}.\n")


def _write_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _convert(options: argparse.Namespace) -> None:
    from verl_rc.insight.convert import convert  # noqa: PLC0415  (numpy)

    _write_lines(convert(options.path, options.output))


def _diagnose(options: argparse.Namespace) -> None:
    from verl_rc.insight.diagnosis import REPLAYS, DiagnosisRequest, diagnose  # noqa: PLC0415  (the catalogue and yaml)

    names = list(REPLAYS) if options.replay == "all" else [name for name in options.replay.split(",") if name]
    if unknown := [name for name in names if name not in REPLAYS]:
        raise ValueError(f"--replay must be of {', '.join(REPLAYS)}, got {', '.join(unknown)}")
    request = DiagnosisRequest(options.folder, names, options.rows, **_step_range(options))
    diagnosis = _with_replays(request) if names else diagnose(request)
    _write_lines([json.dumps(diagnosis.as_json(), indent=2)] if options.json else diagnosis.lines())


def _step_range(options: argparse.Namespace) -> dict[str, int]:
    return {} if options.steps is None else {"first_step": options.steps[0], "last_step": options.steps[1]}


def _with_replays(request: "DiagnosisRequest") -> "Diagnosis":
    _quieten_libraries()
    from verl_rc.insight.replay import diagnose_with_replays  # noqa: PLC0415  (torch, transformers)

    return diagnose_with_replays(request)


def _with_recipe(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments that a recipe named first would start a run with, called with the others."""
    from verl_rc.config.verl.migration import arguments_of_script, is_recipe_script  # noqa: PLC0415  (beside the loader)

    return arguments_of_script(arguments[0], arguments[1:]) if is_recipe_script(arguments[0]) else arguments


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return not arguments or bool({"-h", "--help"} & set(arguments))


def _show_usage(subcommand: str, arguments: Sequence[str]) -> int:
    own_options = (
        "".join(f" [{name}=S]" for name in _MEASURED)
        if subcommand == "explain"
        else f" [{_GPU}] [{_ONLY}=STAGE]"
    )
    sys.stdout.write(
        f"usage: verl-rc {subcommand} [RECIPE.sh] [GROUP=CHOICE ...] [KEY=VALUE ...]{own_options}\n"
        "as python -m verl_rc.main_ppo, whose --help lists the groups\n"
    )
    return 0 if arguments else USER_ERROR


def _migrate(options: argparse.Namespace) -> None:
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


def _presets(options: argparse.Namespace) -> None:
    from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig  # noqa: PLC0415  (pydantic)

    configs = {name: RolloutCorrectionConfig.from_preset(name) for name in options.names or PRESETS}
    for name, config in configs.items():
        fields = ", ".join(f"{field}={value}" for field, value in config.effective_fields().items())
        summary = f"    {PRESETS[name].summary} ({PRESETS[name].origin})"
        _write_lines([f"{name}: {fields or 'measures only'}", summary])


def _plot(options: argparse.Namespace) -> None:
    from verl_rc.insight.picture import draw_run  # noqa: PLC0415  (pydantic and yaml, which no help text should wait for)

    sys.stdout.write(f"{draw_run(options.folder)}\n")


def _report(options: argparse.Namespace) -> None:
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


def _trace(options: argparse.Namespace) -> None:
    from verl_rc.insight.timeline import write_timeline  # noqa: PLC0415  (matplotlib, which no help text should wait for)

    sys.stdout.write(write_timeline(options.folder, options.steps))


def _what_if(options: argparse.Namespace) -> None:
    from verl_rc.insight.run_folder import read_run  # noqa: PLC0415  (the catalogue and yaml)
    from verl_rc.insight.verdict import judge  # noqa: PLC0415  (as above)
    from verl_rc.insight.what_if import answer, clip_of, read_batch, tried_configs  # noqa: PLC0415  (torch)

    configs = tried_configs(options.presets, options.fields)
    run = read_run(options.folder)
    verdict = judge(run)
    clip = clip_of(run.settings)
    if options.gradients:
        _quieten_libraries()
        from verl_rc.insight.replay import ParameterGradients  # noqa: PLC0415  (transformers)

        gradients = ParameterGradients(options.folder, *(options.steps or ()))
        result = answer(replace(gradients.batch, clip=clip), configs, verdict, updates=gradients)
        result = replace(result, notes=(*result.notes, gradients.cost))
    else:
        batch = read_batch(options.folder, *(options.steps or ()))
        result = answer(replace(batch, clip=clip), configs, verdict)
    if not run.is_own:
        result = replace(result, notes=(f"Read as {run.source}.", *result.notes))
    _write_lines([json.dumps(result.as_json(), indent=2)] if options.json else result.lines())


def _export(options: argparse.Namespace) -> None:
    _quieten_libraries()
    # torch and transformers take seconds to load, for which no other subcommand and no help text should wait.
    from verl_rc.workers.export import ExportRequest, export_checkpoint  # noqa: PLC0415

    request = ExportRequest(options.checkpoint, options.output, options.part, options.dtype, options.model)
    sys.stdout.write(f"{export_checkpoint(request)}\n")


def _refuse_configuration(error: Exception) -> int:
    """Write one line for each mistake, as a run does."""
    sys.stderr.write(f"configuration error:\n{error}\n")
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
