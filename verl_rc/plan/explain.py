"""A configuration in words: the objective with the source of every symbol, the step, the batch sizes, unused
options."""

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_rc.algorithm.supply.ahead import Row, prediction, publications, rule_of_ages
from verl_rc.algorithm.supply.step_time import MeasuredStep
from verl_rc.config.algorithms import AGGREGATIONS, POLICY_LOSSES
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.rollout import EnvironmentConfig, RolloutConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.run import RunConfig
from verl_rc.plan.run_plan import (
    LongestRows,
    Phase,
    Plan,
    PolicyPlan,
    UpdateArithmetic,
    inputs_of_update,
    mask_meaning,
    plan_of,
    reference_meaning,
)
from verl_rc.runtime.exact import what_it_means

PLAN_FILE = "plan.txt"
_WIDTH = 118
_NAME_WIDTH = 12

_WEIGHTS = {
    "token": "the token's own ratio",
    "prefix": "the product of the row's ratios up to the token",
    "turn": "the product of its turn's ratios",
    "sequence": "the product of the row's ratios",
    "geometric": "the geometric mean of the row's ratios",
}


_GRADIENT_SUMS = {
    True: "each rank adds up whole gradients, 4 bytes a weight; ranks reduce them once a mini-batch",
    False: "ranks reduce gradients after every micro-batch; each keeps its shard of the sum",
    None: (
        "ranks reduce gradients once a mini-batch if an update with whole gradients, 4 bytes a weight on "
        "each rank, fits on a GPU, else after every micro-batch: the start says which (and verl-rc doctor)"
    ),
}
"""Sentences by the value of ``use_no_sync_for_gradient_accumulation``."""


_AGENT = "verl_rc.runtime.rollout.environments.agent:Agent"
_REWARDS = {
    "turns": "what the environment gives each turn, at the turn's last token",
    "function": "the reward function's score of the whole response, at its last token",
    "sum": "what the environment gives each turn, and at the last token the reward function's score",
}


def write_plan(config: RunConfig, folder: Path) -> Path:
    """Write ``plan_text`` to ``plan.txt`` in a run's folder, which must exist."""
    path = folder / PLAN_FILE
    path.write_text(plan_text(config), encoding="utf-8")
    return path


def add_to_plan(folder: Path, title: str, line: str) -> None:
    """Append a section to ``plan.txt`` with facts that are known only once the run has started."""
    with (folder / PLAN_FILE).open("a", encoding="utf-8") as plan:
        plan.write(f"\n{title}\n  {line}\n")


def plan_text(config: RunConfig, measured: MeasuredStep | None = None) -> str:
    """The plan of a valid configuration as text, with the step predicted from what was ``measured``.

    Reads no file, starts no process.
    """
    plan = plan_of(config)
    sections = {
        "Objective (minimised, once per mini-batch)": _objective(config, plan),
        "Rollout correction": _table(_correction(config.algorithm.rollout_correction, plan)),
        "Advantages": _advantages(config, plan),
        "Who answers whom": _conversation(config, plan),
        "Critic": _critic(config),
        "A step": _step(config, plan),
        "Generation ahead of training": _ahead(config, measured),
        "Batch": _batch(config, plan),
        "Set, and without effect here": _without_effect(plan, is_changed=True),
        "At their defaults, and without effect here": _without_effect(plan, is_changed=False),
        "Worth a second look": (line for text in plan.warnings for line in _wrapped("  ", text)),
    }
    bodies = {title: "".join(f"{line}\n" for line in lines) for title, lines in sections.items()}
    return "\n".join(f"{title}\n{body}" for title, body in bodies.items() if body)


def _objective(config: RunConfig, plan: Plan) -> Iterator[str]:
    policy = plan.policy
    yield from _wrapped("  ", total_formula(policy, config.actor_rollout_ref.actor.kl_loss_type))
    if policy.has_task_loss:
        yield from _wrapped("  ", f"L_policy = {policy_formula(policy)}    ({policy.loss})")
        options = () if policy.spec is None else policy.spec.options
        if options:
            numbers = ", ".join(option.in_words(config.actor_rollout_ref.actor) for option in options)
            yield from _wrapped("  ", f"with {numbers}")
    if policy.distillation is not None:
        yield from _wrapped("  ", f"L_teacher = {teacher_formula(policy, policy.distillation)}")
    yield ""
    yield from _table(_symbols(config, plan))


