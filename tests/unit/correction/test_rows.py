"""Per-row columns: what every row adds up to."""

import torch
from appendix_a import rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.chunks import RowChunks
from verl_rc.correction.log_ratio import log_ratio
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import deciding_columns, describing_columns, join, real_rows


def test_columns_of_the_appendix() -> None:
    config = RolloutCorrectionConfig(rollout_token_veto_threshold=0.2)
    train, rollout, mask = rows()
    ratio = log_ratio(train, rollout, mask)
    columns = deciding_columns(ratio, ResolvedCorrection.of(config).rules, config)
    torch.testing.assert_close(columns["log_ratio"], torch.tensor([0.3, -1.8, -0.1], dtype=torch.float64))
    assert columns["tokens"].tolist() == [4, 3, 3]
    assert columns["catastrophic"].tolist() == [0, 1, 0]
    described = describing_columns(ratio, full=False)
    torch.testing.assert_close(described["train"], torch.tensor([-3.6, -4.2, -2.3], dtype=torch.float64))


def test_chunks_join_and_empty_rows_are_not_real() -> None:
    joined = join([{"tokens": torch.tensor([0.0, 2.0])}, {"tokens": torch.tensor([1.0])}], RowChunks.of(torch.ones(3, 1)))
    assert real_rows(joined).tolist() == [False, True, True]
