"""Measured behaviour of a script is compared with its claims."""

import pytest
from make_results import Truth, make_probe

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.models import messages
from tula_cli.models.claims import (
    STREAM_SAMPLER_NAME,
    ObservedRate,
    count_epoch_samples,
    describe_unmet_expectations,
    detect_batch_change,
    find_dataset_size,
    fit_lr_exponent,
    join_steps,
    list_mismatches,
    list_probe_differences,
    select_undisturbed_steps,
    warn_inconsistent_probes,
    warn_script_scales_lr,
)
from tula_cli.run.records.probes import ScriptObservation
from tula_cli.run.records.scripts import ExpectedValues, LearningRates, LoaderProperties, RankResult, ScriptStep


def step(seconds: float = 0.1, **more: object) -> ScriptStep:
    seen = {"wait": 0.01, "samples": 16.0, "batches": 2, "backwards": 2, "gap": ()} | more
    return ScriptStep.model_validate({"seconds": seconds} | seen)


def result(rank: int = 0, **more: object) -> RankResult:
    loader = LoaderProperties(dataset=330, batches=20, batch_size=8, workers=0, sampler="", drop_last=True)
    seen = RankResult(
        version=1, task="t", attempt=1, why="stopped", rank=rank, world=2, host="h", pid=1, python="3.8.1", torch="2.0.1",
        expected=ExpectedValues(world=2, batch=32, accumulate=2), device="cpu", hardware="", startup=1.0, steps=5, samples=80.0,
        optimizer="torch.optim.sgd.SGD", parameters=10, bytes=None, peak={}, warmup=(), timed=(step(),) * 5, split=None,
        lr=LearningRates(base=None, first=0.1, timed=0.1, last=0.1), loader=loader, loaders=(loader,), notes=(),
    )  # fmt: skip
    return seen.model_copy(update=more)


def ranks(**more: object) -> list[RankResult]:
    return [result(0, **more), result(1, **more)]


def figures(outcome: list[Diagnostic]) -> list[tuple[str, object, object]]:
    return [(m.code, m.values["expected"], m.values["observed"]) for m in outcome]


def loader(**more: object) -> LoaderProperties:
    seen = result().loader
    assert seen is not None
    return seen.model_copy(update=more)


@pytest.mark.parametrize(
    ("counts", "samples"), [((160, 170), 330), ((), None), ((160,), None), ((160, None), None), ((None, None), None)]
)
def test_samples_of_an_epoch_are_known_if_each_rank_reported_them(
    counts: tuple[int | None, ...], samples: int | None
) -> None:
    seen = [result(rank, loader=loader(epoch_samples=count)) for rank, count in enumerate(counts)]
    assert count_epoch_samples(seen) == samples
    assert count_epoch_samples([*seen[:1], result(1, loader=None)]) is None


def test_claims_that_hold_are_not_told() -> None:
    assert list_mismatches(ranks()) == []


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"world": 1}, ("rank-count-differs", 2, 1)),
        ({"timed": (step(samples=8.0),) * 5}, ("batch-differs", 32, 16)),
        ({"timed": (step(batches=1, backwards=1),) * 5, "loader": loader(batches=10)}, ("micro-batches-differ", 2, 1)),
        ({"timed": (step(batches=None, backwards=4),) * 5}, ("micro-batches-differ", 2, 4)),
        ({"loader": loader(batches=41)}, ("epoch-steps-differ", 11, 21)),  # each rank reads the whole dataset
    ],
)
def test_a_claim_that_does_not_hold_is_reported_with_both_figures(
    more: dict[str, object], found: tuple[str, int, int]
) -> None:
    assert figures(list_mismatches(ranks(**more))) == [found]


def test_a_training_is_held_against_the_same_claims_once_all_its_ranks_have_told() -> None:
    smaller = ranks(timed=(step(samples=8.0),) * 5, why="begun")
    answer = describe_unmet_expectations(smaller, resumed=False)
    assert answer == list_mismatches(smaller)[0].text
    assert describe_unmet_expectations(smaller[:1], resumed=False) == "", "the other rank comes"
    assert describe_unmet_expectations(ranks(), resumed=False) == "" == describe_unmet_expectations([], resumed=False)


def test_ranks_that_train_alone_are_reported_by_the_first_that_tells() -> None:
    alone = result(0, world=1, timed=(step(),) * 5)
    assert (
        describe_unmet_expectations([alone], resumed=True) == messages.rank_count_differs(expected=2, observed=1).text
    )
    assert describe_unmet_expectations([result(0, world=1, timed=())], resumed=True), "a training of a few steps"