def _symbols(config: RunConfig, plan: Plan) -> Iterator[Row]:
    policy, actor = plan.policy, config.actor_rollout_ref.actor
    yield (
        "π",
        "current policy: the actor while it is updated (log_probs); the gradient goes through it and nothing "
        "else",
    )
    yield from _ratio_symbols(plan)
    if policy.mode != "decoupled" or policy.applies_weights or policy.rejects_tokens or policy.centering:
        yield (
            "π_roll",
            "rollout policy: the engine, as it reported the log-prob of each token it sampled "
            "(rollout_log_probs); constant",
        )
    yield from _candidates(policy)
    if policy.has_task_loss:
        yield "A", "advantage (advantages); constant, on all tokens of response_mask, also rejected ones"
    if policy.distillation is not None:
        teachers = " or ".join(
            one.model_path + (f" (rows of {one.key})" if one.key else "")
            for one in config.distillation.teachers.values()
        )
        yield "π_T", f"teacher: {teachers}, frozen, on the policy's own samples (teacher_log_probs); constant"
    yield from _weight_symbols(config.algorithm.rollout_correction, plan)
    if policy.has_entropy:
        yield "H(π)", "entropy of the current policy at each token (entropies); carries a gradient"
    if policy.kl_loss_coef:
        yield "π_ref", f"reference policy: {reference_meaning(config)} (ref_log_prob); constant"
    yield from _support(config.actor_rollout_ref.rollout)
    if config.actor_rollout_ref.rollout.enable_rollout_routing_replay:
        yield (
            "π(y)",
            "given the engine's experts (router replay): in the actor each token, in prompts too, takes the "
            "experts that it took in the engine, weighed by the actor's own router, through which the "
            "gradient goes. A reference policy takes its own",
        )
    yield "m", mask_meaning(config.algorithm, policy)
    if policy.spec is not None and policy.spec.ratio in ("row", "product"):
        yield (
            "",
            "a row's ratio is made of all of response_mask: a rejected token leaves the sum, not the ratio",
        )
    counted = "response tokens"
    if policy.rejects_tokens:
        counted = "response tokens (kept or not)" if policy.counted_tokens == "original" else "kept tokens"
    for mode in sorted(policy.aggregations):
        divisors = AGGREGATIONS[mode].divisors.format(counted=counted, factor=actor.loss_scale_factor)
        yield "", f"{mode}: {divisors}"


def _candidates(policy: PolicyPlan) -> Iterator[Row]:
    if policy.centering is None:
        return
    tail = "; all other tokens count as one" if policy.centering.tail == "proportional" else ""
    ratio, when = (
        ("", "") if policy.mode == "bypass" else (", with a ratio of 1", ", in the first update of a step")
    )
    yield (
        "v",
        f"the {policy.centering.top_k} tokens that π_roll finds most likely in the place of y{tail}. ℓ(v) is "
        f"ℓ with v for y and the same A{ratio}: so the expected update is 0 where all "
        f"advantages are equal{when} (arXiv:2609.20807)",
    )


def _support(rollout: RolloutConfig) -> Iterator[Row]:
    if rollout.has_filter:
        filters = ", ".join(f"{name}={getattr(rollout, name)}" for name in ("top_p", "top_k", "min_p"))
        yield (
            "π(y)",
            f"given the engine's support ({filters}): log-probs, entropies and divergences of every policy "
            "are those of the distribution over the tokens that the engine's filter has left at y; the "
            "gradient goes through their logits alone. Where more than "
            f"{rollout.largest_support} are left, y is rejected",
        )


def _ratio_symbols(plan: Plan) -> Iterator[Row]:
    policy, spec = plan.policy, plan.policy.spec
    symbol = "π_roll" if policy.mode == "bypass" else "π_old"
    if spec is None:
        yield (
            "π_old",
            f"{policy.old_policy} policy (old_log_probs); the function decides what it does with it",
        )
        return
    if not spec.reads_old_log_probs:
        symbols = [
            symbol
            for symbol, is_used in (("w", policy.applies_weights), ("m", policy.rejects_tokens))
            if is_used
        ]
        effect = (
            f"enters through {' and '.join(symbols)} alone"
            if symbols
            else f"does not enter the loss {policy.loss}"
        )
        yield "", f"no ratio, no clip: the {policy.old_policy} policy {effect}"
        return
    if policy.mode == "interpolated":
        yield (
            "π_old",
            "proximal policy: log π_old = (1 - a) log π_roll + a log π, where a is the share of the "
            "optimizer updates from π_roll to π that were made before the step; constant",
        )
    elif policy.mode != "bypass":
        yield (
            "π_old",
            "proximal policy: the actor before the step's first update, recomputed by old_log_prob "
            "(old_log_probs); constant",
        )
    gradient = (
        "; the gradient goes through it"
        if spec.gradient_through == "ratio"
        else "; a constant, the gradient goes through log π"
    )
    if spec.ratio in ("token", "product") or spec.is_per_row:
        yield "r", f"π(y) / {symbol}(y) of the sampled token{gradient}"
    elif spec.ratio == "row":
        yield "s", f"exp(mean over the row of log π(y) / {symbol}(y)), with each token's own gradient"
    if policy.mode == "bypass":
        yield (
            "",
            "bypass mode: π_old is the rollout policy, nothing is recomputed"
            + (f"; read {symbol} for π_old" if spec.ratio in ("token", "penalty") else ""),
        )


