"""Where jobs run, as the rest of tula asks it."""

import pytest

from tula_cli.spec.backend import get_backend
from tula_cli.spec.resources import Cluster


@pytest.mark.parametrize(("kind", "sharing"), [("local", 8), ("slurm", 2), ("site:Scheduler", 2)])
def test_only_the_ranks_of_a_local_job_all_share_a_machine(kind: str, sharing: int) -> None:
    assert get_backend(kind).count_ranks_per_machine(8, gpus_per_node=2) == sharing


@pytest.mark.parametrize(
    ("kind", "requested", "here", "may"),
    [
        ("local", "auto", "cuda", True),
        ("local", "auto", "cpu", False),
        ("local", "auto", None, False),
        ("slurm", "auto", "cpu", True),
        ("slurm", "cpu", "cuda", False),
    ],
)
def test_what_this_machine_has_decides_for_local_jobs_alone(kind: str, requested: str, here: str, may: bool) -> None:
    assert get_backend(kind).may_have_gpu(requested, here=here) is may  # type: ignore[arg-type]


def test_a_users_scheduler_is_waited_for_as_slurm_is_and_has_settings_of_its_own() -> None:
    backend, slurm = get_backend("site:Scheduler"), get_backend("slurm")
    assert backend.has_queue and (backend.grace, backend.file_lag, backend.poll) == (
        slurm.grace,
        slurm.file_lag,
        slurm.poll,
    )
    assert backend.more_memory_advice == "request more with cluster.options"
    assert slurm.more_memory_advice == "request more with cluster.slurm.memory"
    assert not get_backend("local").has_queue


def test_local_ranks_use_the_loopback_interface_unless_the_job_names_another() -> None:
    assert Cluster().network_interface == "lo"
    assert Cluster(interface="ib0").network_interface == "ib0"
    assert Cluster(kind="slurm").network_interface is None
