import dataclasses
import io
import json
import math
import re
import types
from pathlib import Path

import make_runs as make
import pytest
from make_results import Truth, as_script_probe, make_out_of_memory, make_probe

from tula_cli import words
from tula_cli.errors import JobFailed, Pending, Problem, SpecError
from tula_cli.models import efficiency
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.efficiency import Noise
from tula_cli.models.time import changes
from tula_cli.models.time.step_model import PARAMETERS, Priors
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import Source
from tula_cli.run.records.failures import Failure, Recovery, Requeue
from tula_cli.run.records.probes import ScriptObservation
from tula_cli.run.records.recommendations import Stage, StageSteps, StartEstimate, TimeParts
from tula_cli.run.records.results import ScalingSummary
from tula_cli.run.records.tasks import JobSize
from tula_cli.services import profile_report, run_list
from tula_cli.services import status as services_status
from tula_cli.services.events import ProbeFinished
from tula_cli.services.largest_batch import LargestBatch
from tula_cli.services.plans import ProfilePlan
from tula_cli.show import live as show_live
from tula_cli.show import profile as show_profile
from tula_cli.show import recommend, tables
from tula_cli.show import status as show_status
from tula_cli.show import train as show_train
from tula_cli.show.screen import Lines, Screen
from tula_cli.spec.sections import EarlyStopping
from tula_cli.words import strip_control_characters

START = make.START


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "tula-runs", make.spec())


def screen(out=None, err=None, **options):
    return Screen(out=out or io.StringIO(), err=err or io.StringIO(), **options)


def printed(parts, *, out=None):
    shown = screen(out)
    shown.print_answer(None, parts)
    return shown.out.getvalue()


# --- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.0, "0"), (1, "1.00"), (12.345, "12.3"), (999.9, "1000"), (123456.7, "123457"), (0.012345, "0.0123"),
        (1e-7, "0.000000100"), (-2.5, "-2.50"), (None, "-"), (math.nan, "-"), (math.inf, "-"), (9.999, "10.00"),
    ],
)  # fmt: skip
def test_numbers_keep_their_digits_and_have_no_exponent(value, text):
    assert words.format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.50 s"), (119, "119 s"), (120, "2.00 min"), (7200, "2.00 h"), (None, "-")]
)
def test_times_name_their_unit(seconds, text):
    assert words.format_duration(seconds) == text


# --- the recommendation


def explained(result):
    return printed(recommend.render_explanation(result, {}))


def spot_rows():
    """Two configurations: on both markets, and on one."""
    here, there = (
        make.prediction(2, 128, hours=1.0, cost=4.0),
        make.prediction(2, 128, hours=1.25, cost=1.0, market="spot"),
    )
    return here, there, make.prediction(1, 64, hours=3.0, cost=5.0, market="spot", pareto=True)


def test_spot_stands_beside_on_demand_and_says_which_is_cheaper():
    here, there, alone = spot_rows()
    result = make.recommendation(choice=here, rows=(here, there, alone), runners_up=(there,), other_market=there)
    text = printed(recommend.render_recommendation(result))
    assert text.splitlines()[1] == "the same on spot: 75.0 min expected, 1.00 USD (75 % cheaper, 25 % longer)"
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith("measured")]
    assert rows[0] == ["*", "2", "128", "60.0", "4.00", "~75.0", "1.00", "measured"]
    assert rows[1] == ["P", "1", "64", "-", "-", "180", "~5.00", "measured"]
    assert max(map(len, text.splitlines()[2:])) <= 80, "so there is no batch/GPU"
    swapped = make.recommendation(choice=there, rows=(here, there), runners_up=(), other_market=here)
    text = printed(recommend.render_recommendation(swapped))
    assert text.startswith("2 nodes on spot, batch 128 (local 64): 75.0 min, 1.00 USD")
    assert "the same on demand: 60.0 min, 4.00 USD (300 % more expensive, 20 % shorter)" in text
    equal = here.model_copy(update={"market": "spot"})
    result = make.recommendation(choice=here, rows=(here, equal), runners_up=(), other_market=equal)
    text = printed(recommend.render_recommendation(result))
    assert "4.00 USD (at the same cost, in the same time)" in text


def test_energy_has_a_column_where_any_row_has_it_and_a_dash_where_it_is_unknown():
    here, there = make.prediction(2, 128, kwh=1.25, type="a"), make.prediction(1, 64, hours=3.0, type="b")
    result = make.recommendation(choice=here, rows=(here, there), runners_up=(), power="300 W a GPU")
    text = printed(recommend.render_recommendation(result))
    assert text.startswith("2 nodes of type a, batch 128 (local 64): 15.0 min, 0.700 USD, 1.25 kWh\n")
    assert "energy: " not in text and "energy: 300 W a GPU" in explained(result)
    assert "P: nothing is both faster and cheaper" in text
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith("measured")]
    assert [row[-2] for row in rows] == ["1.25", "-"]
    both = make.recommendation(choice=here, rows=(here.model_copy(update={"pareto": True}),), runners_up=())
    text = printed(recommend.render_recommendation(both))
    assert "energy" in text and "1.25" in text
    assert "P: nothing is at least equal in time, cost and energy, and better in one of them" in text


def test_without_energy_no_word_is_lost_on_it():
    text = printed(recommend.render_recommendation(make.recommendation()))
    assert "kWh" not in text and "energy" not in text


def test_the_recommendation_marks_the_choice_and_the_runners_up():
    text = printed(recommend.render_recommendation(make.recommendation()))
    assert text.startswith("2 nodes, batch 128 (local 64)")
    rows = [line.split() for line in text.splitlines() if line.endswith((" measured", " predicted"))]
    assert len(rows) == 10
    marked = {row[0]: row[1:4] for row in rows if row[0] in ("*", "3")}
    assert marked["*"] == ["2", "128", "64"]
    assert "knee of the fastest time" in explained(make.recommendation())
    assert "on-demand list price" in text
    assert "median error 2.1 %" not in text, "a detail of the fit"
    assert "median error 2.1 %" in explained(make.recommendation())


