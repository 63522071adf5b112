"""A method beside the others on the exact track: its table, and where it would stand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_rc.bench import exact, flow, policies
from verl_rc.bench.exact import CONDITIONS, GROUP, PROMPTS, SEEDS, Finding, problems, run_exact
from verl_rc.bench.flow import OPTIMUM, STEPS, Flow, run_flow
from verl_rc.bench.method import LOSS_PREFIX, Method, correction_method, find_method
from verl_rc.bench.policies import Problem
from verl_rc.config.algorithms import LOSS_MODES, POLICY_LOSSES
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig

_UNCAPPED = 4.9e8
"""A bound above every weight: log-weights are clamped to 20."""
_REQUIRED_OPTIONS = {"dro_beta": 0.1}
"""Options without a default, as the bench sets them."""
EQUAL = 5e-4
"""Errors that differ by less share a place."""


@dataclass(frozen=True)
class Result:
    """A method on the exact track."""

    name: str
    forwards: int
    """Passes over the batch without gradient that it needs before an update."""
    findings: Mapping[str, Finding]
    """By condition."""
    flows: Mapping[str, Flow]
    """By condition; empty: not run."""

    @property
    def error(self) -> float:
        """What methods are ordered by: the error at the best step size, mean over the conditions."""
        return sum(finding.best_error for finding in self.findings.values()) / len(self.findings)

    @property
    def worst(self) -> str:
        """The condition with the largest error at the best step size."""
        return max(self.findings, key=lambda name: self.findings[name].best_error)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "forwards": self.forwards,
            "findings": {name: asdict(finding) for name, finding in self.findings.items()},
            "flows": {name: asdict(flow) for name, flow in self.flows.items()},
        }

    @classmethod
    def from_json(cls, name: str, values: Mapping[str, Any]) -> "Result":
        """The opposite of ``as_json``."""
        findings = {condition: Finding(**numbers) for condition, numbers in values["findings"].items()}
        flows = {condition: Flow(**numbers) for condition, numbers in values["flows"].items()}
        return cls(name, values["forwards"], findings, flows)


def run(method: Method, with_flows: bool = True, among: Sequence[Problem] | None = None) -> Result:
    """The exact track, on the problems ``among``, None: its own; ``with_flows``: with gradient flows and the
    comparison of ranks, too."""
    among = problems() if among is None else among
    flows = run_flow(method, among) if with_flows else {}
    return Result(method.name, method.forwards, run_exact(method, among, with_ranks=with_flows), flows)


def known_methods() -> Iterator[Method]:
    """Every preset and every loss, without second names of the same."""
    pairs = list[tuple[RolloutCorrectionConfig, str]]()
    for method in map(find_method, [*PRESETS, *map(_loss_with_options, LOSS_MODES)]):
        # A preset may name a loss that is a loss mode, too.
        pair = method.correction.model_copy(update={"loss_type": "ppo_clip"}), method.loss
        if pair not in pairs:
            pairs.append(pair)
            yield method


def _loss_with_options(name: str) -> str:
    required = [option for option in POLICY_LOSSES[name].options if option.is_required]
    keys = [option.key.rpartition(".")[2] for option in required]
    return ",".join([f"{LOSS_PREFIX}{name}", *(f"{key}={_REQUIRED_OPTIONS[key]}" for key in keys)])


def references() -> dict[str, Method]:
    """What methods are compared with: no correction, and weights of tokens and sequences without a bound."""

    def weights(level: str) -> Method:
        config = {"rollout_is": level, "rollout_is_threshold": _UNCAPPED}
        return correction_method(f"{level} weights", RolloutCorrectionConfig.model_validate(config))

    return {"none": find_method("disabled"), "token": weights("token"), "sequence": weights("sequence")}


@dataclass(frozen=True)
class Standing:
    """A method among the others."""

    result: Result
    references: Mapping[str, Result]
    others: Sequence[Result]

    def lines(self) -> list[str]:
        """For the console."""
        head = ["condition", "bias", "variance", "cosine", "error", "unscaled"]
        head += [f"of {name}" for name in self.references]
        rows = [head]
        for name, finding in self.result.findings.items():
            ratios = [finding.error / result.findings[name].error for result in self.references.values()]
            numbers = (
                *(finding.bias, finding.variance, finding.cosine, finding.best_error, finding.error),
                *ratios,
            )
            rows.append([name, *(f"{number:.3f}" for number in numbers)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return [
            f"{self.result.name}, exact track: means over {len(SEEDS)} policies, relative to the true "
            f"gradient. Forwards before an update: {self.result.forwards}.",
            f"bias, cosine: of the expected update; variance: of one prompt's, {GROUP} responses",
            f"error: of the update of {PROMPTS} prompts at the best step size; unscaled: at its own length,",
            f"and as a multiple of that of other weights ({', '.join(self.references)}; no bounds)",
            "",
            *table,
            "",
            *self._flow(),
            self._place(),
        ]

    def _flow(self) -> Iterator[str]:
        for name, means in self.result.flows.items():
            optimal = f"above {OPTIMUM} in {means.optimal:.0%} of the policies"
            collapsed = f", collapsed in {means.collapsed:.0%}" if means.collapsed else ""
            yield f"{STEPS} steps, {name}: expected score {means.score:.3f} at the end, {optimal}{collapsed}"

    def _place(self) -> str:
        error, others = self.result.error, self.others
        better = [result.name for result in others if result.error < error - EQUAL]
        equal = [result.name for result in others if abs(result.error - error) <= EQUAL]
        places = f"place {len(better) + 1} of {len(others) + 1}"
        place = f"{places}, mean error {error:.3f}"
        above = f", behind {better[-1]}" if better else ""
        beside = f", beside {', '.join(equal[:3])}{' and others' if len(equal) > 3 else ''}" if equal else ""
        return f"{place}{above}{beside}"


def stand(method: Method) -> Standing:
    """Run the method, and of all others their errors."""
    among = problems()
    result = run(method, among=among)
    compared = {name: run(reference, False, among) for name, reference in references().items()}
    results = [run(candidate, False, among) for candidate in known_methods() if candidate.name != method.name]
    return Standing(result, compared, sorted(results, key=lambda result: result.error))


def settings() -> dict[str, Any]:
    """What results depend on; those of other settings must not be mixed."""
    constants = {
        exact: ("SEEDS", "GROUP", "PROMPTS", "NOISE", "MINI_BATCH_ROWS"),
        flow: ("STEPS", "RATE", "LONGEST"),
        policies: ("VOCABULARY", "MOST_TOKENS", "VERSIONS", "STEP", "DRIFT"),
    }
    values = {
        f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
        for module, names in constants.items()
        for name in names
    }
    return {**values, "exact.SEEDS": list(SEEDS), "conditions": {n: c.words for n, c in CONDITIONS.items()}}
