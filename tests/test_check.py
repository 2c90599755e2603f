"""`tula check`, `tula estimate` and `tula init`; the inspection is a stand-in."""

from pathlib import Path

import pytest

import tula_cli.check
import tula_cli.estimate
from tula_cli.check import check, find_asset, init
from tula_cli.errors import JobFailed, TulaError
from tula_cli.estimate import estimate
from tula_cli.records import Footprint, Inspection
from tula_cli.spec import JobSpec

MB = 10**6


def footprint(local_batch: int) -> Footprint:
    """Return 40 MB that stay, and 2 MB a sample."""
    return Footprint(
        local_batch=local_batch,
        parameters=10 * MB,
        gradients=10 * MB,
        optimizer=10 * MB,
        factors=10 * MB,
        batch=MB // 2 * local_batch,
        activations=3 * MB // 2 * local_batch,
        peak=40 * MB + 2 * MB * local_batch,
    )


def inspection(**changes) -> Inspection:
    values = {
        "dataset_size": 1000,
        "eval_size": 200,
        "classes": 10,
        "sample_shape": (1, 8, 8),
        "parameters": 2_500_000,
        "footprints": (footprint(8), footprint(16)),
        "estimate_error": "",
        "device": "cpu",
        "hardware": "a processor",
        "capacity": None,
        "cpus": 2,
    }
    return Inspection.model_validate({**values, **changes})


@pytest.fixture
def found(monkeypatch):
    """Choose what the inspection finds."""

    def choose(**changes) -> None:
        result = inspection(**changes)
        monkeypatch.setattr(tula_cli.check, "inspect", lambda _: result)
        monkeypatch.setattr(tula_cli.estimate, "inspect", lambda _: result)

    choose()
    return choose


def spec(**sections) -> JobSpec:
    content = {
        "model": {"name": "small_cnn"},
        "dataset": {"name": "digits"},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 1},
        "search": {"nodes": [1, 2], "min_batch": 32, "max_minutes": 6, "max_node_hours": 1},
        "pricing": {"kind": "node_hour", "price": 10.0},
    }
    for name, values in sections.items():
        content[name] = {**content.get(name, {}), **values}
    return JobSpec.model_validate(content)


# --- check


def test_jobs_are_those_of_the_search(found):
    report = check(spec())
    assert [(job.nodes, job.batches) for job in report.jobs] == [(1, (32, 64, 128, 256, 512)), (2, (32, 512))]
    assert report.jobs[1].local_batches == (16, 256)
    assert report.probes == 7
    assert report.problems == ()


def test_bounds_are_jobs_times_nodes_times_their_longest(found):
    report = check(spec())
    assert report.node_hours_at_most == pytest.approx((1 + 2) * 6 / 60)
    assert report.machine_hours_at_most == pytest.approx(2 * 6 / 60)
    assert report.price_at_most == pytest.approx(3.0)


def test_slurm_has_no_machine_hours(found):
    assert check(spec(cluster={"kind": "slurm"})).machine_hours_at_most is None


def test_memory_price_needs_a_capacity(found):
    per_memory = spec(pricing={"kind": "gb_hour", "price": 1.0})
    assert check(per_memory).price_at_most is None
    found(capacity=10**9)
    assert check(per_memory).price_at_most == pytest.approx(0.3)


def test_memory_bounds_the_batches(found):
    found(capacity=200 * MB)
    report = check(spec())
    assert report.largest_local_batch == 70  # (200 x 0.9 - 40) / 2
    assert report.jobs[0].batches == (32, 64)
    assert report.jobs[1].batches == (32, 128)


def test_model_that_does_not_fit_is_a_problem(found):
    found(capacity=30 * MB)
    report = check(spec())
    assert report.jobs == ()
    assert report.largest_local_batch == 0
    assert "memory" in report.problems[0]


def test_batch_beyond_the_dataset_is_a_problem(found):
    found(dataset_size=20)
    assert "larger than the dataset" in check(spec()).problems[0]


def test_batches_that_do_not_divide_are_a_problem(found):
    report = check(spec(search={"nodes": [3]}))
    assert report.jobs == ()
    assert "divides" in report.problems[0]


def test_nodes_without_a_batch_are_left_out_aloud(found):
    report = check(spec(search={"nodes": [1, 3]}))
    assert [job.nodes for job in report.jobs] == [1]
    assert any("3 nodes: left out" in warning for warning in report.warnings)


def test_more_ranks_than_cores_are_a_warning(found):
    assert not any("oversubscribed" in warning for warning in check(spec()).warnings)
    report = check(spec(cluster={"gpus_per_node": 2}))
    assert any("4 ranks share 2 cores" in warning for warning in report.warnings)