def many():
    """A recommendation of 120 configurations more, none of them measured or in the front."""
    result = make.recommendation()
    item = result.rows[-1].model_copy(update={"measured": False, "pareto": False})
    more = [item.model_copy(update={"nodes": 32, "batch": 32 * k, "local_batch": k}) for k in range(1, 121)]
    return result.model_copy(update={"rows": (*result.rows, *more)})


def test_of_many_configurations_those_worth_a_row_are_shown():
    text = printed(recommend.render_recommendation(many()))
    rows = [line.split() for line in text.splitlines() if line.endswith((" measured", " predicted"))]
    marked, front, seen = (
        [row for row in many().rows if test(row)]
        for test in (lambda row: row.batch == 128, lambda row: row.pareto, lambda row: row.measured)
    )
    assert max(len(front), len(seen), len(marked)) <= len(rows) <= 40 and any(row[0] == "*" for row in rows)
    assert f"{len(rows)} of 130 configurations; --all shows the others" in text
    text = printed(recommend.render_recommendation(many(), every=True))
    assert len([line for line in text.splitlines() if line.endswith((" measured", " predicted"))]) == 130
    assert "--all" not in text


def test_headings_have_units():
    text = printed([recommend.make_predictions_table(make.recommendation())])
    heading = " ".join(text.split("─")[0].split())
    for unit in ("(min)", "(USD)", "batch/ time", "batch GPU"):
        assert unit in heading
    details = printed([recommend.make_details_table(make.recommendation())])
    heading = " ".join(details.split("─")[0].split())
    for unit in ("(min)", "(ms)", "(GiB/GPU)", "(%)"):
        assert unit in heading


def with_progress(result):
    noise = Noise(scale=100.0, low=80.0, high=130.0, error=10.0, probes=4)

    def beside(row):
        row = Candidates.from_predictions([row])
        return efficiency.add_same_progress(row, epochs=60, reference=64, noise=noise).make_prediction(0)

    words = efficiency.describe_noise(noise, reference=64, epochs=60)
    rows = tuple(beside(row) for row in result.rows)
    return result.model_copy(update={"rows": rows, "choice": beside(result.choice), "efficiency": words})


def test_the_same_progress_is_distinguished_from_the_epochs_of_the_spec():
    result = with_progress(make.recommendation())
    text = explained(result)
    message = result.choice.same_progress
    (line,) = [line for line in text.splitlines() if line.startswith("to the same progress: ")]
    assert f"{words.format_number(message.epochs)} epochs, {words.format_duration(3600 * message.hours)} (" in line
    assert "spec's epochs" not in text
    assert any(line.startswith("same progress: gradient noise scale 100 samples") for line in text.splitlines())
    assert "same progress" not in explained(make.recommendation())
    assert "same progress" not in printed(recommend.render_recommendation(result))


@pytest.mark.parametrize(("share", "shown"), [(0.034, "includes 3.4 % for updating"), (0.009, ""), (0.0, "")])
def test_refreshing_the_factors_is_reported_where_it_is_more_than_a_hundredth(share: float, shown: str) -> None:
    choice = make.prediction(2, 256, refresh_share=share)
    text = explained(make.recommendation(choice=choice))
    assert shown in text and ("scaling factors of AGS" in text) == bool(shown)


def test_explain_describes_every_parameter_of_the_step_time_model() -> None:
    parameters = {field.name for field in dataclasses.fields(Priors)[:PARAMETERS]}
    assert set(recommend._COEFFICIENT_NAMES) == parameters


def test_accuracy_time_has_a_table_of_its_own():
    result = with_progress(make.recommendation(objective="accuracy-time"))
    text = printed([recommend.render_same_progress(result)])
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()[-5:]]
    marked = [row for row in rows if row[0] == "*"]
    assert [row[1:3] for row in marked] == [["128", "2"]]
    assert [row[0] for row in rows if row[0] != "*"] == ["256", "64", "512", "32"]
    assert text in printed(recommend.render_recommendation(result))


@pytest.mark.parametrize("columns", [20, 80, 140])
def test_no_number_is_cut_at_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    row = make.prediction(16384, 1048576, hours=12345.678, hours_low=12000.0, hours_high=12999.0, cost=9876543.21)
    result = make.recommendation(choice=row, rows=(row,), runners_up=())
    text = printed([recommend.make_predictions_table(result)], out=Terminal())
    for number in ("16384", "1048576", "12346", "9876543", "measured"):
        assert number in text
    details = printed([recommend.make_details_table(result)], out=Terminal())
    for number in ("16384", "1048576", "12346", "12000 .. 12999", "3.00", "25.0"):
        assert number in details
    assert "…" not in text + details


@pytest.mark.parametrize("columns", [20, 80])
def test_a_long_table_keeps_its_lines_at_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [["a run", "x" * 90, "12"], ["b", "y", "3"]]
    text = printed(
        tables.render_long_table(("run", "words", "number"), rows, left=(0, 1), width=columns), out=Terminal()
    )
    head, *below = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert head.split() == ["run", "words", "number"]
    assert below == ["─" * len(head), f"a run {'x' * 90}     12", f"b     {'y':90}      3"]


