"""The table of causes while a run trains: said when a cause holds in two steps in a row, and again when it has ended."""

from collections.abc import Iterator, Mapping

from verl_rc.metrics.bounds import BOUNDS
from verl_rc.metrics.health import CauseEpisode, CauseHistory
from verl_rc.report.verdict.cause import PREFIX, cause_of, statement_of

ENDED_AFTER = 3
"""Steps without a cause after which it has ended."""
CAUSE = "alerts/cause"
FLOOR = f"{PREFIX}logit_noise_floor"


def judge_causes(
    metrics: Mapping[str, float], step: int, history: CauseHistory, temperature: float
) -> tuple[dict[str, str], dict[str, float], CauseHistory]:
    """What to say of a step: texts by cause, further metrics, and the history with this step.

    ``temperature`` is that of the configuration, which sentences name.
    """
    if f"{PREFIX}missing_mass" not in metrics:  # no signatures: not before the update where the actor corrects, or never
        return {}, {}, history
    first = history.first_noise
    if f"{PREFIX}logit_noise" in metrics and len(first) < BOUNDS.floor_steps:
        first = (*first, metrics[f"{PREFIX}logit_noise"])
    further = {FLOOR: sum(first) / BOUNDS.floor_steps} if len(first) == BOUNDS.floor_steps else {}
    seen = {name.removeprefix(PREFIX): value for name, value in {**metrics, **further}.items() if name.startswith(PREFIX)}
    cause, episodes, texts = cause_of(seen), dict(history.episodes), dict(_ended(history, step))
    for name in texts:
        del episodes[name]
    if cause is not None:
        before = episodes.get(cause.name, CauseEpisode(step, step))
        speaks = before.last == step - 1
        episodes[cause.name] = CauseEpisode(before.first, step, before.is_told or speaks)
        if speaks and not before.is_told:
            said = statement_of(cause, [seen], temperature)
            texts[cause.name] = f"{said.sentence} (since step {before.first}). {said.next_test}"
    holds = cause is not None and episodes[cause.name].is_told
    return texts, {**further, CAUSE: float(holds)}, CauseHistory(episodes, first)


def _ended(history: CauseHistory, step: int) -> Iterator[tuple[str, str]]:
    for name, episode in history.episodes.items():
        if step - episode.last >= ENDED_AFTER:
            yield name, f"ended: seen from step {episode.first} to {episode.last}" if episode.is_told else ""