def test_what_is_left_of_an_epoch_or_of_a_training_breaks_no_claim() -> None:
    remaining = ranks(loader=loader(batches=41))
    assert describe_unmet_expectations(remaining, resumed=False) and not describe_unmet_expectations(
        remaining, resumed=True
    )
    assert not describe_unmet_expectations(ranks(timed=(step(samples=2.0),) * 2), resumed=True), (
        "its last, smaller batches"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"expected": ExpectedValues()},
        {"timed": (step(samples=None, batches=None),) * 5, "loader": None},
        {"loader": loader(dataset=None)},
        {"loader": loader(batches=None)},
        {"loader": loader(batches=22, drop_last=False)},
        {"timed": ()},
        {"timed": (step(batches=1),) * 5, "loader": loader(batches=10)},  # the script cuts each batch into two
        {"timed": (step(backwards=6),) * 5},  # three losses
        {"timed": (step(batches=None, backwards=0),) * 5},  # an engine that is not torch's
    ],
)
def test_what_was_not_seen_or_is_done_otherwise_is_no_mismatch(more: dict[str, object]) -> None:
    assert list_mismatches(ranks(**more)) == []


def test_a_step_is_disturbed_where_any_rank_did_something_else() -> None:
    first = (step(0.1), step(0.9, gap=("eval",)), step(0.1), step(0.2), step(0.2))
    second = (step(0.2), step(0.1), step(0.3, gap=("save",), samples=None), step(0.1), step(0.1))
    joint = join_steps([result(0, timed=first), result(1, timed=second)])
    assert [(s.seconds, s.causes) for s in joint] == [
        (0.2, ()),
        (0.9, ("eval",)),
        (0.3, ("save",)),
        (0.2, ()),
        (0.2, ()),
    ]
    assert [s.samples for s in joint] == [32, 32, None, 32, 32]
    assert [s.seconds for s in select_undisturbed_steps([result(0, timed=first), result(1, timed=second)])] == [
        0.2,
        0.2,
        0.2,
    ]


def test_a_cause_of_most_steps_is_how_the_script_steps() -> None:
    steps = (*(step(gap=("eval",)),) * 4, step(gap=("eval", "save")))
    assert [s.causes for s in join_steps([result(timed=steps)])] == [(), (), (), (), ("save",)]


def test_no_clean_step_is_an_error() -> None:
    steps = (step(gap=("eval",)), step(gap=("save",)))
    with pytest.raises(BadMeasurements, match="all 2 timed steps"):
        select_undisturbed_steps([result(timed=steps)])


def test_probes_of_two_trainings_are_reported_apart() -> None:
    assert list_probe_differences([result(), result(), result()]) == []
    differences = list_probe_differences(
        [result(), result(), result(parameters=12, optimizer="torch.optim.adamw.AdamW")]
    )
    assert differences == [
        messages.probes_differ(aspect="parameters", first="10", other="12"),
        messages.probes_differ(aspect="optimizer", first="torch.optim.sgd.SGD", other="torch.optim.adamw.AdamW"),
    ]


@pytest.mark.parametrize(
    ("given", "seen", "exponent"),
    [
        ((None, None, None), (0.1, 0.1, 0.1), 0.0),
        ((None, None, None), (0.1, 0.2, 0.4), 1.0),
        ((0.1, 0.2, 0.4), (0.1, 0.2, 0.4), 0.0),  # tula scales it
        ((0.1, 0.2, 0.4), (0.1, 0.4, 1.6), 1.0),  # both do
        ((0.3, 0.3, 0.3), (0.1, 0.1 * 2**0.5, 0.2), 0.5),
        ((0.3, 0.3, 0.3), (0.6, 0.6, 0.6), 0.0),  # a warm-up, at the same place in all probes
    ],
)
def test_the_power_of_the_batch_by_which_a_script_scales(
    given: tuple[float | None, ...], seen: tuple[float, ...], exponent: float
) -> None:
    rates = [
        ObservedRate(batch, *rate) for batch, rate in zip((64, 128, 256), zip(given, seen, strict=True), strict=True)
    ]
    assert fit_lr_exponent(rates) == pytest.approx(exponent, abs=1e-9)
    warnings = warn_script_scales_lr(rates)
    assert [warning.values["exponent"] for warning in warnings] == ([pytest.approx(exponent)] if exponent else [])


@pytest.mark.parametrize(
    "rates", [[], [ObservedRate(64, None, 0.1)] * 2, [ObservedRate(64, None, 0.1), ObservedRate(128, None, 0.0)]]
)
def test_too_little_tells_no_power(rates: list[ObservedRate]) -> None:
    assert fit_lr_exponent(rates) is None and warn_script_scales_lr(rates) == []


def test_the_base_of_a_schedule_is_what_counts() -> None:
    warming_up = LearningRates(base=0.4, first=0.001, timed=0.002, last=0.003)
    assert ObservedRate.from_rates(64, warming_up, 0.4) == ObservedRate(64, 0.4, 0.4)
    assert ObservedRate.from_rates(64, result().lr, None) == ObservedRate(64, None, 0.1)
    assert ObservedRate.from_rates(64, None, 0.1) is None