def _weight_symbols(correction: RolloutCorrectionConfig, plan: Plan) -> Iterator[Row]:
    policy = plan.policy
    if not policy.applies_weights:
        return
    ratio = "π / π_roll, with π detached" if policy.mode == "bypass" else "π_old / π_roll"
    bound = correction.weight_threshold()
    bounds = (
        f"at most {bound.upper:g}" if bound.lower is None else f"0 outside [{bound.lower:g}, {bound.upper:g}]"
    )
    scaled = ", divided by their mean over the batch" if correction.rollout_is_batch_normalize else ""
    symbol = "W" if policy.spec is not None and policy.spec.is_per_row else "w"
    level = "the geometric mean of the row's weights, each" if symbol == "W" else ""
    yield (
        symbol,
        f"{level} {_WEIGHTS[str(correction.rollout_is)]} {ratio}, {bounds}{scaled} (rollout_is_weights); "
        "constant".strip(),
    )


def _correction(correction: RolloutCorrectionConfig, plan: Plan) -> Iterator[Row]:
    policy = plan.policy
    yield (
        "mode",
        "bypass: in the actor, mini-batch by mini-batch; current over rollout policy"
        if policy.mode == "bypass"
        else "decoupled: in the actor, mini-batch by mini-batch; interpolated proximal over rollout policy"
        if policy.mode == "interpolated"
        else "decoupled: in the driver, once per step; proximal over rollout policy",
    )
    reported = "reported only" if correction.rollout_is is not None else "none"
    yield "weights", f"{correction.rollout_is}" if policy.applies_weights else reported
    rules = [f"{rule} within {bound}" for rule, bound in correction.rejection_bounds().items()]
    if correction.rollout_rs_target_acceptance is not None:
        rules.append(f"the bound follows an acceptance of {correction.rollout_rs_target_acceptance:g}")
    if correction.rollout_token_veto_threshold is not None:
        rules.append(f"whole rows with a ratio below {correction.rollout_token_veto_threshold:g}")
    if correction.rollout_opsm_threshold is not None:
        rules.append(
            "tokens with A < 0 in rows whose mean log rollout/train is above "
            f"{correction.rollout_opsm_threshold:g}"
        )
    yield "rejection", "; ".join(rules) or "none"
    if policy.centering is not None:
        yield "centering", f"by the {policy.centering.top_k} most likely tokens of the engine"
    yield (
        "not finite",
        f"{correction.nonfinite_logprob}; the run stops above {correction.nonfinite_stop_fraction:.0%} of "
        "tokens",
    )
    ratio = None if policy.spec is None else policy.spec.ratio
    if policy.mode == "bypass" and ratio in ("token", "row", "product"):
        yield "", "the ratio of the loss itself, to the rollout policy, corrects the gap"
    elif not (policy.applies_weights or policy.rejects_tokens):
        yield "", "the gap is measured (rollout_corr/*), and nothing is corrected"


