"""Tools that read the folder of a run, also while it goes on."""

import json
from collections.abc import Mapping

from verl_rc.cli.subcommand import (
    STEPS_ARGUMENT,
    TRUST_ARGUMENT,
    Options,
    Subcommand,
    path_argument,
    positive_number,
    quieten_libraries,
    step_keywords,
    write_lines,
    write_result,
)


def _diagnose(options: Options) -> None:
    if options.digests is not None:
        quieten_libraries()
        from verl_rc.insight.replay.digests import compare_weights

        write_lines(compare_weights(options.folder, options.digests).lines())
        return
    from verl_rc.insight.diagnosis import REPLAYS, DiagnosisRequest, diagnose

    names = list(REPLAYS) if options.replay == "all" else [name for name in options.replay.split(",") if name]
    if unknown := [name for name in names if name not in REPLAYS]:
        raise ValueError(f"--replay must be of {', '.join(REPLAYS)}, got {', '.join(unknown)}")
    request = DiagnosisRequest(
        options.folder,
        names,
        options.rows,
        trust_remote_code=options.trust_remote_code,
        **step_keywords(options),
    )
    if names:
        quieten_libraries()
        from verl_rc.insight.replay.diagnosis import diagnose_with_replays

        diagnosis = diagnose_with_replays(request)
    else:
        diagnosis = diagnose(request)
    write_result(diagnosis, options.json)


def _export(options: Options) -> None:
    quieten_libraries()
    from verl_rc.runtime.workers.export import export_checkpoint

    line = export_checkpoint(
        options.checkpoint,
        options.output,
        options.part,
        options.dtype,
        options.model,
        options.trust_remote_code,
    )
    write_lines([line])


def _plot(options: Options) -> None:
    from verl_rc.insight.picture import draw_run

    write_lines([f"{draw_run(options.folder)}"])


def _report(options: Options) -> None:
    from verl_rc.insight.page import ReportRequest, write_report

    request = ReportRequest(
        options.path,
        options.output,
        newest_steps=options.last,
        with_text=not options.no_text,
        max_megabytes=options.max_megabytes,
        **step_keywords(options),
    )
    report = write_report(request)
    run, verdict = report.run, report.verdict
    if options.json:
        facts = {"report": str(report.path), "run": run.name, "verdict": verdict.as_json()}
        write_lines([json.dumps(facts, indent=2)])
        return
    source = [] if run.is_own else [f"  read as: {run.source}"]
    write_lines([*verdict.lines(), *source, f"report: {report.path}"])


def _wandb_workspace(options: Options) -> None:
    entity, slash, project = options.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ValueError(f"the project must be given as ENTITY/PROJECT, got {options.project}")
    try:
        from verl_rc.metrics.sinks.wandb_workspace import save_workspace, workspace_json
    except ImportError as error:
        from verl_rc.config.errors import install_extra

        raise ValueError(
            f"the package wandb-workspaces must be installed; {install_extra('wandb-workspaces')}"
        ) from error
    view = json.dumps(workspace_json(entity, project), indent=2) if options.json else None
    write_lines([view or save_workspace(entity, project)])


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "diagnose": Subcommand(
        _diagnose,
        "name what makes engine and trainer of a run differ; --replay scores recorded tokens again",
        {
            "folder": path_argument("RUN", "folder of a run; replays need its token records"),
            "--replay": {
                "metavar": "R0,R3",
                "nargs": "?",
                "const": "all",
                "default": "",
                "help": "replays to make, R0 or R3; without names both (RUN/diagnosis.json keeps "
                "them, the report shows them)",
            },
            "--rows": {
                "metavar": "N",
                "type": positive_number,
                "default": 64,
                "help": "most rows of a record (default: 64)",
            },
            **STEPS_ARGUMENT,
            "--digests": path_argument(
                "WEIGHTS",
                "name the tensors of RUN, here a file of an engine's digests, a model folder or a "
                "checkpoint, that differ from those of this model folder or checkpoint",
            ),
            **TRUST_ARGUMENT,
            "--json": {"action": "store_true", "help": "print statements and measurements as JSON"},
        },
    ),
    "export": Subcommand(
        _export,
        "write a checkpoint as a Hugging Face folder, which transformers and vLLM load",
        {
            "checkpoint": path_argument("CHECKPOINT", "folder global_step_N of a run"),
            "--output": path_argument("DIR", "folder to write; new or empty", required=True),
            "--dtype": {
                "choices": ("bfloat16", "float32", "float16"),
                "help": "precision of the weights (default: the base model's)",
            },
            "--model": {
                "metavar": "PATH",
                "help": "where the base model is now (default: where it was when the run was started)",
            },
            **TRUST_ARGUMENT,
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
    "plot": Subcommand(
        _plot,
        "draw accuracy, reward, ESS and gap of a run, finished or not, over its steps",
        {
            "folder": path_argument(
                "RUN", "a run's folder, or a log of another trainer; the picture is written there"
            )
        },
    ),
    "report": Subcommand(
        _report,
        "write report.html: what a run did and what is wrong with it, in words and curves",
        {
            "path": path_argument(
                "RUN", "a run's folder; token records or a log of another trainer (docs/token_record.md)"
            ),
            "--output": path_argument("FILE", "the page (default: RUN/report.html)"),
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
            "--last": {"metavar": "N", "type": positive_number, "help": "only the last N steps"},
            **STEPS_ARGUMENT,
        },
        instead_of_further="it takes one run; compare runs in W&B, or write a report of each.",
    ),
    "wandb-workspace": Subcommand(
        _wandb_workspace,
        "save a view of a W&B project whose charts answer questions; needs an account and a network",
        {
            "project": {"metavar": "ENTITY/PROJECT", "help": "the user or team, and the project of the runs"},
            "--json": {"action": "store_true", "help": "print the view instead of saving it; no network"},
        },
    ),
}
