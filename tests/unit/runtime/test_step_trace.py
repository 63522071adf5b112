"""A trace of this process is one that Chrome's tools read, with the operations in it and no others."""

import gzip
import json

import torch
from torch.profiler import record_function

from verl_rc.runtime.step_trace import StepTrace


def test_a_trace_has_the_operations_between_begin_and_end(tmp_path) -> None:
    trace, matrix = StepTrace(), torch.ones(8, 8, requires_grad=True)
    torch.linalg.inv(torch.eye(3))
    trace.switch(None)
    with record_function("actor.update"):
        (matrix @ matrix).sum().backward()
    trace.switch(None)  # goes on
    matrix.exp()
    trace.switch(tmp_path / "profile" / "step_1_rank_0.json.gz")
    torch.linalg.inv(torch.eye(3))
    trace.switch(tmp_path / "none.json.gz")
    with gzip.open(tmp_path / "profile" / "step_1_rank_0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"actor.update", "aten::mm", "aten::exp", "MmBackward0"} <= {
        name if name is None else name.removeprefix("autograd::engine::evaluate_function: ") for name in names
    }
    assert not any(name and "inv" in name for name in names)
    assert not (tmp_path / "none.json.gz").exists()