def _advantages(config: RunConfig, plan: Plan) -> Iterator[str]:
    advantages, algorithm = plan.advantages, config.algorithm
    numbers = [
        f"{name} = {getattr(algorithm, name):g}" for name in ("gamma", "lam") if advantages.reads(name)
    ]
    if advantages.reads("norm_adv_by_std_in_grpo"):
        numbers.append(
            "divided by the group's standard deviation"
            if algorithm.norm_adv_by_std_in_grpo
            else "centred only"
        )
    if advantages.reads("turn_credit") and algorithm.turn_credit == "turn":
        numbers.append("each turn credited with what follows, compared with turns of the same number")
    several_samples = config.actor_rollout_ref.rollout.n > 1
    baseline = (
        ("samples of one prompt" if several_samples else "none: a prompt has one sample")
        if advantages.compares_groups
        else "the critic's values"
        if advantages.uses_values
        else "none"
    )
    rows = [("estimator", ", ".join([advantages.estimator, *numbers])), ("baseline", baseline)]
    if advantages.spec is not None:
        rows.insert(1, ("A", f"{advantages.spec.formula}    ({advantages.spec.source})"))
    if advantages.excludes_rejected:
        rows.append(("", "fully rejected rows do not count in it"))
    reward = "outcome score at the last response token"
    if _rewards_turns(config):
        reward = "of each turn, at its last token"
        if advantages.spec is not None and advantages.spec.subtracts_total:
            reward = "the sum of the turns' rewards, at the last token"
    if advantages.reward_kl:
        weight = f"{algorithm.kl_ctrl.kl_coef:g} ({algorithm.kl_ctrl.type})"
        reward += f", minus {weight} x {algorithm.kl_penalty}({plan.policy.old_policy}, π_ref) of each token"
    inputs = ", ".join(inputs_of_update(plan.policy, advantages))
    rows += [("reward", reward), ("read", f"{inputs} decide the actor's update; nothing else does")]
    yield from _table(rows)


def _rewards_turns(config: RunConfig) -> bool:
    environment = config.actor_rollout_ref.rollout.environment
    return environment.name is not None and environment.reward != "function"


def _conversation(config: RunConfig, plan: Plan) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.environment.name is not None:
        credit = [("reward", _REWARDS[rollout.environment.reward]), ("credit", _credit(config, plan))]
        yield from _table([*_environment(config, rollout.environment), *credit])
    elif rollout.multi_turn.enable:
        tools = rollout.multi_turn
        yield from _table(
            [
                ("the policy", f"takes turns; one without a call of {', '.join(tools.tools)} is its last"),
                (
                    "tools",
                    f"answer up to {tools.max_parallel_calls} call(s) of a turn, in each engine's process",
                ),
            ]
        )


def _environment(config: RunConfig, environment: EnvironmentConfig) -> Iterator[Row]:
    yield "the policy", "takes turns, each up to a stop token; every sample is an episode of its own"
    yield "answers", _answerer(environment.name, environment.arguments)
    for value, choice in environment.choices.items():
        yield "", f"rows whose agent_name is {value}: {_answerer(choice.name, choice.arguments)}"
    yield (
        "runs in",
        f"{environment.hosts} process(es) of its own; an episode stays with one, and goes on in another when "
        "that is lost"
        if environment.hosts
        else "each engine's process; environment.hosts=N moves it into processes of its own",
    )
    turns = (
        "any number of turns" if environment.max_turns is None else f"at most {environment.max_turns} turns"
    )
    yield (
        "limits",
        f"{turns}, {config.data.max_response_length} tokens of turns and replies together; "
        f"{environment.step_seconds:g} s a call, which is made once more when it fails; then the prompt is "
        "sampled once more, then replaced",
    )


def _answerer(name: str | None, arguments: Mapping[str, Any]) -> str:
    if name != _AGENT:
        return f"{name}"
    program = arguments.get("function") or arguments.get("command") or ()
    command = program if isinstance(program, str) else shlex.join(program)
    return f"an agent from outside, {command}: it asks the policy by a chat endpoint and ends with a score"


def _credit(config: RunConfig, plan: Plan) -> str:
    advantages = plan.advantages
    if advantages.spec is None:
        return f"the function {advantages.estimator} decides"
    if advantages.reads("turn_credit") and config.algorithm.turn_credit == "turn":
        return "by turn: each is credited with the rewards from it on"
    if advantages.compares_groups or advantages.spec.subtracts_total or not _rewards_turns(config):
        return "by episode: all of its tokens are credited with its score"
    return "by token: each is credited with the rewards that follow it"


def _critic(config: RunConfig) -> Iterator[str]:
    if not config.needs_critic:
        return
    critic = config.critic
    loss = "1/2 max((V − R)², (clip(V, V_old − c, V_old + c) − R)²)"
    yield from _wrapped(
        "  ", f"L_value = {loss}, {critic.loss_agg_mode} over response_mask, c = {critic.cliprange_value:g}"
    )
    yield from _table(
        [
            ("V", "the critic's value before each token (values); carries the gradient"),
            ("V_old", "the same before the step's first update (old_values); constant"),
            ("R", "return (returns); constant"),
        ]
    )


