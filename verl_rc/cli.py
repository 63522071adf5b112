"""``verl-rc <subcommand>``: the tools around a training run."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_rc.config.rollout_correction import RolloutCorrectionConfig
    from verl_rc.config.run import RunConfig
    from verl_rc.insight.diagnosis import Diagnosis, DiagnosisRequest
    from verl_rc.insight.verdict import Verdict
    from verl_rc.insight.what_if import Answer
    from verl_rc.preflight.finding import Finding

USER_ERROR = 2
"""Exit status for what the caller can put right; argparse uses the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` (default: the command line) name; returns the exit status."""
    parser = _build_parser()
    given = parser.parse_args(arguments)
    if given.subcommand is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    try:
        status: int = given.run(given)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        return _refuse(given.subcommand, ValueError(_needed(error.name.partition(".")[0])))
    return status


def _needed(package: str) -> str:
    """What to install where a package is missing that the bare wheel does not bring."""
    if package == "torch":
        return "it needs torch, any version from 2.4 on, which is not installed here: pip install torch."
    return f"it needs {package}, which comes with the trainer: bash scripts/install.sh cpu (or gpu)."


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-rc", description="The tools around a training run.")
    subcommands = parser.add_subparsers(title="subcommands", dest="subcommand", metavar="SUBCOMMAND")
    _add_convert(subcommands)
    _add_explain(subcommands)
    _add_diagnose(subcommands)
    _add_doctor(subcommands)
    _add_export(subcommands)
    _add_migrate(subcommands)
    _add_plot(subcommands)
    _add_presets(subcommands)
    _add_report(subcommands)
    _add_trace(subcommands)
    _add_wandb_workspace(subcommands)
    _add_what_if(subcommands)
    return parser


def _add_explain(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "say what a configuration will do: objective, steps, batch arithmetic, options without effect"
    _add_with_configuration(subcommands, "explain", summary).set_defaults(run=_explain)


def _add_doctor(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "check whether a run can start here; with --gpu [--only STAGE], measure what its GPUs do"
    _add_with_configuration(subcommands, "doctor", summary).set_defaults(run=_doctor)


def _subcommand(
    subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, summary: str
) -> argparse.ArgumentParser:
    return subcommands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def _add_convert(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "write the token files of any trainer as token records, version 1 (docs/token_record.md)"
    parser = _subcommand(subcommands, "convert", summary)
    parser.add_argument("path", metavar="PATH", type=Path, help="folder or file that a trainer wrote")
    parser.add_argument("output", metavar="OUT.jsonl", type=Path, help="file to write")
    parser.set_defaults(run=_convert)


def _add_diagnose(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "name what makes engine and trainer of a run differ; --replay scores recorded tokens again"
    parser = _subcommand(subcommands, "diagnose", summary)
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="folder of a run; replays need its token records"
    )
    given = (
        "replays to make, such as R1,R3, or all; without names all (RUN/diagnosis.json keeps them, the "
        "report shows them)"
    )
    parser.add_argument("--replay", metavar="R0,R1", nargs="?", const="all", default="", help=given)
    parser.add_argument(
        "--rows", metavar="N", type=_positive, default=64, help="most rows of a record (default: 64)"
    )
    parser.add_argument("--steps", metavar="A-B", type=_steps, default=None, help="only steps A to B")
    parser.add_argument("--json", action="store_true", help="print statements and measurements as JSON")
    parser.set_defaults(run=_diagnose)


def _add_with_configuration(
    subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, summary: str
) -> argparse.ArgumentParser:
    """A subcommand that takes a recipe, and what verl_rc.main_ppo takes: choices of groups, keys, and where
    its files are."""
    # With no character that starts an option, argparse leaves all arguments to the loader.
    parser = subcommands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", metavar="[RECIPE.sh] GROUP=CHOICE KEY=VALUE", nargs="*")
    return parser


def _add_export(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "write a checkpoint as a Hugging Face folder, which transformers and vLLM load"
    parser = _subcommand(subcommands, "export", summary)
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
    parser.set_defaults(run=_export, part="policy")


def _add_migrate(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "translate a verl recipe's overrides or run files, of any release, into overrides of verl_rc"
    parser = _subcommand(subcommands, "migrate", summary)
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
    parser.set_defaults(run=_migrate)


def _add_plot(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "draw accuracy, reward, ESS and gap of a run, finished or not, over its steps"
    parser = _subcommand(subcommands, "plot", summary)
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="folder of a run; the picture is written into it"
    )
    parser.set_defaults(run=_plot)


def _add_presets(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "print presets of rollout correction as the fields they stand for"
    parser = _subcommand(subcommands, "presets", summary)
    parser.add_argument("names", metavar="NAME", nargs="*", help="presets to print (default: all)")
    parser.set_defaults(run=_presets)


def _add_report(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = (
        "write report.html: what a run did and what is wrong with it, in words and curves; or several runs "
        "compared"
    )
    parser = _subcommand(subcommands, "report", summary)
    where = "a run's folder, or files that another trainer wrote (docs/token_record.md names them)"
    parser.add_argument("paths", metavar="RUN", type=Path, nargs="+", help=where)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: RUN/report.html; several runs need it)",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--last", metavar="N", type=_positive, help="only the last N steps")
    shown.add_argument("--steps", metavar="A-B", type=_steps, default=None, help="only steps A to B")
    parser.add_argument(
        "--max-megabytes", metavar="MB", type=float, default=8.0, help="size of the page (default: 8)"
    )
    parser.add_argument("--no-text", action="store_true", help="leave prompts and responses out of the page")
    parser.add_argument("--json", action="store_true", help="print verdict and evidence as JSON")
    parser.set_defaults(run=_report)


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


def _add_trace(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = (
        "show who did what and when in a run with async_training.trace=True: text, picture, file for Perfetto"
    )
    parser = _subcommand(subcommands, "trace", summary)
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="folder of a run; the files are written into it"
    )
    parser.add_argument(
        "--steps", metavar="A-B", type=_steps, help="only steps A to B (default: all; drawn: the last six)"
    )
    parser.set_defaults(run=_trace)


def _add_what_if(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = (
        "say what each preset would have done with the tokens that a run recorded, and which one it needs"
    )
    parser = _subcommand(subcommands, "what-if", summary)
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run with token records")
    parser.add_argument("--presets", metavar="A,B", help="presets to try (default: all of today)")
    given = (
        "a field of algorithm.rollout_correction; those given are tried together, as one correction named "
        "'given'"
    )
    parser.add_argument("--set", metavar="KEY=VALUE", dest="fields", action="append", default=[], help=given)
    parser.add_argument(
        "--steps", metavar="A-B", type=_steps, default=None, help="only records of steps A to B"
    )
    gradients = (
        "take gradients of the trainer's model, at the weights that the run kept; a backward pass a prompt "
        "and preset"
    )
    parser.add_argument("--gradients", action="store_true", help=gradients)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=_what_if)


def _add_wandb_workspace(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "save a view of a W&B project whose charts answer questions; needs an account and a network"
    parser = _subcommand(subcommands, "wandb-workspace", summary)
    parser.add_argument(
        "project", metavar="ENTITY/PROJECT", help="the user or team, and the project of the runs"
    )
    parser.add_argument("--json", action="store_true", help="print the view instead of saving it; no network")
    parser.set_defaults(run=_wandb_workspace)


def _wandb_workspace(given: argparse.Namespace) -> int:
    entity, slash, project = given.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        return _refuse(
            "wandb-workspace", ValueError(f"the project must be given as ENTITY/PROJECT, got {given.project}")
        )
    try:
        from verl_rc.metrics.sinks import wandb_workspace as views  # noqa: PLC0415  (an optional package)
    except ImportError:
        needed = "wandb-workspaces must be installed for it; run `pip install 'verl_rc[wandb-workspaces]'`"
        return _refuse("wandb-workspace", ValueError(needed))
    try:
        if given.json:
            said = json.dumps(views.workspace_json(entity, project), indent=2)
        else:
            said = views.save_workspace(entity, project)
    except views.WorkspaceError as error:
        return _refuse("wandb-workspace", error)
    sys.stdout.write(f"{said}\n")
    return 0


def _explain(given: argparse.Namespace) -> int:
    if _asks_for_help(given.arguments):
        return _show_usage("explain", given.arguments)
    from verl_rc.config.load import load_run_config  # noqa: PLC0415  (Hydra, which no help text should wait for)
    from verl_rc.ppo.step_time import MeasuredStep  # noqa: PLC0415  (as above)
    from verl_rc.preflight.explain import plan_text  # noqa: PLC0415  (as above)

    seconds, arguments = _measured_seconds(given.arguments)
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
    given = dict(argument.split("=", 1) for argument in arguments if argument.partition("=")[0] in _MEASURED)
    others = [argument for argument in arguments if argument.partition("=")[0] not in _MEASURED]
    if not given:
        return None, others
    try:
        sampling, training = (float(given[name]) for name in _MEASURED)
    except (KeyError, ValueError):
        sys.stderr.write(
            f"{' and '.join(f'{name}=<seconds>' for name in _MEASURED)} must be given together, as numbers.\n"
        )
        raise SystemExit(USER_ERROR) from None
    return (sampling, training), others


def _quieten_libraries() -> None:
    """To be called before transformers is imported; the user's values take precedence."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _doctor(given: argparse.Namespace) -> int:
    if _asks_for_help(given.arguments):
        return _show_usage("doctor", given.arguments)
    _quieten_libraries()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    from verl_rc.config.load import load_run_config  # noqa: PLC0415  (Hydra, which no help text should wait for)
    from verl_rc.preflight.finding import verdict  # noqa: PLC0415  (as above)

    measures_gpus, only, arguments = _gpu_options(given.arguments)
    try:
        config = load_run_config(_with_recipe(arguments))
    except ValueError as error:
        return _refuse_configuration(error)
    failures = 0
    for finding in _measured_gpus(config, only) if measures_gpus else _examined(config):
        failures += finding.status == "failed"
        sys.stdout.write("".join(f"{line}\n" for line in finding.lines()))
        sys.stdout.flush()
    sys.stdout.write(f"{verdict(failures)}\n")
    return 1 if failures else 0


def _examined(config: "RunConfig") -> "Iterator[Finding]":
    from verl_rc.preflight.doctor import examine  # noqa: PLC0415  (Ray)

    return examine(config)


_GPU, _ONLY, _GPU_FILE = "--gpu", "--only", Path("doctor_gpu.json")


def _gpu_options(arguments: Sequence[str]) -> tuple[bool, list[str], list[str]]:
    """Whether ``doctor`` shall measure GPUs, the stages that were named, and the other arguments."""
    only = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{_ONLY}=")]
    others = [argument for argument in arguments if argument != _GPU and not argument.startswith(f"{_ONLY}=")]
    return _GPU in arguments or bool(only), only, others


def _measured_gpus(config: "RunConfig", only: Sequence[str]) -> "Iterator[Finding]":
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


def _convert(given: argparse.Namespace) -> int:
    from verl_rc.insight.convert import convert  # noqa: PLC0415  (numpy)

    try:
        lines = convert(given.path, given.output)
    except (ValueError, OSError) as error:
        return _refuse("convert", error)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _diagnose(given: argparse.Namespace) -> int:
    from verl_rc.insight.diagnosis import REPLAYS, DiagnosisRequest, diagnose  # noqa: PLC0415  (the catalogue and yaml)

    names = list(REPLAYS) if given.replay == "all" else [name for name in given.replay.split(",") if name]
    unknown = [name for name in names if name not in REPLAYS]
    if unknown:
        return _refuse(
            "diagnose", ValueError(f"--replay must be of {', '.join(REPLAYS)}, got {', '.join(unknown)}")
        )
    steps = {} if given.steps is None else {"first_step": given.steps[0], "last_step": given.steps[1]}
    try:
        request = DiagnosisRequest(given.folder, names, given.rows, **steps)
        found = _with_replays(request) if names else diagnose(request)
    except (ValueError, OSError) as error:
        return _refuse("diagnose", error)
    lines = [json.dumps(found.as_json(), indent=2)] if given.json else found.lines()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


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
    measured = (
        "".join(f" [{name}=S]" for name in _MEASURED)
        if subcommand == "explain"
        else f" [{_GPU}] [{_ONLY}=STAGE]"
    )
    sys.stdout.write(
        f"usage: verl-rc {subcommand} [RECIPE.sh] [GROUP=CHOICE ...] [KEY=VALUE ...]{measured}\n"
        "as python -m verl_rc.main_ppo, whose --help lists the groups\n"
    )
    return 0 if arguments else USER_ERROR


def _migrate(given: argparse.Namespace) -> int:
    from verl_rc.config.verl.migration import migrate  # noqa: PLC0415  (pydantic and yaml, which no help text should wait for)

    named = {"era": given.era, "k1_bound_convention": given.k1_bound_convention}
    try:
        migration = migrate(
            given.arguments, {name: value for name, value in named.items() if value is not None}
        )
    except ValueError as error:
        return _refuse("migrate", error)
    written = (
        migration.recipe() if given.recipe else "".join(f"{override}\n" for override in migration.overrides)
    )
    sys.stdout.write(written)
    sys.stderr.write("".join(f"# {note}\n" for note in migration.notes))
    return 0


def _presets(given: argparse.Namespace) -> int:
    from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig  # noqa: PLC0415  (pydantic)

    try:
        configs = {name: RolloutCorrectionConfig.from_preset(name) for name in given.names or PRESETS}
    except ValueError as error:
        return _refuse("presets", error)
    for name, config in configs.items():
        decided = ", ".join(f"{field}={value}" for field, value in config.effective_fields().items())
        sys.stdout.write(f"{name}: {decided or 'measures only'}\n")
        sys.stdout.write(f"    {PRESETS[name].summary} ({PRESETS[name].origin})\n")
    return 0


def _plot(given: argparse.Namespace) -> int:
    from verl_rc.insight.picture import draw_run  # noqa: PLC0415  (pydantic and yaml, which no help text should wait for)

    try:
        sys.stdout.write(f"{draw_run(given.folder)}\n")
    except (ValueError, OSError) as error:
        return _refuse("plot", error)
    return 0


def _report(given: argparse.Namespace) -> int:
    from verl_rc.insight.page import PageOptions, Request, write_report  # noqa: PLC0415  (the catalogue and yaml)

    steps = {} if given.steps is None else {"first_step": given.steps[0], "last_step": given.steps[1]}
    options = PageOptions(not given.no_text, given.max_megabytes)
    try:
        report = write_report(
            Request(tuple(given.paths), given.output, newest_steps=given.last, options=options, **steps)
        )
    except (ValueError, OSError) as error:
        return _refuse("report", error)
    judged = list(zip(report.runs, report.verdicts, strict=True))
    if given.json:
        found = [{"name": run.name, "verdict": verdict.as_json()} for run, verdict in judged]
        sys.stdout.write(f"{json.dumps({'report': str(report.path), 'runs': found}, indent=2)}\n")
        return 0
    for run, verdict in judged:
        lines = verdict.lines() if run.is_own else [*verdict.lines(), f"  read as: {run.source}"]
        if len(judged) > 1:
            lines[0] = f"{run.name}: {lines[0]}"
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"report: {report.path}\n")
    return 0


def _trace(given: argparse.Namespace) -> int:
    from verl_rc.insight.timeline import write_timeline  # noqa: PLC0415  (matplotlib, which no help text should wait for)

    try:
        sys.stdout.write(write_timeline(given.folder, given.steps))
    except (ValueError, OSError) as error:
        return _refuse("trace", error)
    return 0


def _what_if(given: argparse.Namespace) -> int:
    from verl_rc.insight.run_folder import read_run  # noqa: PLC0415  (the catalogue and yaml)
    from verl_rc.insight.verdict import judge  # noqa: PLC0415  (as above)
    from verl_rc.insight.what_if import answer, read_batch, tried_configs  # noqa: PLC0415  (torch)

    try:
        configs = tried_configs(given.presets, given.fields)
        run = read_run(given.folder)
        verdict = judge(run)
        if given.gradients:
            found = _with_gradients(given, configs, verdict)
        else:
            found = answer(read_batch(given.folder, *(given.steps or ())), configs, verdict)
        if not run.is_own:
            found = replace(found, notes=(f"Read as {run.source}.", *found.notes))
    except (ValueError, OSError) as error:
        return _refuse("what-if", error)
    lines = [json.dumps(found.as_json(), indent=2)] if given.json else found.lines()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _with_gradients(
    given: argparse.Namespace, configs: "Mapping[str, RolloutCorrectionConfig]", verdict: "Verdict"
) -> "Answer":
    _quieten_libraries()
    from verl_rc.insight.replay import ParameterGradients  # noqa: PLC0415  (transformers)
    from verl_rc.insight.what_if import answer  # noqa: PLC0415  (torch)

    gradients = ParameterGradients(given.folder, *(given.steps or ()))
    found = answer(gradients.batch, configs, verdict, updates=gradients)
    return replace(found, notes=(*found.notes, gradients.cost))


def _export(given: argparse.Namespace) -> int:
    _quieten_libraries()
    # torch and transformers take seconds to load, for which no other subcommand and no help text should wait.
    from verl_rc.workers.export import ExportError, ExportRequest, export_checkpoint  # noqa: PLC0415

    request = ExportRequest(given.checkpoint, given.output, given.part, given.dtype, given.model)
    try:
        written = export_checkpoint(request)
    except ExportError as error:
        return _refuse("export", error)
    sys.stdout.write(f"{written}\n")
    return 0


def _refuse_configuration(error: Exception) -> int:
    """Every mistake on a line of its own, as a run reports them."""
    sys.stderr.write(f"configuration error:\n{error}\n")
    return USER_ERROR


def _refuse(subcommand: str, error: Exception) -> int:
    sys.stderr.write(f"verl-rc {subcommand}: {' '.join(str(error).split())}\n")
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