def test_text_of_a_wide_table_continues_in_its_cell_on_a_terminal_and_stays_in_its_row_elsewhere(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    note = "dropped in round 1: number 3 of 3"

    def wide_table():
        made = tables.make_table(("method", "time", "note"), left=(0, 2))
        made.add_row("lbt-x2", "12.5", note)
        return made

    wrapped = re.sub(r"\x1b\[[0-9;]*m", "", printed([wide_table()], out=Terminal())).splitlines()
    assert max(map(len, wrapped)) <= 30 and len(wrapped) > 3
    assert wrapped[2].startswith("lbt-x2") and all(any(word in line for line in wrapped) for word in note.split())
    assert note in printed([wide_table()]).splitlines()[2]


def test_the_table_fits_80_columns():
    for result in (make.recommendation(), make.recommendation(currency="EUR")):
        assert max(map(len, printed([recommend.make_predictions_table(result)]).splitlines())) <= 80


def test_what_is_not_known_is_a_dash():
    row = make.prediction(1, 32, hours_low=None, hours_high=None, peak_memory=None, headroom=None)
    text = printed([recommend.make_predictions_table(make.recommendation(choice=row, rows=(row,), runners_up=()))])
    assert text.splitlines()[-1].split() == ["*", "1", "32", "32", "30.0", "0.700", "measured"]
    details = printed([recommend.make_details_table(make.recommendation(choice=row, rows=(row,), runners_up=()))])
    assert details.splitlines()[-1].split() == ["*", "1", "32", "30.0", "-", "100", "-", "-"]


# --- colour


@pytest.mark.parametrize(
    ("environment", "options", "terminal", "coloured"),
    [
        ({}, {}, True, True),
        ({}, {}, False, False),
        ({"NO_COLOR": "1"}, {}, True, False),
        ({"TERM": "dumb"}, {}, True, False),
        ({}, {"color": False}, True, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, environment, options, terminal, coloured):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    shown = screen(Terminal() if terminal else io.StringIO(), **options)
    shown.print_answer(None, recommend.render_recommendation(make.recommendation()))
    assert ("\x1b[" in shown.out.getvalue()) == coloured


def test_brackets_in_a_message_are_no_markup():
    shown = screen()
    shown.print_error(JobFailed("[rank0]: [bold]no[/bold] [/]", "see [link]"))
    assert "[rank0]: [bold]no[/bold] [/]" in shown.err.getvalue()


# --- the envelope


def envelope(shown):
    return json.loads(shown.out.getvalue())


def test_the_envelope_of_an_answer():
    shown = screen(as_json=True, command="recommend")
    shown.run_id = "toy-1"
    shown.print_warning("mind")
    shown.print_answer(make.recommendation(), iter(()))
    shown.finish_answer()
    result = envelope(shown)
    assert list(result) == [
        "schema_version", "command", "run_id", "overrides", "status", "data", "warnings", "diagnostics", "error"
    ]  # fmt: skip
    assert (result["schema_version"], result["command"], result["run_id"]) == (1, "recommend", "toy-1")
    assert (result["status"], result["warnings"], result["error"]) == ("done", ["mind"], None)
    assert result["data"]["choice"]["batch"] == 128


HOSTILE = (
    ("\x1b[31mred\x1b[0m", "red"), ("\x1b]0;title\x07a", "a"), ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"), ("a\u202eb", "ab"),
    ("\x9b31mx", "x"), ("a\x00\x08b", "ab"), ("zero\u200bwidth", "zerowidth"), ("a\u2028b", "ab"), ("[bold]x[/bold]", "[bold]x[/bold]"),
    ("\x1bP1;2q\x1b\\x", "x"), ("10%\r20%", "10% 20%"), ("a\tb\nc\r\n", "a\tb\nc\n"), ("\x1bc", ""), ("\u2066x\u2069\ufeff", "x"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "clean"), HOSTILE)
def test_no_text_of_others_steers_the_terminal(text, clean):
    assert strip_control_characters(text) == clean
    shown = screen()
    shown.print_note(text)
    shown.print_warning(text)
    shown.print_line(text, None)
    shown.print_answer({}, [text])
    shown.print_error(SpecError(text, text))
    steering = {"\x1b", "\x07", "\x9b", "\u202e", "\u200b", "\x00"}
    assert not steering & set(shown.out.getvalue() + shown.err.getvalue())
    assert clean.strip() in shown.out.getvalue().replace("        ", "\t")


def test_lines_are_an_array_whose_items_are_made_when_they_are_written():
    made = []

    def items(texts):
        for text in texts:
            made.append(text)
            yield text

    shown = screen(as_json=True)
    shown.print_answer({"rows": Lines(items(['{"a": 1}', "null"])), "none": Lines(items([])), "b": "lines"}, iter(()))
    assert made == []
    shown.finish_answer()
    assert envelope(shown)["data"] == {"rows": [{"a": 1}, None], "none": [], "b": "lines"}
    assert '[\n{"a": 1},\nnull\n]' in shown.out.getvalue()


def test_the_envelope_of_a_failure():
    shown = screen(as_json=True, command="check")
    problems = (Problem("train.epochs", "is required"), Problem("modle", "no such key", "did you mean model?"))
    shown.print_error(SpecError("job.yaml has 2 problems", "see", problems=problems))
    result = envelope(shown)
    assert result["status"] == "failed"
    assert result["error"]["code"] == "spec"
    assert result["error"]["hint"] == "see"
    assert [problem["path"] for problem in result["error"]["problems"]] == ["train.epochs", "modle"]
    assert shown.err.getvalue().splitlines() == [
        "error: job.yaml has 2 problems",
        "  train.epochs: is required",
        "  modle: no such key (did you mean model?)",
        "HINT: see",
    ]


def test_what_still_runs_is_pending():
    shown = screen(as_json=True)
    shown.print_error(Pending("not yet"))
    assert envelope(shown)["status"] == "pending"


def test_numbers_that_json_does_not_know_are_null():
    shown = screen(as_json=True)
    shown.print_answer({"a": math.nan, "b": [math.inf, 1.5]}, ())
    shown.finish_answer()
    assert envelope(shown)["data"] == {"a": None, "b": [None, 1.5]}


def test_the_parts_of_a_json_answer_are_never_made():
    def parts():
        pytest.fail("made")
        yield ""

    shown = screen(as_json=True)
    shown.print_answer({}, parts())
    shown.finish_answer()
    assert envelope(shown)["data"] == {}


# --- beside the answer


def test_quiet_says_only_warnings():
    shown = screen(quiet=True)
    shown.print_note("note")
    shown.print_to_stderr(["aside"])
    shown.print_warning("twice")
    shown.print_warning("twice")
    assert shown.err.getvalue() == "warning: twice\n"
    assert shown.out.getvalue() == ""


def test_verbose_shows_what_an_error_came_from():
    def failed(shown):
        try:
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise JobFailed("outer") from error
        except JobFailed as error:
            shown.print_error(error)
        return shown.err.getvalue()

    assert "KeyError: 'inner'" in failed(screen(verbose=True))
    assert "KeyError" not in failed(screen())


@pytest.mark.parametrize(
    ("typed", "expected"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_only_yes_is_yes(monkeypatch, typed, expected):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert screen().ask_yes_or_no("start?") is expected


# --- status


def snapshot(run, states=None):
    return services_status.read_run_status(run, make.FakeLauncher(states or {}), now=START + 60)


def test_the_status_of_a_run_shows_jobs_training_and_what_failed(run):
    name = make.add_probes(run, 2, (16, 32))
    run.write_attempt(make.attempt(name, end=START + 20, outcome="user", message="KeyError: 'x'\nmore", rank=3))
    train = make.add_training(run, rows=make.metrics())
    run.write_recommendation(make.recommendation())
    text = printed(show_status.render_status(snapshot(run, {train: "running"})))
    assert re.search(r"probe-n002 +failed +2 +0/2", text)
    assert "attempt 1 on n1 rank 3: user: KeyError: 'x'\n" in text
    assert "epoch 1.50 of 4" in text
    assert "loss 1.700" in text
    assert "top-1 61.00 %" in text
    assert "110 ms per step (predicted 100)" in text
    assert "70.0 s left" in text
    assert "warning: a step takes 120 ms" in text
    assert "recommended: 2 nodes, batch 128 (local 64)" in text


def test_an_evaluation_leaves_out_a_top5_that_a_few_classes_always_have():
    fields = {"samples": None, "test": True, "size": 9, "dataset": "d", "weights": "best", "signature": "ab12cd34"}
    for top5, shown in ((100.0, False), (99.0, True)):
        evaluated = types.SimpleNamespace(**fields, metrics={"top1": 91.5, "top5": top5})
        text = printed(show_train.render_evaluation(evaluated))
        assert "top1 91.50 %" in text and ("top5" in text) == shown


def test_the_status_and_the_plan_tell_the_stage_of_a_batch_that_grows(run):
    row = {"kind": "stage", "time": START, "samples": 640, "epoch": 0.5, "batch": 32, "stage": 2, "stages": 4}
    train = make.add_training(run, rows=[*make.metrics(), {**row, "batch": 16, "stage": 1}, {**row, "beta2": 0.998}])
    text = printed(show_status.render_status(snapshot(run, {train: "running"})))
    assert "batch 128 (now 32, stage 2 of 4)" in text and "beta2 0.998" in text
    assert "(predicted" not in text, "that is of steps at batch 128"
    (task,) = run.read_tasks()
    value = task.spec.model_copy(
        update={"train": task.spec.train.model_copy(update={"ramp": "auto", "reference_batch": 32})}
    )
    stage = StageSteps(batch=32, steps=9, step_time=0.05, step_low=None, step_high=None)
    predicted = make.prediction(2, 128).model_copy(update={"stages": (stage,)})
    plan = {
        "source": "as given",
        "resumes": None,
        "finished": False,
        "finished_elsewhere": (),
        "interruption": "",
        "rehearses": False,
        "balance": None,
        "price": "",
    }
    for known, message in (
        (predicted, "The batch grows: 32 (9 steps), then 128. Times"),
        (None, "The batch grows over the"),
    ):
        grown = types.SimpleNamespace(task=task.model_copy(update={"spec": value}), prediction=known, **plan)
        assert message in printed(show_train.render_train_plan(grown))
    decay = value.model_copy(update={"train": value.train.model_copy(update={"ramp": "decay"})})
    stages = (Stage(begin=0, batch=32, epoch=0.0), Stage(begin=640, batch=128, epoch=2.0))
    decaying_task = task.model_copy(update={"spec": decay, "stages": stages})
    decaying = types.SimpleNamespace(task=decaying_task, prediction=predicted, **plan)
    text = printed(show_train.render_train_plan(decaying))
    assert text.count("The batch grows") == 1 and text.count("Times and costs include all stages.") == 1
    assert "instead of a decaying learning rate: batch 32 from epoch 0; batch 128 from epoch 2.00." in text
    reference = value.model_copy(update={"train": value.train.model_copy(update={"reference_batch": 128})})
    constant = types.SimpleNamespace(task=task.model_copy(update={"spec": reference}), prediction=None, **plan)
    assert "The batch grows" not in printed(show_train.render_train_plan(constant))
    early = value.model_copy(
        update={"train": value.train.model_copy(update={"early_stopping": EarlyStopping(patience=2)})}
    )
    ending = types.SimpleNamespace(task=task.model_copy(update={"spec": early}), prediction=predicted, **plan)
    assert "train.early_stopping may end the training earlier" in printed(show_train.render_train_plan(ending))
    stages = tuple(Stage(begin=640 * k, epoch=0.5 * k, batch=32 << k, noise=40.0 * (k + 1)) for k in range(3))
    grown.task = grown.task.model_copy(update={"stages": stages})
    assert "batch 64 from epoch 0.500: noise scale 80.0; batch 128 from epoch 1.00: noise scale 120" in printed(
        show_train.render_train_plan(grown)
    )


def test_a_change_of_the_pace_is_shown_once_in_status_and_below_the_table_at_the_end(run):
    change = make.step_change()
    row = {"kind": "change", "time": START, "samples": 640, "epoch": 0.5, "change": change.model_dump(mode="json")}
    train = make.add_training(run, rows=[*make.metrics(), row])
    message = (
        "samples) a step takes 90.0 ms instead of 60.0 ms (+50 %): the network is slower; computing 50.0 (50.0), synchronisation"
        " 38.0 (8.00), waiting for data 2.00 (2.00); 90.0 s remaining instead of 60.0 s, 0.500 USD more"
    )
    status = printed(show_status.render_status(snapshot(run, {train: "running"})))
    end = printed(show_train.render_summary(make.summary(changes=(change,))))
    assert [" ".join(text.split()).count(message) for text in (status, end)] == [1, 1]
    faster = change.model_copy(update={"before": change.after, "after": change.before, "cost_more": -0.5})
    text = changes.describe_step_change(faster)
    assert "(-33 %): the network is faster" in text and text.endswith("0.500 USD less")


def test_the_status_shows_what_tuning_has_come_to(run):
    make.add_training(run, rows=make.metrics())
    branches = [
        make.branch("lbt"),
        make.branch("x2", top1=61.5),
        make.branch("x4", loss=None, top1=None, diverged=True),
    ]
    run.write_tuning(make.tuning(branches[:2]))
    assert "tuning: arm 3 of 3 (x4)" in printed(show_status.render_status(snapshot(run)))
    run.write_tuning(make.tuning(branches, chosen="x2"))
    text = printed(show_status.render_status(snapshot(run)))
    assert "as tuned: x2" in text
    lines = [line.split() for line in text.splitlines() if re.match(r" *(lbt|x2|x4) ", line)]
    assert lines == [
        ["x2", "1.00", "1.500", "61.50", "chosen"],
        ["lbt", "1.00", "1.500", "50.00"],
        ["x4", "1.00", "-", "-", "diverged"],
    ]


def test_the_summary_names_the_winner_and_what_it_took():
    result = make.tuning([make.branch("lbt"), make.branch("x2", top1=61.5)], chosen="x2")
    text = printed(show_train.render_summary(make.summary(tuning=result)))
    assert "tuned: x2, 1280 samples in 2 branches in addition to the training" in text
    assert re.search(r"x2 .*61\.50 .*chosen", text)


def test_the_status_tells_the_story_of_attempts(run):
    name = make.add_training(run)
    task = run.read_task(f"{name}-1")
    cause = "time limit of job 7 reached"
    run.write_task(
        task.model_copy(
            update={
                "id": f"{name}-2",
                "attempt": 2,
                "recovery": Recovery(failure=Failure(outcome="time_limit", message=cause), decision=Requeue()),
            }
        )
    )
    fields = {"outcome": "time_limit", "message": cause, "samples": 0, "allocation": "7.0", "hosts": "n[1-2]"}
    run.write_attempt(make.attempt(f"{name}-1", end=START + 30, **fields))
    run.write_attempt(make.attempt(f"{name}-2", start=START + 35, samples=640, allocation="8.0", hosts="n[3-4]"))
    text = printed(show_status.render_status(snapshot(run, {name: "running"})))
    assert re.search(rf"{name}-1 +1 +11-14 [\d:]+ +30\.0 +7\.0 +n\[1-2\] +128 +0 +time_limit", text)
    assert re.search(rf"{name}-2 +1 +11-14 [\d:]+ +25\.0 +8\.0 +n\[3-4\] +128 +640 +running", text)
    assert f"{name}-2 continues after: {cause}\n" in text
    assert re.search(rf"{name}-2 .* 640 +lost", printed(show_status.render_status(snapshot(run))))


def test_an_error_of_several_attempts_is_shown_once(run):
    name = make.add_probes(run, 1, (16,))
    for number in (1, 2):
        run.write_attempt(make.attempt(name, number=number, end=START + 20, outcome="user", message="no such column"))
    text = printed(show_status.render_status(snapshot(run)))
    assert text.count("no such column") == 1 and f"{name} attempt 2 on n1: user: no such column" in text


def test_a_top5_accuracy_of_all_samples_is_left_out():
    metrics = {"top1": 91.0, "top5": 100.0}
    assert tables.describe_metrics(metrics) == "top1 91.00"
    assert tables.describe_metrics({**metrics, "top5": 99.0}) == "top1 91.00, top5 99.00"


def test_attempts_on_this_machine_have_no_allocation(run):
    name = make.add_probes(run, 2, (16,))
    run.write_attempt(make.attempt(name, end=START + 20))
    text = printed(show_status.render_status(snapshot(run)))
    assert "allocation" not in text
    assert re.search(rf"{name} +1 +11-14 [\d:]+ +20\.0 +2 +done", text)


def test_a_queued_job_shows_its_reason_and_expected_start(run):
    name = make.add_probes(run, 2, (16,))
    launcher = make.FakeLauncher({name: "pending"}, reason="Resources", starts_at=START + 600)
    now = services_status.read_run_status(run, launcher, now=START)
    expected = f"{name} queued: Resources, expected to start {words.format_local_time(START + 600)}"
    assert expected in printed(show_status.render_status(now))
    shown = screen()
    with show_live.open_live_display(shown) as live:
        live.update_status(now)
    assert f"expected to start {words.format_local_time(START + 600)}" in shown.err.getvalue()


@pytest.mark.parametrize(
    ("wait", "reason", "shown"),
    [
        (1800.0, "", f"start: in {words.format_duration(1800)} by the scheduler's estimate at {words.format_local_time(START)} (sbatch --test-only, 2 nodes"),
        (None, "no such partition", "start: the scheduler gives no estimate (sbatch --test-only, 2 nodes, 60 min: no such partition)"),
    ],
)  # fmt: skip
def test_the_schedulers_estimate_of_the_start_is_labelled_as_such(wait, reason, shown):
    estimate = StartEstimate(nodes=2, minutes=60, asked_at=START, wait=wait, reason=reason)
    answer = printed(recommend.render_recommendation(make.recommendation(start_estimate=estimate)))
    assert shown in answer
    assert "start:" not in printed(recommend.render_recommendation(make.recommendation()))


def test_a_training_plan_tells_of_its_chain(run):
    make.add_training(run)
    plan = types.SimpleNamespace(
        task=run.read_tasks()[0],
        prediction=None,
        source="as given",
        resumes=None,
        finished_elsewhere=(),
        finished=False,
        interruption="",
        rehearses=False,
        balance=None,
    )
    text = printed(show_train.render_train_plan(plan, chain_nodes=(2, 2, 2), scripts=["#!/bin/bash"]))
    assert "a chain of 3 jobs" in text
    assert text.rstrip().endswith("#!/bin/bash")
    assert "chain" not in printed(show_train.render_train_plan(plan)) and "resume" not in text


@pytest.mark.parametrize(
    ("length", "planned", "now"),
    [
        ({"epochs": 9}, "9 epochs of finetune.py, method lbt", "epoch 1.50 of 9, 1920 samples"),
        ({"steps": 10}, "10 steps at batch 256 of finetune.py, method lbt", "batch 128, 1920 of 2560 samples"),
    ],
)
def test_a_script_is_shown_by_its_name_and_as_long_as_it_is(tmp_path, length, planned, now):
    value = RunDir.create(tmp_path, make.script_spec(**length))
    make.add_training(value, rows=make.metrics())
    plan = types.SimpleNamespace(
        task=value.read_tasks()[0], prediction=None, source="as given", resumes=None, finished=False, finished_elsewhere=(),
        interruption="saves each epoch",
        rehearses=True,
        balance=None,
    )  # fmt: skip
    text = printed(show_train.render_train_plan(plan))
    assert planned in text and "checkpoints: saves each epoch\n" in text
    assert "a test of at most 20 min on 1 node checks that the script can resume (--no-rehearse" in text
    sizes = tuple(JobSize(nodes=nodes, micro_batch=8, splits=1, ladder=plan.task.ladder) for nodes in (1, 2))
    plan.task = plan.task.model_copy(update={"sizes": sizes})
    text = printed(show_train.render_train_plan(plan))
    assert "a test of at most 20 min on 2 nodes checks that the script can resume, also on other nodes\n" in text
    assert now in show_status.describe_training(snapshot(value).training)
    assert re.search(
        r"finetune\.py +- +0",
        printed(show_status.render_runs(run_list.list_runs(tmp_path), width=120)),
    )


def test_the_plan_of_a_finished_training_says_so_and_promises_nothing(run):
    make.add_training(run)
    plan = types.SimpleNamespace(
        task=run.read_tasks()[0], prediction=make.prediction(2, 128), source="as given", resumes=128, finished=True
    )
    text = printed(show_train.render_train_plan(plan, chain_nodes=(2, 2, 2), scripts=["#!/bin/bash"]))
    assert "already finished" in text
    assert not [word for word in ("resumes from", "node-h", "chain", "#!/bin/bash") if word in text]


def test_a_running_probe_names_both_batches(run):
    name = make.add_probes(run, 2, (16, 32))
    text = printed([show_status.make_jobs_table(snapshot(run, {name: "running"}).jobs)])
    assert re.search(r"probe-n002 +running +2 +0/2 +32 \(16\) ", text)


def test_the_schedulers_id_is_shown_where_there_is_a_scheduler(run):
    name = make.add_probes(run, 2, (16,))
    assert "4711" not in printed([show_status.make_jobs_table(snapshot(run).jobs)])
    run.write_job(make.scheduler_job(name, nodes=2, scheduler="slurm"))
    assert "4711" in printed([show_status.make_jobs_table(snapshot(run).jobs)])


def test_the_list_of_runs(run):
    make.add_measured(run, 1, 32)
    damaged = RunDir.create(run.path.parent, make.spec(name="other"))
    (damaged.path / "spec.yaml").write_text("[")
    runs = run_list.list_runs(run.path.parent)
    text = printed(show_status.render_runs(runs, width=120))
    assert re.search(rf"{run.id} +2023-11-14 +resnet18 +digits +1", text)
    assert f"{damaged.id} cannot be read" in text
    narrow = printed(show_status.render_runs(runs, width=70)).splitlines()
    assert "resnet18" not in narrow[3] and max(map(len, narrow[:4])) <= 70


def test_the_best_top_1_of_a_script_has_no_unit() -> None:
    """A script may print a fraction or a percentage."""
    script, loop = (
        run_list.RunSummary(id=name, path=Path(name), changed=1.0, script=name * is_script, best_top1=95.0)
        for name, is_script in (("train.py", True), ("loop", False))
    )
    lines = printed(show_status.render_runs([script, loop], width=120)).splitlines()
    assert lines[-2].endswith("top-1 95.00") and lines[-1].endswith("top-1 95.00 %")


# --- live


def test_one_line_a_change_where_nothing_can_be_drawn(run):
    name = make.add_probes(run, 2, (16, 32))
    shown = screen()
    with show_live.open_live_display(shown) as live:
        for _ in range(3):
            live.update_status(snapshot(run, {name: "running"}))
        make.add_measured(run, 2, 16)
        live.add_probe(ProbeFinished(run.read_results()[0], 1, 2, 30.0))
        for _ in range(3):
            live.update_status(snapshot(run, {name: "running"}))
    lines = shown.err.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "probe-n002: running, 0 of 2 probes done"
    assert lines[1].startswith("[1/2] 2 nodes, batch 32 (local 16): ") and lines[1].endswith("about 30.0 s left")
    assert "\x1b" not in shown.err.getvalue()


def test_a_training_run_says_a_line_an_epoch_and_a_warning_once(run):
    rows = make.metrics()
    shown = screen()
    with show_live.open_live_display(shown) as live:
        for count in range(1, len(rows) + 1):
            train = make.add_training(run, rows=rows[:count])
            live.update_status(snapshot(run, {train: "running"}))
    lines = shown.err.getvalue().splitlines()
    assert sum(line.startswith("training ab12cd34") for line in lines) == 2
    assert sum(line.startswith("warning: a step takes") for line in lines) == 1
    assert shown.warnings == ["a step takes 120 ms, predicted 90 to 110"]


def test_draws_in_place_on_a_terminal(run):
    name = make.add_probes(run, 2, (16, 32))
    shown = screen(err=Terminal())
    with show_live.open_live_display(shown) as live:
        live.update_status(snapshot(run, {name: "running"}))
    assert "\x1b[" in shown.err.getvalue()
    assert "probe-n002" in shown.err.getvalue()
    assert "…" not in shown.err.getvalue()
    assert shown.out.getvalue() == ""


def test_a_bar_shows_progress_rate_and_remaining_time_and_results_stay_above_it(run):
    name = make.add_probes(run, 2, (16, 32))
    run.write_attempt(make.attempt(name))
    make.add_measured(run, 2, 16, at=START + 30)
    shown = screen(err=Terminal())
    now = services_status.read_run_status(run, make.FakeLauncher({name: "running"}), now=START + 40)
    with show_live.open_live_display(shown) as live:
        live.add_probe(ProbeFinished(run.read_results()[0], 1, 2, None))
        live.update_status(now)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.err.getvalue())
    assert text.index("[1/2] 2 nodes, batch 32") < text.index("probe-n002 \u2501")
    assert "running, 1 of 2 probes, 1.5 per minute" in text and "30.0 s left" in text
    assert "probe-n002 measures 2 nodes, batch 64" in text


def test_a_dumb_terminal_is_not_drawn_on(run, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    name = make.add_probes(run, 2, (16, 32))
    shown = screen(err=Terminal())
    with show_live.open_live_display(shown) as live:
        live.update_status(snapshot(run, {name: "running"}))
    assert "\x1b" not in shown.err.getvalue()


def test_quiet_waiting_says_nothing(run):
    name = make.add_probes(run, 2, (16, 32))
    shown = screen(quiet=True)
    with show_live.open_live_display(shown) as live:
        live.update_status(snapshot(run, {name: "running"}))
    assert shown.err.getvalue() == ""


# --- the other answers


def test_the_summary_compares_predicted_with_actual():
    text = printed(show_train.render_summary(make.summary()))
    assert "trained on 2 nodes at batch 64 (started with 128), best top-1 83.00 % at epoch 3" in text
    assert re.search(r"step time \(ms\) +100 +105 +-4.8", text)
    assert re.search(r"time \(min\) +4.80 +6.00 +-20.0", text)
    assert re.search(r"cost \(USD\) +0.160 +0.200 +-20.0", text)
    assert "2 attempts; relaunched because of: out of memory at batch 128" in text
    resumed = make.summary(recoveries=())
    assert "2 attempts; resumed after tula cancel or a killed job" in printed(show_train.render_summary(resumed))


def test_the_summary_names_no_step_time_where_none_was_timed():
    assert re.search(
        r"step time \(ms\) +100 +- +- *\n", printed(show_train.render_summary(make.summary(actual_step=None)))
    )


def test_what_gradient_scaling_did_is_reported_by_status_and_summary(run):
    did = ScalingSummary(steps=300, scaled=0.997, mean=1.3456, apply_to="update")
    text = printed(show_train.render_summary(make.summary(scaled=did)))
    assert "gradient scaling (of each update): factor 1.35 in 99.7 % of the steps" in text
    assert "gradient scaling" not in printed(show_train.render_summary(make.summary()))
    rows = make.metrics()
    make.add_training(run, rows=[*rows, {**rows[-1], "ags": {"mean": 1.21, "scaled": 0.5}}])
    assert "AGS factor 1.21 in 50.0 % of the steps" in show_status.describe_training(snapshot(run).training)


def test_the_summary_tells_the_energy_that_was_counted_and_of_how_much_of_the_time():
    text = printed(show_train.render_summary(make.summary(predicted_kwh=1.1, actual_kwh=1.0, counted=0.98)))
    assert re.search(r"energy \(kWh\) +1.10 +1.00 +\+10.0", text) and "counted over" not in text
    text = printed(show_train.render_summary(make.summary(predicted_kwh=1.1, actual_kwh=0.4, counted=0.5)))
    assert re.search(r"energy \(kWh\) +1.10 +0.400 +-\n", text) and "was measured during 50.0 % of the time" in text
    text = printed(show_train.render_summary(make.summary(predicted_kwh=1.1)))
    assert re.search(r"energy \(kWh\) +1.10 +- +-\n", text) and "counted over" not in text
    assert "energy" not in printed(show_train.render_summary(make.summary()))


def test_a_training_without_classes_is_best_where_its_loss_is_least():
    text = printed(show_train.render_summary(make.summary(metrics={"loss": 0.9}, best_top1=0.0)))
    assert "(started with 128), lowest loss at epoch 3" in text


def test_a_summary_tells_where_the_time_went():
    predicted = TimeParts(steps=200, data=None, evaluation=60, checkpoints=0, branches=0, rest=28)
    actual = TimeParts(steps=240, data=12, evaluation=60, checkpoints=6, branches=0, rest=54)
    summary = make.summary(predicted_parts=predicted, actual_parts=actual, attempts=1)
    text = printed(show_train.render_summary(summary))
    assert re.search(r"  steps +3.33 +4.00 +-16.7\n +waiting for data +- +0.200 +-\n", text)
    assert re.search(
        r"  evaluation +1.00 +1.00 +\+0.0\n +checkpoints +0 +0.100 +-100.0\n  starting, stopping +0.467", text
    )
    assert "branches" not in text
    script_text = printed(show_train.render_summary(summary.model_copy(update={"lost": ()})))
    assert re.search(r"  evaluation, saving, new epochs +1.00 +1.00 ", script_text)
    where = Path.cwd() / "tula-runs/digits-1/train/ab12cd34/best"
    output = printed(show_train.render_summary(summary, script_output=where.with_name("out")))
    assert output.endswith("\nfiles of the script: tula-runs/digits-1/train/ab12cd34/out\n")
    assert printed(show_train.render_summary(summary, weights=where)).endswith(
        "\nbest weights: tula-runs/digits-1/train/ab12cd34/best\n"
    )
    assert "starting, stopping, repeated steps" in printed(
        show_train.render_summary(summary.model_copy(update={"attempts": 2}))
    )
    assert "steps" not in printed(show_train.render_summary(make.summary(predicted_parts=predicted)))


def test_a_summary_without_a_prediction():
    text = printed(
        show_train.render_summary(make.summary(predicted_hours=None, predicted_cost=None, predicted_step=None))
    )
    assert re.search(r"time \(min\) +- +6.00 +-\n", text)


def test_the_measurements_name_what_did_not_fit_and_what_failed(run):
    make.add_failed(run, 2, 32, "KeyError: 'x'\nTraceback")
    probes = (make_probe(Truth(), 1, 32), make_probe(Truth(), 2, 16, oversubscribed=True))
    report = profile_report.ProfileReport(
        measured=probes,
        out_of_memory=(make_out_of_memory(1, 64), make_out_of_memory(1, 128, assumed=True)),
        failed=tuple(run.read_results()),
        missing=("probe-n002-l000064",),
    )
    text = printed(show_profile.render_profile_report(report))
    rows = [line.split() for line in text.splitlines() if re.match(r" *\d", line)]
    assert [row[:3] for row in rows] == [["1", "32", "32"], ["1", "64", "64"], ["1", "128", "128"], ["2", "32", "16"], ["2", "64", "32"]]  # fmt: skip
    assert [row[-1] for row in rows] == ["measured", "memory", "(assumed)", "oversubscribed", "failed"]
    assert rows[0][3] == "36.0", "20 ms and 32 times 0.5 ms"
    assert "probe-n002-l000032 failed (user): KeyError: 'x'\n" in text
    assert "missing: probe-n002-l000064" in text


def test_a_probe_of_a_script_has_dashes_for_what_it_does_not_tell():
    probe = as_script_probe(make_probe(Truth(), 2, 16))
    report = profile_report.ProfileReport(measured=(probe,), out_of_memory=(), failed=(), missing=())
    (row,) = [
        line.split()
        for line in printed(show_profile.render_profile_report(report)).splitlines()
        if re.match(" *2 ", line)
    ]
    assert row == ["2", "32", "16", "43.0", "-", "-", "744", "432", "measured"]


def test_what_probes_of_a_script_do_not_tell_is_reported_once(run):
    seen = ScriptObservation(
        optimizer="SGD", parameters=9, lr=None, lr_given=None, notes=("no synchronisation: no DDP",)
    )
    for nodes, local in ((1, 16), (1, 32), (2, 16)):
        run.write_result(as_script_probe(make_probe(Truth(), nodes, local), script=seen if nodes == 1 else None))
    now = snapshot(run)
    assert now.notes == ("no synchronisation: no DDP (2 of 2 probes)",)
    assert printed(show_status.render_status(now)).count("note: no synchronisation: no DDP (2 of 2 probes)\n") == 1
    report = profile_report.make_profile_report(run, dataclasses.replace(make_profile_plan(run), tasks=()))
    assert "note: no synchronisation: no DDP (2 of 2 probes)\n" in printed(show_profile.render_profile_report(report))


def test_samples_that_were_trained_again_are_reported():
    text = printed(show_train.render_summary(make.summary(lost=(480, 0, 960))))
    assert "3 interruptions; 1440 samples were trained twice (480, 0, 960)" in text
    assert "1 interruption; no sample was trained twice" in printed(show_train.render_summary(make.summary(lost=(0,))))
    assert "trained twice" not in printed(show_train.render_summary(make.summary(lost=())))


def make_profile_plan(run):
    return ProfilePlan(
        tasks=tuple(run.read_tasks()), total=6, done=4, minutes_at_most=20, node_hours_at_most=0.667, price_at_most=1.5,
        currency="EUR", price="2.25 EUR per node-hour", code=Source(Path("/"), ""),
    )  # fmt: skip


def test_a_plan_tells_what_it_may_cost_at_most(run):
    make.add_probes(run, 2, (16, 32))
    plan = make_profile_plan(run)
    text = printed(show_profile.render_plan(plan, scripts=["torchrun it"]))
    assert re.search(r"probe-n002 +2 +2 +32 64 +16 32", text)
    assert "2 probes in 1 job, 4 of 6 done already" in text
    assert "at most 20.0 min with one job at a time, 0.667 node-h, 1.50 EUR" in text
    assert text.rstrip().endswith("torchrun it")
    nothing = dataclasses.replace(plan, tasks=())
    assert "all 6 probes already have results" in printed(show_profile.render_plan(nothing))


@pytest.mark.parametrize("cap", [4.0, None])
def test_the_plan_of_a_round_names_the_limit_of_all_rounds_if_there_is_one(tmp_path: Path, cap: float | None) -> None:
    run = RunDir.create(tmp_path, make.spec(search={"nodes": [2], "max_node_hours": cap}))
    make.add_probes(run, 2, (16, 32))
    plan = dataclasses.replace(
        make_profile_plan(run), reasons=("batch 32 on 2 nodes: may be the knee",), in_rounds=True
    )
    text = printed(show_profile.render_plan(plan))
    assert "Whether further rounds follow depends on the results" in text
    assert ("all stay within search.max_node_hours" in text) == (cap is not None)


def test_a_language_model_is_reported_by_loss_and_perplexity_and_tokens_a_second(run):
    metrics = {"eval_loss": 1.6, "perplexity": 4.953}
    summary = make.summary(metrics=metrics, best_top1=None, best_loss=1.5)
    text = printed(show_train.render_summary(summary))
    assert "lowest loss 1.500 (perplexity 4.482) at epoch 3" in text and "perplexity 4.953" in text
    rows = [{**row, "top1": None, "top5": None, "perplexity": 4.953} for row in make.metrics()]
    rows = [{**row, "tokens_per_second": 81920.0, "padding": 0.125} if row["kind"] == "step" else row for row in rows]
    make.add_training(run, rows=rows)
    line = show_status.describe_training(snapshot(run).training)
    assert "perplexity 4.953" in line and "81920 tokens/s (12.5 % padding not counted)" in line and "top-1" not in line


@pytest.mark.parametrize(("fitting", "words"), [(12, "batches up to 12 per GPU leave"), (0, "no batch leaves")])
def test_a_largest_batch_names_those_that_leave_the_margin_free(fitting: int, words: str) -> None:
    largest = LargestBatch(
        nodes=1, gpus_per_node=1, batch=16, local_batch=16, too_large=17, limit=64, capacity=10**9, headroom=0.02,
        margin=0.1, local_batch_with_margin=fitting, finished=True, measured=(), out_of_memory=(), failed=(),
    )  # fmt: skip
    lines = [line for line in show_profile.render_report(largest) if isinstance(line, str)]
    assert f"{words} 10 % of the memory free, as tula recommend requires" in lines