def _step(config: RunConfig, plan: Plan) -> Iterator[str]:
    name_width = max(len(phase.name) for phase in plan.phases)
    role_width = max(len(phase.role) for phase in plan.phases)
    for phase in plan.phases:
        work = "; ".join(part for part in (_work(phase), phase.schedule) if part)
        yield f"  {phase.name:<{name_width}}  {phase.role:<{role_width}}  {work}".rstrip()
    names = ", ".join(phase.name for phase in plan.phases if phase.forward_rows) or "none"
    yield f"  forward passes besides the updates: {names}"
    if config.async_training.trace:
        yield "  trace.json records who does what and when: https://ui.perfetto.dev shows it"


def _work(phase: Phase) -> str:
    if phase.trained_rows:
        return f"forward and backward, {phase.trained_rows} rows"
    return f"forward, {phase.forward_rows} rows" if phase.forward_rows else ""


def _ahead(config: RunConfig, measured: MeasuredStep | None) -> Iterator[str]:
    options = config.async_training
    if options.is_synchronous:
        return
    sentences = () if measured is None else prediction(measured, options)
    predicted = [("predicted", sentence) for sentence in sentences]
    yield from _table([*rule_of_ages(config), *publications(config), *predicted])


def _batch(config: RunConfig, plan: Plan) -> Iterator[str]:
    sizes, data, trainer = plan.sizes, config.data, config.trainer
    steps = (
        f"{trainer.total_training_steps} (at most {trainer.total_epochs} epochs)"
        if trainer.total_training_steps
        else f"as many as {trainer.total_epochs} epochs have"
    )
    if sizes.critic_only_steps:
        steps += f"; the first {sizes.critic_only_steps} do not update the actor"
    samples, engines = config.actor_rollout_ref.rollout.n, config.num_engines
    rows = f"{data.train_batch_size} prompts x {samples} samples = {config.rows_per_step} rows a step"
    yield f"  {rows}, at most {-(-config.rows_per_step // engines)} for each of {engines} engine(s)"
    lengths = f"{data.max_prompt_length} + {data.max_response_length} = {config.longest_sequence}"
    yield f"  a row has at most {lengths} tokens"
    for role, update in (("actor", sizes.actor), ("critic", sizes.critic)):
        if update is not None:
            yield from _wrapped("  ", f"{role}: {_update_in_words(update, LongestRows.of(config, role))}")
            if update.ranks_per_copy < update.ranks:
                yield from _wrapped(
                    "  ",
                    f"{role}: {update.ranks // update.ranks_per_copy} copies of weights and moments, each "
                    f"shared by {update.ranks_per_copy} rank(s): layers are gathered among those, gradients "
                    "are summed over all",
                )
            if update.ranks > 1:
                yield from _wrapped("  ", f"{role}: {_GRADIENT_SUMS[update.sums_gradients_once]}")
            if update.scales_loss:
                yield from _wrapped(
                    "  ",
                    f"{role}: float16, its loss times a dynamic scale; an optimizer step whose gradient "
                    "overflows is skipped, and the scale halved",
                )
    if config.actor_rollout_ref.model.head_dtype is not None:
        yield "  logits: products in float32, in actor, reference and engines"
    if config.actor_rollout_ref.exact:
        yield from _wrapped("  exact mode: ", what_it_means(config.trainer.device))
    yield f"  training steps: {steps}"


def _update_in_words(update: UpdateArithmetic, longest: LongestRows) -> str:
    low, high = update.rows_per_group
    per_group = f"{low}" if low == high else f"{low} to {high}"
    limit = (
        f"{update.max_tokens * update.ranks_per_group} tokens"
        if update.max_tokens is not None
        else f"{update.max_rows} rows"
    )
    groups = f"{update.ranks} rank(s)"
    if update.ranks_per_group > 1:
        groups = (
            f"{update.num_groups} group(s) of {update.ranks_per_group} ranks that share each row's tokens "
            "and attention heads"
        )
    fewest = update.rows_per_micro_batch(longest)
    at_least = f" ({fewest} of the longest rows)" if update.max_tokens is not None else ""
    if longest.siblings > 1 and fewest > 1:
        at_least += (
            "; rows of one prompt compute it once"
            if fewest >= longest.siblings
            else f"; the {longest.siblings} rows of a prompt lie in several, each of which computes it once"
        )
    return (
        f"{update.mini_batches_per_epoch} mini-batch(es) of {update.mini_batch_prompts} prompts = "
        f"{update.mini_batch_rows} rows, x {update.epochs} epoch(s) = {update.optimizer_steps} optimizer "
        f"step(s) a step; {per_group} rows of a mini-batch on each of {groups}, in micro-batches of at most "
        f"{limit}{at_least}"
    )


