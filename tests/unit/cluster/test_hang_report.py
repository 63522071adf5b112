"""Who waits for whom, from dumps as faulthandler writes them."""

from verl_rc.cluster.hang_report import Silence, Wait, full_report, summary
from verl_rc.cluster.process_stacks import Finding

HELPER = 'Thread 0x01 (most recent call first):\n  File "/lib/threading.py", line 5 in wait\n\n'
MAIN = 'Current thread 0x02 (most recent call first):\n{}  File "/x/verl_rc/cluster/remote.py", line 9 in call\n'
REDUCE = MAIN.format(
    '  File "/lib/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n  File "/x/rows.py", line 3 in step\n'
)
COMPUTE = MAIN.format('  File "/x/forward.py", line 11 in attend\n')


COLLECT = MAIN.format('  File "/lib/threading.py", line 5 in wait\n  File "/x/verl_rc/rollout/step_loop.py", line 8 in take\n')
SAMPLE = (
    'Thread 0x03 (most recent call first):\n  File "/lib/vllm/model.py", line 4 in forward\n'
    '  File "/x/verl_rc/rollout/step_loop.py", line 6 in _run\n\n'
)


def wait(*findings: Finding | None) -> Wait:
    processes = [Silence(f"rank {i}", "update", "answered score 7 s ago", finding) for i, finding in enumerate(findings)]
    return Wait(30.0, "trainer.hang_timeout_seconds", processes, '  File "train.py", line 1, in train\n', "{}")


def test_everyone_is_where_it_stands() -> None:
    text = summary(wait(Finding("runs", HELPER + REDUCE), Finding("runs", HELPER + COMPUTE), None, Finding("is stopped")))
    assert "did not answer within 30 s: rank 0 (update), rank 1 (update), rank 3 (update)." in text
    assert "  rank 0: waits in a collective for its peers, at all_reduce (/lib/torch/distributed/distributed_c10d.py:7);" in text
    assert "  rank 1: at attend (/x/forward.py:11); last sign of life: answered score 7 s ago." in text
    assert "  rank 3: is stopped; " in text
    assert "These answered: rank 2." in text
    assert "Raise trainer.hang_timeout_seconds" in text


def test_the_report_holds_every_stack() -> None:
    text = full_report(wait(Finding("runs", HELPER + REDUCE), None, Finding("has ended")))
    assert HELPER + REDUCE.rstrip() in text
    assert 'File "train.py"' in text
    assert "rank 2, asked to update (newest frame first):\nno stacks: it has ended" in text
    assert "rank 1, asked" not in text


def test_a_dump_without_the_drivers_call_still_tells_something() -> None:
    assert "rank 0: at wait (/lib/threading.py:5);" in summary(wait(Finding("runs", HELPER)))


def test_an_engine_stands_where_the_thread_that_samples_does() -> None:
    assert "rank 0: at forward (/lib/vllm/model.py:4);" in summary(wait(Finding("runs", COLLECT + "\n" + SAMPLE)))
