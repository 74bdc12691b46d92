import os
from types import SimpleNamespace

from pp_recipe.launch import _moment, _refusal, _report


def test_a_rank_that_raised_is_told_by_its_traceback(tmp_path):
    recorded = {"message": {"message": "x", "extraInfo": {"py_callstack": "Traceback\nBoom\n"}}}
    assert (
        _report(1, 1, recorded, tmp_path)
        == "rank 1 failed, and the run was ended:\nTraceback\nBoom"
    )


def test_a_killed_rank_is_told_by_its_signal(tmp_path):
    report = _report(0, -9, {"message": "<NONE>"}, tmp_path)
    assert (
        report == "rank 0 was killed by SIGKILL (often: too little memory), and the run was ended."
    )


def test_the_last_words_of_a_quiet_rank_are_told(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stderr.log").write_text("first\nlast\n")
    report = _report(1, 3, {"message": "<NONE>"}, tmp_path)
    assert report == "rank 1 exited with code 3, and the run was ended:\nfirst\nlast"


def test_a_refusal_of_the_options_is_told_without_a_traceback():
    recorded = {"message": {"message": "OptionsError: no: never", "extraInfo": {}}}
    assert _refusal(recorded) == "no: never"
    assert _refusal({"message": {"message": "ValueError: no", "extraInfo": {}}}) is None
    assert _refusal({"message": "<NONE>"}) is None


def test_the_first_to_fail_is_the_cause(tmp_path):
    def failure(exitcode, written_at=None):
        file = tmp_path / f"{exitcode}-{written_at}.json"
        if written_at is not None:
            file.write_text("{}")
            os.utime(file, (written_at, written_at))
        return SimpleNamespace(exitcode=exitcode, error_file=str(file))

    killed, raised, lost_its_peer, ended = (
        failure(-9), failure(1, 1000.1), failure(1, 1000.2), failure(-15),
    )  # fmt: skip
    failures = [ended, lost_its_peer, raised, killed]
    assert sorted(failures, key=_moment) == [killed, raised, lost_its_peer, ended]
