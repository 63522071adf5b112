import os
import signal

import pytest

from verl_rc.driver.interruption import StopRequest


def test_the_first_sigterm_is_noted_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest()
    with request.listening():
        assert not request.came
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.came
        with pytest.raises(SystemExit) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
        assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
