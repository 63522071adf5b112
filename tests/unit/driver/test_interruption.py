import os
import signal

import pytest

from verl_rc.driver.services import StoppedByAlertError, StopRequest


def test_the_first_sigterm_is_noted_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest()
    with request.listening():
        assert not request.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested
        with pytest.raises(SystemExit) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
        assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_asks_to_end_does_so_after_its_step_whatever_the_scheduler_asks() -> None:
    request = StopRequest()
    request.end_if_decided()
    with request.listening():
        request.request("the reward has collapsed")
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.decide()
    with pytest.raises(StoppedByAlertError, match="the reward has collapsed"):
        request.end_if_decided()


def test_a_scheduler_gets_its_exit_code() -> None:
    request = StopRequest()
    request.requested = True
    request.end_if_decided()  # too late for this step
    assert request.decide()
    with pytest.raises(SystemExit) as raised:
        request.end_if_decided()
    assert raised.value.code == 143