def test_more_than_the_cap_is_a_problem(found):
    report = check(spec(search={"max_node_hours": 0.2}))
    assert "0.3 node-hours" in report.problems[0]


def test_missing_cap_is_a_warning(found):
    assert any("max_node_hours" in warning for warning in check(spec(search={"max_node_hours": None})).warnings)


def test_failed_estimate_is_a_warning_and_bounds_nothing(found):
    found(footprints=(), estimate_error="it reads numbers", capacity=10)
    report = check(spec())
    assert report.largest_local_batch is None
    assert report.probes == 7
    assert any("it reads numbers" in warning for warning in report.warnings)


def test_warnings_of_the_inspection_are_passed_on(found):
    found(warnings=("odd",))
    assert "odd" in check(spec()).warnings


def test_offline_nothing_is_built(monkeypatch):
    monkeypatch.setattr(tula_cli.check, "inspect", lambda _: pytest.fail("inspected"))
    assert check(spec(), online=False).jobs == ()
    report = check(spec(search={"max_batch": 64}), online=False)
    assert report.inspection is None
    assert report.jobs[0].batches == (32, 64)


# --- estimate


def test_rows_are_the_local_batches_of_the_search_up_to_the_first_that_does_not_fit(found):
    report = estimate(spec(), capacity=200 * MB)
    assert [row.local_batch for row in report.rows] == [16, 32, 64, 128]
    assert [report.fits(row) for row in report.rows] == [True, True, True, False]
    assert report.largest_local_batch == 70
    assert report.rows[0] == footprint(16)


def test_capacity_of_the_inspection_is_the_default(found):
    found(capacity=100 * MB)
    assert estimate(spec()).largest_local_batch == 25
    assert estimate(spec(), capacity=200 * MB).capacity == 200 * MB


def test_without_a_capacity_nothing_is_said_to_fit(found):
    report = estimate(spec())
    assert report.largest_local_batch is None
    assert report.fits(report.rows[0]) is None


def test_components_add_up_to_the_peak(found):
    for row in estimate(spec()).rows:
        parts = row.parameters + row.gradients + row.optimizer + row.factors + row.batch + row.activations
        assert parts == pytest.approx(row.peak, abs=2)


def test_accumulation_counts_micro_batches(found):
    report = estimate(spec(train={"accumulate": 4}), capacity=200 * MB)
    assert report.largest_local_batch % 4 == 0
    assert report.rows[0].local_batch % 4 == 0


def test_search_without_a_batch_still_tells_memory(found):
    assert [row.local_batch for row in estimate(spec(search={"nodes": [3]})).rows][:3] == [1, 2, 4]


def test_estimate_that_failed_says_why(found):
    found(footprints=(), estimate_error="it reads numbers")
    with pytest.raises(JobFailed, match="it reads numbers"):
        estimate(spec())


# --- init


@pytest.mark.parametrize(("kind", "line"), [("local", "  kind: local"), ("slurm", "  kind: slurm")])
def test_templates_name_their_cluster(kind, line):
    assert any(text.startswith(line) for text in init(kind).splitlines())


def test_local_template_mentions_every_setting():
    text = init("local")
    schema = JobSpec.model_json_schema()
    for name, section in schema["$defs"].items():
        if name not in ("Slurm", "Every"):
            missing = [key for key in section["properties"] if f"{key}:" not in text]
            assert not missing, (name, missing)


def test_slurm_template_mentions_the_usual_options():
    text = init("slurm")
    for key in ("partition", "account", "qos", "constraint", "minutes", "cpus_per_task", "memory", "setup", "extra"):
        assert f"{key}:" in text


def test_asset_inside_the_package_comes_first(tmp_path, monkeypatch):
    package = tmp_path / "tula_cli"
    for folder in (tmp_path, package):
        (folder / "configs").mkdir(parents=True)
        (folder / "configs" / "a.yaml").write_text("a: 1\n", encoding="utf-8")
    monkeypatch.setattr(tula_cli.check, "_PACKAGE", package)
    assert find_asset("configs/a.yaml") == package / "configs" / "a.yaml"
    (package / "configs" / "a.yaml").unlink()
    assert find_asset("configs/a.yaml") == tmp_path / "configs" / "a.yaml"


def test_missing_asset_is_an_error():
    with pytest.raises(TulaError, match="lacks templates/none"):
        find_asset("templates/none")


def test_assets_of_this_checkout_are_found():
    assert find_asset("configs/quickstart.yaml").is_relative_to(Path(tula_cli.check.__file__).parent.parent)
