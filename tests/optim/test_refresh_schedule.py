"""When factors are refreshed: what a resume takes over, and what a new start of the count forgets."""

from tula_cli.optim.ags import RefreshSchedule


def test_a_count_goes_on_where_it_was_saved() -> None:
    saved = RefreshSchedule.from_settings(5, None)
    for _ in range(3):
        saved.count_step(refreshed=False)
    saved.request_refresh()
    other = RefreshSchedule.from_settings(5, None)
    other.load_state_dict(saved.state_dict())
    assert other == saved and (other.taken, other.owed) == (3, True)


def test_a_count_of_another_interval_begins_anew() -> None:
    saved = RefreshSchedule.from_settings(50, None)
    for _ in range(30):
        saved.count_step(refreshed=False)
    other = RefreshSchedule.from_settings(5, None)
    other.count_step(refreshed=False)
    other.load_state_dict(saved.state_dict())
    assert (other.steps, other.taken) == (5, 0), "a place in 50 steps is none in 5"
    for _ in range(4):
        assert not other.is_due
        other.count_step(refreshed=False)
    assert other.is_due


def test_what_was_owed_is_forgotten_with_the_place() -> None:
    schedule = RefreshSchedule.from_settings(5, None)
    schedule.count_step(refreshed=True)
    schedule.request_refresh()
    schedule.restart()
    assert (schedule.taken, schedule.refreshed, schedule.owed) == (0, False, False)
    assert not schedule.is_due