def _without_effect(plan: Plan, is_changed: bool) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for option in plan.unused:
        if option.is_changed == is_changed:
            kind = "only reported: " if option.metrics_only else ""
            reasons.setdefault(kind + option.reason, []).append(option.key)
    for reason, keys in reasons.items():
        yield from _wrapped("  ", f"{', '.join(keys)}: {reason}")


def _table(rows: Iterable[Row]) -> Iterator[str]:
    for name, meaning in rows:
        yield from _wrapped(f"  {name:<{_NAME_WIDTH}}", meaning)


def _wrapped(start: str, text: str) -> list[str]:
    """``text`` after ``start``, wrapped at words; further lines are indented below the text, or deeper than a
    blank ``start``."""
    indent = len(start) if start.strip() else len(start) + 2
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def policy_formula(plan: PolicyPlan) -> str:
    """``L_policy`` of a plan."""
    weight = "w · " if plan.applies_weights else ""
    if plan.spec is None:
        return f"{weight}the function {plan.loss}"
    if plan.centering is not None:
        of_candidate = "w(v) " if plan.applies_weights else ""
        term = f"{weight}ℓ(y) − Σ_v π_roll(v) {of_candidate}ℓ(v)"
        return f"{AGGREGATIONS[plan.aggregation].average_of(f'({term})')}, ℓ = {plan.spec.formula}"
    if plan.spec.is_per_row:
        own_weight = "W · " if plan.applies_weights else ""
        return f"1/S · Σ_rows {own_weight}[{plan.spec.formula}]"
    return AGGREGATIONS[plan.aggregation].average_of(f"{weight}[{plan.spec.formula}]")


def total_formula(plan: PolicyPlan, kl_loss_type: str) -> str:
    """``L``: the policy term, the teacher's and the regularisers that are in the loss."""
    terms = ["L = L_policy" if plan.has_task_loss else "L = L_teacher"]
    average = AGGREGATIONS[plan.regulariser_aggregation]
    if plan.distillation is not None and plan.has_task_loss:
        terms.append(f"+ {plan.distillation.distillation_loss_coef:g} · L_teacher")
    if plan.entropy_target is not None:
        terms.append(f"− c(H ≤ {plan.entropy_target:g}) · {average.average_of('H(π)')}")
    elif plan.entropy_coeff:
        sign = "−" if plan.entropy_coeff > 0 else "+"
        terms.append(f"{sign} {abs(plan.entropy_coeff):g} · {average.average_of('H(π)')}")
    if plan.kl_loss_coef:
        divergence = average.average_of(f"{kl_loss_type}(π, π_ref)")
        terms.append(f"+ {plan.kl_loss_coef:g} · {divergence}")
    return " ".join(terms)


def teacher_formula(plan: PolicyPlan, distillation: DistillationLossConfig) -> str:
    """``L_teacher`` of a plan."""
    average, weight = AGGREGATIONS[plan.regulariser_aggregation], "w · " if plan.applies_weights else ""
    divergence = f"{distillation.loss_mode}(π, π_T)"
    if distillation.loss_mode == "forward_kl_topk":
        lowest = distillation.log_prob_min_clamp
        floor = "" if lowest is None else f", log-probs at least {lowest:g}"
        divergence = (
            f"max(0, Σ π_T(v) (log π_T(v) − log π(v))) over the {distillation.topk} tokens v that π_T finds "
            f"most likely at y{floor}"
        )
    if distillation.loss_max_clamp is not None:
        divergence = f"clamp({divergence}, ±{distillation.loss_max_clamp:g})"
    if plan.teacher_loss is None:
        return f"{average.average_of(weight + divergence)}, differentiated through π"
    formula = average.average_of(f"{weight}[{POLICY_LOSSES[plan.teacher_loss].formula}]")
    clips = f", ε_low = {distillation.clip_ratio_low:g}, ε_high = {distillation.clip_ratio_high:g}, c = 3"
    return f"{formula}, where A = −{divergence}, constant{clips if plan.teacher_loss == 'vanilla' else ''}"
