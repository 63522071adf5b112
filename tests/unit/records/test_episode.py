"""What an environment may reply."""

import pytest

from verl_rc.records.episode import BadReplyError, Reply


def test_a_reply_has_at_most_a_hundred_metrics_and_counts_the_others() -> None:
    many = {f"m{number}": float(number) for number in range(10_000)}
    reply = Reply(done=True, metrics=many)
    kept = {f"m{number}": float(number) for number in range(100)}
    assert reply.metrics == {**kept, "dropped_metrics": 9_900.0}
    again = Reply(done=True, metrics={**reply.metrics, "one": 1.0, "x" * 101: 2.0})
    assert again.metrics == {**kept, "dropped_metrics": 9_902.0}
    assert reply.joined(Reply(done=True, metrics={"m1": 1.0, "other": 2.0})).metrics == {
        **kept,
        "m1": 2.0,
        "dropped_metrics": 9_901.0,
    }


def test_few_metrics_stay_as_they_are() -> None:
    metrics = {f"m{number}": 1.0 for number in range(99)} | {"x" * 100: 2.0}
    assert Reply(done=True, metrics=metrics).metrics == metrics
    assert Reply(done=True, metrics={5: 1}).metrics == {"5": 1.0}  # type: ignore[dict-item]


@pytest.mark.parametrize("metrics", [{"a": "x" * 10_000}, {"dropped_metrics": "x"}, {"a": float("nan")}])
def test_a_metric_is_a_finite_number(metrics: dict[str, float]) -> None:
    with pytest.raises(BadReplyError, match="must be a finite number") as refusal:
        Reply(done=True, metrics=metrics)
    assert len(str(refusal.value)) < 500