def shards(
    *, content: tuple[str, str] = ("a", "b"), sizes: tuple[int, int] = (160, 160), **more: object
) -> list[RankResult]:
    """Return ranks that each go through a dataset of their own: 20 batches of 8, in steps of two."""
    made = ranks(**more)
    return [
        rank.model_copy(update={"loader": loader(dataset=size, content=part, sampler="R")})
        for rank, size, part in zip(made, sizes, content, strict=True)
    ]


@pytest.mark.parametrize(
    ("seen", "size", "agrees"),
    [
        (shards(), 320, True),
        (shards(sizes=(160, 168)), 328, True),
        (shards(content=("a", "a")), 160, False),  # each goes through all of it
        (shards(content=("", "")), 160, False),
        (shards(content=("", ""), expected=ExpectedValues(world=2, batch=32, dataset=320)), 320, True),
        (shards(expected=ExpectedValues(world=2, batch=32, dataset=330)), 330, True),  # a round figure
        (shards(expected=ExpectedValues(world=2, batch=32, dataset=160)), 160, False),  # what is given wins
    ],
)
def test_steps_of_an_epoch_go_by_what_the_ranks_hold_together(seen: list[RankResult], size: int, agrees: bool) -> None:
    assert find_dataset_size(seen) == size
    assert [mismatch.code for mismatch in list_mismatches(seen)] == ([] if agrees else ["epoch-steps-differ"])


@pytest.mark.parametrize("steps", [93, 94, 106, 107])
def test_a_given_size_may_be_a_twentieth_and_a_step_off(steps: int) -> None:
    expected = ExpectedValues(world=2, batch=32, accumulate=2)
    given, whole = expected.model_copy(update={"dataset": 3200}), loader(dataset=3200, batches=2 * steps)
    (differs,) = list_mismatches(ranks(loader=whole, expected=expected))
    assert (differs.values["observed"], differs.values["is_given"]) == (steps, False)
    mismatches = list_mismatches(ranks(loader=whole, expected=given))
    assert [(m.values["observed"], m.values["is_given"]) for m in mismatches] == [(steps, True)] * (steps in (93, 107))


def test_of_a_stream_a_given_size_counts_and_not_what_it_says_of_itself() -> None:
    stream = loader(dataset=1000, sampler=STREAM_SAMPLER_NAME, batches=60)
    given = ExpectedValues(world=2, batch=32, accumulate=2, dataset=320)
    assert list_mismatches(ranks(loader=stream, expected=given)) == []
    assert figures(list_mismatches(ranks(loader=loader(batches=60)))) == [("epoch-steps-differ", 11, 30)]


def test_a_batch_that_grows_among_the_first_steps_is_seen() -> None:
    growing = (step(),) * 5 + (step(samples=64.0),) * 2
    assert list_mismatches(ranks(timed=growing)) == []
    growing = (step(),) * 4 + (step(samples=64.0),) * 3
    assert list_mismatches(ranks(timed=growing)) == [messages.batch_differs(expected=32, observed=128.0, at_end=True)]


@pytest.mark.parametrize(("seen", "changed"), [(32.0, None), (33.0, None), (64.0, 64.0), (16.0, 16.0), (None, None)])
def test_a_batch_has_changed_once_the_usual_step_is_another(seen: float | None, changed: float | None) -> None:
    assert detect_batch_change(seen, before=32.0) == changed


def test_probes_of_a_script_are_compared_and_its_rates_only_where_they_were_given() -> None:
    def observe(rate: float | None, given: float | None, parameters: int = 10) -> ScriptObservation:
        lr = None if rate is None else LearningRates(base=None, first=rate, timed=rate, last=rate)
        return ScriptObservation(optimizer="SGD", parameters=parameters, lr=lr, lr_given=given)

    def warn(*observations: ScriptObservation | None) -> list[str]:
        probes = [make_probe(Truth(), 1, 16 << at, script=seen) for at, seen in enumerate(observations)]
        return [warning.code for warning in warn_inconsistent_probes(probes)]

    assert warn() == warn(None, None) == []
    assert warn(observe(0.1, 0.1), None, observe(0.1, 0.1)) == []
    assert warn(observe(0.1, None), observe(0.2, None)) == [], "what it does by itself is its own matter"
    assert warn(observe(0.1, 0.1), observe(0.2, 0.1)) == ["script-scales-learning-rate"]
    assert warn(observe(0.1, 0.1), observe(None, 0.1, 12), observe(0.4, 0.1)) == [
        "probes-differ", "script-scales-learning-rate",
    ]  # fmt: skip
