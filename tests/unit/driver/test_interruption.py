import os
import signal

import pytest

from verl_rc.driver.interruption import StoppedByAlertError, StopRequest


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


def test_a_run_that_asks_to_end_does_so_after_its_step_whatever_the_scheduler_asks() -> None:
    request = StopRequest()
    request.obey()
    with request.listening():
        request.ask("the reward has collapsed")
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.settle()
    with pytest.raises(StoppedByAlertError, match="the reward has collapsed"):
        request.obey()


def test_a_scheduler_gets_its_exit_code() -> None:
    request = StopRequest()
    request.came = True
    request.obey()  # too late for this step
    assert request.settle()
    with pytest.raises(SystemExit) as raised:
        request.obey()
    assert raised.value.code == 143
